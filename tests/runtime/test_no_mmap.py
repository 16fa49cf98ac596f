"""Weights in memory rather than in the mapped file: --no-mmap of m3-run and m3-bench, `Model(mmap=False)`."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m3_runtime import Model, bench_cli, cli, command, memory
from m3_runtime.errors import CancelledError, InputError
from m3_runtime.native import lib
from tiny_model import convert

IDS = np.arange(40, 140, dtype=np.int32)


def logits(path: Path, *, mmap: bool) -> np.ndarray:
    with Model(path, device="cpu", mmap=mmap) as model, model.session(context=256) as session:
        return session.eval(IDS, all_logits=True)


def test_the_same_numbers(tiny_q8_gguf: Path) -> None:
    assert np.array_equal(logits(tiny_q8_gguf, mmap=False), logits(tiny_q8_gguf, mmap=True))


def test_several_files(tiny_checkpoint: Path, tmp_path: Path, tiny_q8_gguf: Path) -> None:
    convert(tiny_checkpoint, tmp_path / "split.gguf", "--type", "q8_0", "--split-max-size", "1M")
    assert len(list(tmp_path.glob("*.gguf"))) > 1
    assert np.array_equal(logits(tmp_path, mmap=False), logits(tiny_q8_gguf, mmap=True))


def test_loading_tells_how_far_it_is_and_is_done_once(tiny_gguf: Path) -> None:
    with Model(tiny_gguf, device="cpu", mmap=False) as model:
        model.load()
        assert model.load_progress() == (model.weight_bytes,) * 2
        model.load()
        assert model.load_progress() == (0, 0)


def test_a_window_of_layers_reads_only_these(tiny_gguf: Path) -> None:
    with Model(tiny_gguf, device="cpu", mmap=False) as model:
        with model.session(context=64, layers=(1, 1)):
            _, first = model.load_progress()
        with model.session(context=64, layers=(0, 3)):
            _, rest = model.load_progress()
    assert 0 < first < rest
    assert first + rest == model.weight_bytes


def test_a_file_that_loses_its_end_later_does_no_harm(tiny_gguf: Path, tmp_path: Path) -> None:
    """What would be a SIGBUS in a mapped file."""
    path = Path(shutil.copy(tiny_gguf, tmp_path / "cut.gguf"))
    with Model(path, device="cpu", mmap=False) as model:
        model.load()
        os.truncate(path, path.stat().st_size // 2)
        with model.session(context=256) as session:
            assert np.array_equal(session.eval(IDS, all_logits=True), logits(tiny_gguf, mmap=True))


@pytest.mark.parametrize("change", ["cut", "replace", "remove"])
def test_a_file_that_changed_since_it_was_opened(tiny_gguf: Path, tmp_path: Path, change: str) -> None:
    path = Path(shutil.copy(tiny_gguf, tmp_path / "changed.gguf"))
    with Model(path, device="cpu", mmap=False) as model:
        if change == "cut":
            os.truncate(path, path.stat().st_size - 1)
        elif change == "replace":
            Path(shutil.copy(tiny_gguf, tmp_path / "other.gguf")).replace(path)
        else:
            path.unlink()
        want = "cannot be opened" if change == "remove" else "is another file than the one that was opened before"
        with pytest.raises(InputError, match=re.escape(f"{path}: {want}")):
            model.load()


def cancelled(model: Model) -> bool:
    """Loads while another thread cancels all the time. False if the load was over before that had a turn."""
    stop = threading.Event()

    def cancel() -> None:
        while not stop.is_set():
            lib.m3_model_cancel_load(model._open_pointer())

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        model.load()
    except CancelledError as error:
        assert str(error) == "loading the weights was cancelled"
        return True
    finally:
        stop.set()
        thread.join()
    return False


def test_a_cancelled_load_leaves_nothing_and_can_be_repeated(tiny_gguf: Path) -> None:
    for _ in range(100):
        with Model(tiny_gguf, device="cpu", mmap=False) as model:
            if not cancelled(model):
                continue
            model.load()
            assert model.load_progress() == (model.weight_bytes,) * 2
            with model.session(context=256) as session:
                assert np.array_equal(session.eval(IDS, all_logits=True), logits(tiny_gguf, mmap=True))
            return
    pytest.fail("none of 100 loads was cancelled")


Runner = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs a command in this process: exit code, stdout, stderr."""

    def runner(name: str, *arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        module = {"m3-run": cli, "m3-bench": bench_cli}[name]
        with pytest.raises(SystemExit) as exit_:
            command.run(module.app, name, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, out, err

    return runner


def test_m3_run(run: Runner, tiny_q8_gguf: Path) -> None:
    options = ("-p", "Hello", "-n", 5, "--seed", 1, "--json", "--device", "cpu", "--context", 512)
    reports = []
    for more in ((), ("--no-mmap",)):
        code, out, _ = run("m3-run", tiny_q8_gguf, *options, *more)
        assert code == 0
        reports.append(json.loads(out))
    assert [report["mmap"] for report in reports] == [True, False]
    assert reports[0]["answer"] == reports[1]["answer"]
    assert reports[0]["thinking"] == reports[1]["thinking"]


def test_m3_bench(run: Runner, tiny_q8_gguf: Path) -> None:
    options = ("--depth", 0, "-p", 8, "-n", 2, "--repeats", 1, "--device", "cpu", "--no-mmap", "--json")
    code, out, _ = run("m3-bench", tiny_q8_gguf, *options)
    report = json.loads(out)
    assert (code, report["mmap"], len(report["measurements"])) == (0, False, 2)


@pytest.mark.parametrize("name", ["m3-run", "m3-bench"])
def test_weights_that_do_not_fit(run: Runner, tiny_q8_gguf: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    options = ("-p", "Hello") if name == "m3-run" else ()
    code, out, err = run(name, tiny_q8_gguf, "--no-mmap", "--device", "cpu", *options)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert re.search(r"not enough memory: the weights take [\d.]+ MB, 1.0 kB are free", err)
