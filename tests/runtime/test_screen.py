"""What a person sees of a reply, and what a pipe gets."""

import io

import pytest

from m3_runtime.reply import Kind, Piece
from m3_runtime.screen import PrefillProgress, Screen, ThinkingView

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Stream(io.StringIO):
    def __init__(self, terminal: bool, log: list[str] | None = None) -> None:
        super().__init__()
        self.terminal = terminal
        self.log = log

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.log is not None:
            self.log.append(text)
        return super().write(text)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


THINKING, TEXT, TOOL = (lambda text, kind=kind: Piece(kind, text) for kind in (Kind.THINKING, Kind.TEXT, Kind.TOOL))


def shown(pieces: list[Piece], out_terminal: bool, err_terminal: bool) -> tuple[str, str]:
    out, err = Stream(out_terminal), Stream(err_terminal)
    screen = Screen(out, err)
    for piece in pieces:
        screen.show(piece)
    screen.end()
    return out.getvalue(), err.getvalue()


def on_terminal(pieces: list[Piece]) -> str:
    """Both streams on one terminal."""
    log: list[str] = []
    screen = Screen(Stream(True, log), Stream(True, log))
    for piece in pieces:
        screen.show(piece)
    screen.end()
    return "".join(log)


def test_thinking_is_dimmed_on_a_terminal_and_the_answer_has_its_own_line():
    pieces = [THINKING("hm"), THINKING(" so"), TEXT("\n\nYes"), TEXT(" it is")]
    assert on_terminal(pieces) == f"{DIM}hm{PLAIN}{DIM} so{PLAIN}\nYes it is\n"


def test_in_a_pipe_the_answer_is_exact_and_nothing_is_coloured():
    pieces = [THINKING("hm"), TEXT("\n\nYes\x1b[31m\r"), TEXT(" it is")]
    assert shown(pieces, False, False) == ("\n\nYes\x1b[31m\r it is\n", "hm\n")


def test_an_answer_that_ends_its_line_gets_no_second_one():
    assert shown([TEXT("Yes\n")], False, False) == ("Yes\n", "")


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("NO_COLOR", "1")])
def test_no_escape_sequences_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    assert on_terminal([THINKING("hm"), TEXT("Yes")]) == "hm\nYes\n"


def test_a_reply_cannot_steer_the_terminal():
    text = "a\x1b[2Jb\rc\x07d\x9be\tf\n"
    assert on_terminal([TEXT(text)]) == "a\ufffd[2Jb\ufffdc\ufffdd\ufffde\tf\n"
    assert on_terminal([THINKING("\x1b]0;x")]) == f"{DIM}\ufffd]0;x{PLAIN}\n"


NS = "]<]minimax[>["
CALL = (
    f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<a>1{NS}</a>{NS}<b>{NS}<item>x{NS}</item>{NS}</b>'
    f"{NS}</invoke>\n{NS}</tool_call>"
)


def test_tool_calls_are_told_without_their_markup_and_never_on_stdout():
    pieces = [TEXT("Let me look."), *(TOOL(letter) for letter in CALL), TEXT("Done")]
    out, err = shown(pieces, False, False)
    assert out == "Let me look.Done\n"
    assert err == 'tool call, not executed: f(a="1", b=["x"])\n'
    assert on_terminal(pieces) == f"Let me look.\n{err}Done\n"


def test_a_broken_tool_call_is_told():
    out, err = shown([TEXT("a"), TOOL(CALL[:60])], False, False)
    assert out == "a\n"
    assert err == 'broken tool call, not executed (it is not finished): <tool_call> <invoke name="f">\n'


def test_folded_thinking_is_one_line():
    clock = Clock()

    def fold(terminal: bool) -> str:
        log: list[str] = []
        screen = Screen(Stream(terminal, log), Stream(terminal, log), clock)
        screen.thinking = ThinkingView.FOLD
        for piece in (THINKING("hm hm"), THINKING(" so"), TEXT("Yes")):
            screen.show(piece)
            clock.now += 1.0
        screen.end()
        return "".join(log)

    assert fold(False) == "(thought: 8 characters, 2.0 s; /thinking last shows it)\nYes\n"
    assert fold(True) == (
        "thinking: 5 characters, 0.0 s\rthinking: 8 characters, 1.0 s"
        "\r(thought: 8 characters, 2.0 s; /thinking last shows it)\nYes\n"
    )


def test_late_thinking_is_said():
    assert shown([TEXT("plan"), Piece(Kind.RECLASSIFY, ""), TEXT("answer")], False, False) == (
        "plananswer\n",
        "(the text above was thinking)\n",
    )
    assert on_terminal([TEXT("plan"), Piece(Kind.RECLASSIFY, ""), TEXT("answer")]) == (
        "plan\n(the text above was thinking)\nanswer\n"
    )


def test_a_note_starts_on_its_own_line():
    log: list[str] = []
    screen = Screen(Stream(True, log), Stream(True, log))
    screen.show(TEXT("half"))
    screen.note("(stopped)")
    screen.end()
    assert "".join(log) == "half\n(stopped)\n"


def progress_lines(terminal: bool, times: list[float]) -> str:
    clock, err = Clock(), Stream(terminal)
    progress = PrefillProgress(err, 1000, clock)
    for i, at in enumerate(times, 1):
        clock.now = 100.0 + at
        progress(i, len(times))
    progress.clear()
    return err.getvalue()


def test_a_short_prefill_says_nothing():
    assert progress_lines(False, [0.1, 0.5, 1.4]) == ""


def test_a_long_prefill_reports_at_least_every_two_seconds():
    lines = progress_lines(False, [i * 0.1 for i in range(1, 101)]).splitlines()
    assert lines[0] == "prefill: 15% of 1000 tokens, 100.0 tok/s, 8.5 s left"
    assert len(lines) >= 5


def test_on_a_terminal_the_line_is_rewritten_and_removed():
    text = progress_lines(True, [2.0, 4.0])
    assert text.startswith("\rprefill: 50% of 1000 tokens")
    assert "\n" not in text
    assert text.endswith("\r" + " " * len("prefill: 100% of 1000 tokens, 250.0 tok/s, 0.0 s left") + "\r")
