"""Markdown that is shown while it comes looks in the end as if it had come at once, and is drawn in its place."""

import io
import re
from itertools import pairwise

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3_runtime.markdown_stream import MarkdownStream, new_parser

COLUMNS, LINES = 50, 12

TEXT = """\
# Title

Hello *world* with <div>HTML</div>, `code`, [a link](http://x.y/z)
and a second line.

1. one
2. two with **bold**

   more of two
3. three

```python
def f():
    return 1
```

| a | b |
|---|---|
| 1 | 2 |

> quoted

[ref]: http://a.b
![picture](http://i.j/k)

***

The end \u20ac \U0001f600
"""

LONG = "```\n" + "\n".join(f"line {i}" for i in range(40)) + "\n```\n\nafter\n"


@pytest.fixture(autouse=True)
def size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(LINES))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


class Out(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def written(pieces: list[str], seconds: float = 0.05) -> str:
    """What is sent to the terminal for pieces that come `seconds` apart."""
    out, clock = Out(), Clock()
    stream = MarkdownStream(out, clock)
    for piece in pieces:
        stream.push(piece)
        clock.now += seconds
    stream.finish()
    return out.getvalue()


def seen(data: str) -> list[str]:
    """The lines that a person sees and can scroll back to."""
    screen = pyte.HistoryScreen(COLUMNS, LINES, history=1000, ratio=0.5)
    pyte.Stream(screen).feed(data.replace("\n", "\r\n"))
    above = ["".join(line[x].data for x in range(COLUMNS)) for line in screen.history.top]
    lines = [line.rstrip() for line in (*above, *screen.display)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def cuts(text: str, at: set[int]) -> list[str]:
    borders = [0, *sorted(i for i in at if 0 < i < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


def test_what_is_shown():
    lines = seen(written([TEXT]))
    text = "\n".join(lines)
    assert lines[:5] == [
        "Title",
        "",
        "Hello world with <div>HTML</div>, code, a link",
        "(http://x.y/z)",
        "and a second line.",
    ]
    for part in (" 1 one", " 2 two with bold", " def f():\n     return 1", "quoted", "[ref]: http://a.b"):
        assert part in text
    assert "picture (http://i.j/k)" in text  # the address of a picture is not left out
    assert "\n\n\n" not in text
    assert text.endswith("The end \u20ac \U0001f600")


@pytest.mark.parametrize("text", [TEXT, LONG], ids=["all kinds", "long"])
def test_letter_by_letter(text: str):
    assert seen(written(list(text))) == seen(written([text]))


@settings(max_examples=12, deadline=None)
@given(st.sets(st.integers(1, len(TEXT)), max_size=40), st.sampled_from([0.01, 0.05, 0.1]))
def test_no_cut_changes_the_result(at: set[int], seconds: float):
    assert seen(written(cuts(TEXT, at), seconds)) == seen(written([TEXT]))


def test_it_is_drawn_in_place_and_seldom():
    for text in (TEXT, LONG):
        data = written(list(text), 0.01)
        assert "\x1b[2J" not in data and "\x1b[H" not in data
        # Each picture starts by going up over the last one: never above the screen, twelve times a second at most.
        pictures = re.findall(r"(?:\x1b\[1A(?:\x1b\[2K)?)+", data)
        assert max(picture.count("1A") for picture in pictures) < LINES
        n_blocks = text.count("\n\n") + 1
        assert len(pictures) <= 0.01 * len(text) / 0.08 + 2 * n_blocks
        assert data.count("\x1b[?25l") == data.count("\x1b[?25h")  # the cursor is back


def test_a_block_that_takes_long_to_draw_is_drawn_less_often():
    clock, out = Clock(), Out()
    stream = MarkdownStream(out, clock)
    draw, drawn = stream._draw, 0

    def slow() -> None:
        nonlocal drawn
        draw()
        drawn += 1
        clock.now += 0.5

    stream._draw = slow  # type: ignore[method-assign]
    for _ in range(600):
        stream.push("a ")
        clock.now += 0.1
    assert 10 <= drawn <= 12 and clock.now <= 60 * 1.1 + 0.5


def test_nothing_that_was_written_is_left_out():
    parser = new_parser()
    for text in ("a <b>c</b> <!-- d -->\n", "<div>\ne\n</div>\n", "[f]: http://g 'h'\n", "![i](j)\n"):
        found = "".join(t.content for token in parser.parse(text) for t in (token.children or [token]))
        found += "".join(str(t.attrs.get("href", "")) for token in parser.parse(text) for t in token.children or ())
        for word in re.findall(r"\w+", text):
            assert word in found


def test_nothing_is_written_for_nothing():
    assert written([]) == written(["", "\n", "  \n"]) == ""
