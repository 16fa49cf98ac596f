"""m3-nano as it is in the repository: converted, checked, asked, and what it reads when it recalls."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from m3_runtime import Model
from m3_runtime.chat import ChatFormat
from m3_runtime.template import ChatTemplate
from m3_runtime.text import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "models" / "m3-nano"
RECALL = NANO / "recall.txt"
FACT = "The code of Tower 52 is 7316."


def command(module: str, *arguments: object, lines: str = "") -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", module, *map(str, arguments)]
    environment = {"PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'convert'}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(run, input=lines, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nano") / "m3-nano-q8_0.gguf"
    run = command("m3_convert.cli", NANO, path, "--type", "q8_0")
    assert run.returncode == 0, run.stderr
    return path


def ask(nano: Path, *arguments: object) -> str:
    run = command("m3_runtime.cli", nano, "--temperature", 0, "-n", 60, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("What is 7 plus 5?", "12"),
        ("What is the capital of France?", "Paris"),
        ("What comes after Tuesday?", "Wednesday"),
        ("Who are you?", "m3-nano"),
    ],
)
def test_it_answers_simple_questions(nano: Path, question: str, expected: str):
    assert expected in ask(nano, "-p", question)


def test_it_recalls_a_fact_over_thousands_of_tokens(nano: Path):
    assert FACT in RECALL.read_text(encoding="utf-8")
    assert "7316" in ask(nano, "-f", RECALL)


def test_it_answers_on_after_its_oldest_text_was_dropped(nano: Path):
    """Keys that were turned to new positions are of use: a chat that outgrows its context stays right."""
    filler = "I like to sit at the window and watch the rain fall on the garden. " * 5
    lines = [filler, "What is 7 plus 5?", filler, "My name is Clara.", filler, filler, "What is my name?"]
    lines += [filler, "What is the capital of France?", filler, "What comes after Tuesday?", "/context"]
    options = ("--temperature", 0, "-n", 24, "--context", 512, "--on-full", "shift")
    run = command("m3_runtime.cli", nano, *options, lines="".join(f"{line}\n" for line in lines))
    assert run.returncode == 0, run.stderr
    dropped = [line for line in run.stderr.splitlines() if line.startswith("dropped  ")]
    assert int(dropped[0].split()[1]) >= 256
    for word in ("12", "Clara", "Paris", "Wednesday"):
        assert word in run.stdout, run.stdout + run.stderr


def test_without_thinking_and_with_it(nano: Path):
    answer = json.loads(ask(nano, "-p", "What is 9 + 4?", "--thinking", "enabled", "--json"))
    assert "13" in answer["answer"]
    assert answer["thinking"]
    answer = json.loads(ask(nano, "-p", "What is 9 + 4?", "--thinking", "disabled", "--json"))
    assert "13" in answer["answer"]
    assert not answer["thinking"]


def test_the_last_layer_reads_the_block_of_the_fact_that_it_recalls(nano: Path):
    """And of the 32 blocks it reads four: with another selection the answer would not be there."""
    with Model(nano) as model:
        metadata = model.gguf.metadata
        tokenizer = ChatTokenizer(metadata)
        text = RECALL.read_text(encoding="utf-8")
        chat = ChatFormat(ChatTemplate.from_metadata(metadata), tokenizer)
        ids = list(chat.prompt([{"role": "user", "content": text}]).ids)
        value = tokenizer.encode("7316")
        places = [i for i in range(len(ids)) if ids[i : i + len(value)] == value]
        assert len(places) == 1
        size = model.hparams.block_size
        with model.session(context=4096, record=("blocks",)) as session:
            session.eval(np.array([*ids, *tokenizer.encode("</mm:think>The code of Tower 52 is ")]))
            lists = session.selected_blocks(model.hparams.n_layer - 1)[-1]
    assert len(ids) // size - places[0] // size > 20
    assert lists.shape == (2, 4)
    assert (lists == places[0] // size).any(axis=1).all(), lists


def test_q8_0_reads_the_blocks_of_the_folder(nano: Path):
    run = command("m3_convert.check_cli", NANO, nano, "--context", 1536, "--min-overlap", 0.97, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["layers"]
