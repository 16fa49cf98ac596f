"""Chats that are saved and gone on with, and full contexts, with m3-run on a real file."""

import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

import m3_runtime.cli
from m3_runtime import command
from m3_runtime.quantities import format_bytes

TURN = "word " * 60
Chat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(tiny_gguf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chat:
    """m3-run at temperature 0, in this process, with lines from a pipe: exit code, stdout, stderr behind the status."""
    source = tmp_path / "lines"

    def run(*lines: str, options: tuple[object, ...] = ()) -> tuple[int, str, str]:
        source.write_text("".join(f"{line}\n" for line in lines))
        capsys.readouterr()
        arguments = [tiny_gguf, "--temperature", 0, "--thinking", "disabled", "-n", 6, *options]
        with source.open() as stdin, pytest.raises(SystemExit) as exit_:
            monkeypatch.setattr("sys.stdin", stdin)
            command.run(m3_runtime.cli.app, m3_runtime.cli.NAME, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int) and "Traceback" not in err
        return exit_.value.code, out, err.partition("\n")[2]

    return run


def prompts(err: str) -> list[tuple[int, int]]:
    """Of each /stats: tokens of the last prompt that were evaluated, and that were there."""
    found = re.findall(r"last prompt: (\d+) tokens at [\d.]+ tok/s, (\d+) reused", err)
    return [(int(evaluated), int(reused)) for evaluated, reused in found]


def test_a_saved_chat_goes_on_in_another_process_without_a_prefill(chat: Chat, tmp_path: Path):
    file = tmp_path / "chat.m3"
    _, whole, told = chat("Hello", "Again", "/stats")
    code, first, err = chat("Hello", f"/save {file}")
    assert code == 0
    size = file.stat().st_size
    assert re.search(rf"^\(saved to {file}: 1 turns, \d+ tokens, {re.escape(format_bytes(size))}\)$", err, re.MULTILINE)
    code, second, err = chat(f"/load {file}", "Again", "/stats", "/undo", "/undo", "/undo")
    assert (code, first + second) == (0, whole)
    assert f'({file}: 1 turns; the last one: "Hello"; ' in err
    assert prompts(err) == prompts(told)  # nothing of the first turn was evaluated again
    assert err.count("(took back ") == 2  # its turns are there too


@pytest.mark.parametrize("options", [("--kv-type", "q8_0"), ("--index-type", "f16"), ("--context", 128)])
def test_a_file_of_other_settings_is_refused_and_the_chat_goes_on(chat: Chat, tmp_path: Path, options: tuple[str, str]):
    file = tmp_path / "chat.m3"
    chat("Hello", TURN, f"/save {file}")
    alone = chat("Again", options=options)[1]
    code, out, err = chat(f"/load {file}", "Again", options=options)
    assert (code, out) == (2, alone)
    assert f"\nm3-run: {file}: " in err


def test_a_damaged_file_is_refused_and_the_chat_goes_on(chat: Chat, tmp_path: Path):
    file = tmp_path / "chat.m3"
    _, whole, _ = chat("Hello", "Again")
    chat("Hello", f"/save {file}")
    data = bytearray(file.read_bytes())
    (tmp_path / "cut").write_bytes(data[:-1])
    data[-40] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    (tmp_path / "text").write_text("no session")
    code, out, err = chat(
        "Hello", *(f"/load {tmp_path}/{name}" for name in ("cut", "flipped", "text", "none")), "Again"
    )
    assert (code, out) == (2, whole)  # evaluated again where the cache was lost
    for text in (
        "cut: is cut off: ",
        "flipped: page 2 is damaged: ",
        "text: not a saved session",
        "none: cannot be read: No such file or directory",
    ):
        assert f"m3-run: {tmp_path}/{text}" in err, err
    assert not list(tmp_path.glob("*.part"))


def test_a_file_that_cannot_be_written_leaves_the_chat_alive(chat: Chat, tmp_path: Path):
    code, out, err = chat(f"/save {tmp_path}/none/x", "Hello")
    assert code == 2 and out.strip()
    assert f"m3-run: {tmp_path}/none/x: cannot be written: No such file or directory" in err


def test_a_file_that_is_no_chat_is_not_replaced(chat: Chat, tmp_path: Path):
    notes, file = tmp_path / "notes.txt", tmp_path / "chat.m3"
    notes.write_text("mine")
    code, _, err = chat("Hello", f"/save {notes}", f"/save {tmp_path}", f"/save {file}", f"/save {file}")
    assert code == 2 and notes.read_text() == "mine"
    assert f"m3-run: {notes}: not a saved session; it is not replaced" in err
    assert f"m3-run: {tmp_path}: expected a saved session, found no regular file; it is not replaced" in err
    assert err.count(f"(saved to {file}: ") == 2


def test_a_full_disk_leaves_the_chat_and_the_earlier_file_alone(chat: Chat, tmp_path: Path):
    file = tmp_path / "chat.m3"
    chat("Hello", f"/save {file}")
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, out, err = chat("Other", f"/save {file}", "More")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and len(out.splitlines()) >= 2
    assert f"m3-run: {file}: cannot be written: File too large" in err
    assert file.read_bytes() == before and not list(tmp_path.glob("*.part"))


def test_a_full_context_stops_and_the_chat_can_still_be_saved(chat: Chat, tmp_path: Path):
    file = tmp_path / "chat.m3"
    lines = (TURN, TURN, TURN, TURN, "/context", f"/save {file}")
    code, out, err = chat(*lines, options=("--context", 512))
    assert code == 2 and out.strip()
    assert re.search(r"context full: the prompt has \d{3} tokens, the context holds 512; the chat goes on without", err)
    used = re.search(r"used     (\d+) of 512 tokens, (\d+) left", err)
    assert used is not None and int(used[1]) + int(used[2]) == 512
    assert "(saved to " in err
    assert chat(f"/load {file}", "/context", options=("--context", 512))[0] == 0


def test_a_shift_goes_on_and_says_what_it_dropped(chat: Chat, tmp_path: Path):
    file = tmp_path / "chat.m3"
    options = ("--context", 512, "--on-full", "shift", "--keep", 100)
    lines = [f"{i} {TURN}" for i in range(6)]
    code, out, err = chat(*lines, "/context", f"/save {file}", "More", "/stats", options=options)
    assert code == 0 and len(out.splitlines()) >= 7
    (pinned,) = {int(n) for n in re.findall(r"pinned   (\d+) tokens", err)}
    assert pinned % 32 == 0 and pinned >= 100
    told = re.findall(r"dropped the oldest text behind the first (\d+) tokens: (.+); (\d+) tokens in all\)", err)
    assert told and all(int(n) == pinned for n, _, _ in told)
    (dropped,) = {int(n) for n in re.findall(r"dropped  (\d+) tokens of this conversation", err)}
    assert dropped % 32 == 0 and str(dropped) in {n for _, _, n in told}
    assert "word" in told[0][1]
    # Turns that follow a shift evaluate no more than what is new; so does another process.
    evaluated, reused = prompts(err)[-1]
    assert evaluated < 40 and reused > 200
    code, out_2, err_2 = chat(f"/load {file}", "/context", "More", "/stats", options=options)
    assert (code, out_2) == (0, out[-len(out_2) :])
    assert f"dropped  {dropped} tokens of this conversation" in err_2
    assert prompts(err_2)[-1] == (evaluated, reused)
    # Where nothing may be dropped the conversation does not fit any more; what is pinned is reused.
    code, _, err_3 = chat(f"/load {file}", "/context", "More", options=("--context", 512))
    assert (
        code == 2 and f"used     {pinned} of 512 tokens" in err_3 and "m3-run: context full: the prompt has " in err_3
    )


def test_a_shift_in_one_long_answer(chat: Chat, tiny_gguf: Path):
    code, out, err = chat(options=("--context", 256, "--on-full", "shift", "-p", "Hi", "-n", 250, "--seed", 1))
    assert code == 0 and out.strip()
    assert re.search(r"^m3-run: context full: dropped \d+ tokens behind the first \d+$", err, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--keep", 100), "--keep needs --on-full shift"),
        (("--on-full", "shift", "--keep", 400, "--context", 448), "--on-full shift: 416 tokens are pinned"),
        (("--on-full", "forget"), "'--on-full'"),
        (("--plain", "-p", "a"), "--plain is for the chat, without -p and -f"),
    ],
)
def test_policies_that_make_no_sense(
    tiny_gguf: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], message: str
):
    with pytest.raises(SystemExit) as exit_:
        command.run(m3_runtime.cli.app, m3_runtime.cli.NAME, [str(tiny_gguf), *map(str, options)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_book_is_read_once(chat: Chat, tmp_path: Path):
    book = tmp_path / "book.txt"
    book.write_text("It was the best of times, it was the worst of times. " * 40)
    code, out, err = chat(f"/read {book}", "What was it?", "/stats", "/undo", "What else?", "/stats")
    assert code == 0 and len(out.splitlines()) >= 2
    assert re.search(
        r"^\(book\.txt: \d+ tokens read at [\d.]+ tok/s; \d+/4096 tokens; the next message asks about it\)$", err, re.M
    )
    assert all(evaluated < 40 and reused > 400 for evaluated, reused in prompts(err))
    code, _, err = chat(f"/read {book}", options=("--context", 400))
    assert code == 2
    assert re.search(r"book\.txt: \d+ tokens, \d+ stand before it and a question needs 64; the context holds 400", err)
