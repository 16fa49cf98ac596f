"""Training rows: the mix of corpus text, generated documents and chats, and the fixed rows of the evaluation.

    python rows.py DATA_DIR [--ctx N]

prints a row of every kind and the rows that one core makes in a second.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from chats import ChatFormat, Chats, ai_weight
from documents import TEXT_WEIGHT, Documents, Filler, Sheet, sample_exams
from exchanges import Definitions
from facts import ExamPlan
from vocabulary import Encoded, encode, read_ids, unmark

TEMPLATE = Path(__file__).resolve().parent.parent / "chat_template.jinja"
HELD_OUT = Path("train", "heldout.xz")  #: in a published folder
LEAST_DOCUMENT = 320  #: tokens; a shorter rest of a row is filled with text

_NOWHERE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Row:
    """One row of training.

    ids int32 [ctx+1]. weight float32 [ctx+1]: of the loss of predicting ids[i]; index 0 is not used. answer int16
    [ctx+1]: k on the value of the k-th answer, k from 1, else 0. fact_at, asked_at int32 [answers]: the index in ids
    of the first token of the value where it was stated (-1: nowhere in a document) and of the answer.
    """

    ids: NDArray[np.int32]
    weight: NDArray[np.float32]
    answer: NDArray[np.int16]
    kind: str
    fact_at: NDArray[np.int32] = field(default_factory=lambda: _NOWHERE)
    asked_at: NDArray[np.int32] = field(default_factory=lambda: _NOWHERE)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the kinds of rows; they are divided by their sum."""

    text: float = 0.42
    recall: float = 0.25
    facts: float = 0.05
    copy: float = 0.04
    store: float = 0.06
    chat: float = 0.18


@dataclass(frozen=True)
class Data:
    """What rows are made of."""

    tokenizer: Tokenizer
    filler: Filler
    definitions: Definitions
    format: ChatFormat

    @classmethod
    def load(cls, folder: Path, *, held_out: bool = False) -> "Data":
        """Reads the data folder; held_out: with the held-out text in place of the training text."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stream = np.load(folder / "heldout.npy") if held_out else read_ids(folder / "train.xz")
        definitions = json.loads((folder / "definitions.json").read_text(encoding="utf-8"))
        return cls(tokenizer, Filler(tokenizer, stream), definitions, ChatFormat(TEMPLATE.read_text(encoding="utf-8")))

    @classmethod
    def of_release(cls, folder: Path) -> "Data":
        """What the evaluation needs, from the published folder alone: its tokenizer and the held-out text of train/."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stream = read_ids(folder / HELD_OUT)
        return cls(tokenizer, Filler(tokenizer, stream), [], ChatFormat(TEMPLATE.read_text(encoding="utf-8")))


class Rows:
    """An endless stream of rows; equal seeds give equal rows. Different seeds can share one Data."""

    def __init__(
        self, data: Data, *, ctx: int, seed: int, shares: Shares | None = None, held_out: bool = False
    ) -> None:
        """ctx: tokens of context; a row has one more. held_out: with the names of the evaluation."""
        self.ctx = ctx
        self._data = data
        self._random = Random(f"{'held out' if held_out else 'train'} {seed}")
        self._documents = Documents(data.tokenizer, data.filler, data.format, self._random, held_out=held_out)
        self._chats = Chats(data.format, data.definitions, self._random)
        shares = shares or Shares()
        self._shares: dict[str, float] = {item.name: getattr(shares, item.name) for item in fields(shares)}

    def row(self, kind: str | None = None) -> Row:
        """The next row; kind: one of the names in Shares."""
        if kind is None:
            (kind,) = self._random.choices(list(self._shares), list(self._shares.values()))
        sheet = Sheet(self.ctx + 1)
        if kind == "chat":
            self._write_chats(sheet)
        elif kind != "text":
            self._write_documents(sheet, kind)
        return self._finish(sheet, kind)

    def batch(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int16]]:
        """ids, weight and answer of the next `count` rows, each [count, ctx+1]."""
        rows = [self.row() for _ in range(count)]
        return (
            np.stack([row.ids for row in rows]),
            np.stack([row.weight for row in rows]),
            np.stack([row.answer for row in rows]),
        )

    def recall_row(self, kind: str, plan: ExamPlan, *, chat: bool) -> Row:
        """A row with one document that fills it."""
        sheet = Sheet(self.ctx + 1)
        self._documents.recall(sheet, sheet.size, plan=plan, chat=chat)
        return self._finish(sheet, kind)

    def _finish(self, sheet: Sheet, kind: str) -> Row:
        if sheet.room:
            sheet.write(self._data.filler.text(self._random, sheet.room), TEXT_WEIGHT)
        at = np.array([sheet.fact_at, sheet.asked_at], np.int32)
        return Row(sheet.ids, sheet.weight, sheet.answer, kind, at[0], at[1])

    def _write_documents(self, sheet: Sheet, kind: str) -> None:
        """One document as long as the row, or shorter ones."""
        write: Callable[[Sheet, int], None] = getattr(self._documents, kind)
        while sheet.room >= min(LEAST_DOCUMENT, sheet.size):
            length = sheet.room
            if length > LEAST_DOCUMENT and self._random.random() < 0.3:
                length = self._random.randint(LEAST_DOCUMENT, length)
            write(sheet, length)

    def _write_chats(self, sheet: Sheet) -> None:
        text = ""
        goal = 4 * sheet.size
        encoded = Encoded(sheet.ids[:0], np.empty((0, 2), np.int32))
        while len(encoded.ids) < sheet.size:
            while len(text) < goal:
                text += self._chats.draw(goal - len(text), self._passage)
            goal += sheet.size
            encoded = encode(self._data.tokenizer, text)
        sheet.write_answers(encoded, ai_weight(self._data.tokenizer, encoded.ids), [-1] * len(encoded.spans))

    def _passage(self, characters: int) -> str:
        """About so much text of the filler."""
        filler = self._data.filler
        start, stop = filler.window(self._random, max(40, min(characters // 3, self.ctx)))
        return unmark(self._data.tokenizer.decode(filler.ids[start:stop].tolist())).strip()


RECALL = ExamPlan(facts=16, questions=8, alike=False, codes_only=True, single=1, pair=0, hop=0, reverse=0, unknown=0)
HARD = ExamPlan(
    facts=48, questions=12, alike=True, codes_only=True, single=0.5, pair=0.25, hop=0.25, reverse=0, unknown=0
)


def held_out_rows(data: Data, ctx: int, *, text: int = 64, recall: int = 32, hard: int = 32) -> list[Row]:
    """The rows of the evaluation, always the same: kinds "text", "recall" and "hard".

    data: with the held-out text. The text rows are windows of it that do not overlap. Of the others every second one
    is a chat; names are those that training never sees.

    Raises ValueError if the text is too short.
    """
    stream = data.filler.stream
    if text and len(stream) < text * ctx:
        raise ValueError(f"held-out text: {len(stream)} tokens, expected at least {text * ctx}")
    rows = []
    step = (len(stream) - ctx) // max(1, text)
    for i in range(text):
        ids = np.array([data.filler.opening, *stream[i * step : i * step + ctx]], np.int32)
        rows.append(Row(ids, np.full(ctx + 1, TEXT_WEIGHT, np.float32), np.zeros(ctx + 1, np.int16), "text"))
    for kind, plan, count in (("recall", RECALL, recall), ("hard", HARD, hard)):
        source = Rows(data, ctx=ctx, seed=0, held_out=True)
        rows += [source.recall_row(kind, plan, chat=i % 2 == 1) for i in range(count)]
    return rows


def sample_generated(definitions: Definitions, chats: int = 4000, exams: int = 1500) -> list[str]:
    """Text of chats and documents for the tokenizer, about 3 M characters."""
    random = Random("tokenizer")
    source = Chats(ChatFormat(TEMPLATE.read_text(encoding="utf-8")), definitions, random)
    drawn = [unmark(source.draw(1500, lambda characters: "text")) for _ in range(chats)]
    return drawn + sample_exams(random, exams)


def main(arguments: Sequence[str] | None = None) -> int:
    """Shows rows."""
    parser = argparse.ArgumentParser(description="Prints a row of every kind and the speed of the mix.")
    parser.add_argument("data", type=Path, metavar="DATA_DIR")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100, help="rows to time (100)")
    options = parser.parse_args(arguments)
    data = Data.load(options.data)
    rows = Rows(data, ctx=options.ctx, seed=options.seed)
    for item in fields(Shares):
        start = time.perf_counter()
        row = rows.row(item.name)
        took = time.perf_counter() - start
        text = data.tokenizer.decode(row.ids.tolist(), skip_special_tokens=False)
        again = encode(data.tokenizer, text).ids
        print(
            f"==== {row.kind}: {1e3 * took:.1f} ms, {row.answer.max()} answers, mean weight {row.weight.mean():.2f}, ",
            end="",
        )
        print("encodes to the same ids" if np.array_equal(again, row.ids) else f"encodes to {len(again)} ids")
        print(text)
    start = time.perf_counter()
    rows.batch(options.rows)
    print(f"==== {options.rows / (time.perf_counter() - start):.1f} rows/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
