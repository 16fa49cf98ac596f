"""Generated documents that make block selection matter: something is stated in them and asked for after them.

- recall: facts scattered through filler text
- facts: facts one after another and many questions
- copy: lists somewhere in filler text, to be repeated
- store: key-value stores and tables in filler text, with lookups

Half of them ask in the plain form "Question: ... Answer: ...", half are chats in M3's format.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from chats import OTHER_WEIGHT, SYSTEMS, ChatFormat, ai_weight
from facts import Exam, ExamPlan, Question, make_exam
from make_checkpoint import SPECIAL_TOKENS, TOP_IDS
from stores import make_lists, make_store
from vocabulary import DOCUMENT, Encoded, Ids, encode, token_id, unmark

TEXT_WEIGHT = 1.0
STATEMENT_WEIGHT = 0.3  #: names and values are drawn at random, there is little to learn in them
QUESTION_WEIGHT = 0.3
VALUE_WEIGHT = 3.0
PLACE = "\ue002"  #: where the document goes in the text of a chat


@dataclass(frozen=True)
class Places:
    """Where filler may be cut so that the tokens on both sides are those of the text as a whole.

    lines [n]: positions in the ids where a line starts, not with white space. sentences [m]: positions after a period
    where a sentence goes on in the same line.
    """

    lines: NDArray[np.int32]
    sentences: NDArray[np.int32]


class Filler:
    """Corpus text as ids, without the tokens that open documents."""

    def __init__(self, tokenizer: Tokenizer, stream: Ids) -> None:
        self.stream = stream  #: with them
        self.opening = token_id(tokenizer, DOCUMENT)
        self.ids: Ids = stream[stream != self.opening]
        self._ends_line = _token_table(tokenizer, lambda token: token.endswith("Ċ"))
        self.places = _find_places(tokenizer, self.ids, self._ends_line)
        if len(self.places.lines) < 2:
            raise ValueError(f"filler: {len(self.places.lines)} lines to cut at, expected at least 2")

    def text(self, random: Random, length: int) -> Ids:
        """A window of `length` ids of the stream that begins with a line and is opened as a document.

        Raises ValueError if the stream is too short.
        """
        reach = length + 400
        if len(self.stream) < reach:
            raise ValueError(f"text: {len(self.stream)} tokens, expected at least {reach}")
        start = random.randrange(len(self.stream) - reach + 1)
        ends = np.flatnonzero(self._ends_line[self.stream[start : start + 400]])
        start += int(ends[0]) if len(ends) else 0
        window = self.stream[start : start + length].copy()
        window[:1] = self.opening  # in place of the line end
        return window

    def window(self, random: Random, room: int) -> tuple[int, int]:
        """Start and stop of at most `room` ids from one line start to another; of a few tries the longest."""
        lines = self.places.lines
        last = int(np.searchsorted(lines, len(self.ids) - room, "right"))
        best = (0, 0)
        for _ in range(6):
            start = int(lines[random.randrange(max(1, last))])
            stop = int(lines[np.searchsorted(lines, start + room, "right") - 1])
            if stop - start > best[1] - best[0]:
                best = start, stop
            if stop - start > 0.97 * room:
                break
        return best


def _token_table(tokenizer: Tokenizer, test: Callable[[str], bool]) -> NDArray[np.bool_]:
    """By id, whether a token passes a test; it gets the token as the vocabulary has it, named ones as ""."""
    texts = {i: token for token, i in tokenizer.get_vocab().items() if token not in SPECIAL_TOKENS}
    return np.array([test(texts.get(i, "")) for i in range(tokenizer.get_vocab_size() + TOP_IDS)])


def _find_places(tokenizer: Tokenizer, ids: Ids, ends_line: NDArray[np.bool_]) -> Places:
    # Byte-level BPE writes a newline as "Ċ" and a space as "Ġ"; the pre-tokenizer joins a slash to the line before.
    starts_line = _token_table(tokenizer, lambda token: token[:1].isascii() and token[:1] not in ("/", ""))
    period = _token_table(tokenizer, lambda token: token == ".")
    sentence = _token_table(tokenizer, lambda token: token[:1] == "Ġ" and "A" <= token[1:2] <= "Z")
    before, after = ids[:-1], ids[1:]
    return Places(
        (np.flatnonzero(ends_line[before] & starts_line[after]) + 1).astype(np.int32),
        (np.flatnonzero(period[before] & sentence[after]) + 1).astype(np.int32),
    )


@dataclass
class Sheet:
    """A row that is being written from left to right."""

    size: int
    used: int = 0
    ids: NDArray[np.int32] = field(init=False)
    weight: NDArray[np.float32] = field(init=False)
    answer: NDArray[np.int16] = field(init=False)
    fact_at: list[int] = field(default_factory=list)  #: for every answer the first token of the value that it repeats
    asked_at: list[int] = field(default_factory=list)  #: its own first token

    def __post_init__(self) -> None:
        self.ids = np.zeros(self.size, np.int32)
        self.weight = np.zeros(self.size, np.float32)
        self.answer = np.zeros(self.size, np.int16)

    @property
    def room(self) -> int:
        return self.size - self.used

    def write(self, ids: NDArray[np.integer], weight: NDArray[np.float32] | float) -> int:
        """Appends ids, as far as they fit, and returns where the first one is."""
        start = self.used
        stop = min(start + len(ids), self.size)
        self.ids[start:stop] = ids[: stop - start]
        self.weight[start:stop] = weight if isinstance(weight, float) else weight[: stop - start]
        self.used = stop
        return start

    def write_answers(self, encoded: Encoded, weight: NDArray[np.float32] | float, facts: Sequence[int]) -> None:
        """Appends text whose marked values are answers. facts: where the value of each is stated, -1 if nowhere."""
        base = self.write(encoded.ids, weight)
        for (first, stop), fact in zip((encoded.spans + base).tolist(), facts, strict=True):
            if stop <= self.size:
                self.fact_at.append(fact)
                self.asked_at.append(first)
                self.answer[first:stop] = len(self.asked_at)
                self.weight[first:stop] = VALUE_WEIGHT


@dataclass(frozen=True)
class _Frame:
    """What stands before and after a document; tail: its marked values are those of the questions' answers."""

    head: Encoded
    tail: Encoded
    head_weight: float
    tail_weight: NDArray[np.float32] | float
    blank: bool  #: an empty line between document and tail


class Documents:
    """Writes documents into sheets."""

    def __init__(
        self, tokenizer: Tokenizer, filler: Filler, format: ChatFormat, random: Random, *, held_out: bool = False
    ) -> None:
        """held_out: with names of the evaluation."""
        self._tokenizer = tokenizer
        self._filler = filler
        self._format = format
        self._random = random
        self._held_out = held_out

    def recall(self, sheet: Sheet, length: int, *, plan: ExamPlan | None = None, chat: bool | None = None) -> None:
        """Facts in filler, in at most `length` tokens."""
        plan = plan or self._recall_plan(length)
        self._write(sheet, length, plan, self._facts_exam, chat, filler=True)

    def facts(self, sheet: Sheet, length: int) -> None:
        """Facts one after another, and questions until the sheet ends."""
        random = self._random
        count = max(4, min(random.randint(16, 64), length // 40))
        plan = ExamPlan(facts=count, questions=max(2, length // 60), alike=random.random() < 0.6)
        self._write(sheet, length, plan, self._facts_exam, None, filler=False)

    def copy(self, sheet: Sheet, length: int) -> None:
        """Lists in filler."""
        plan = ExamPlan(facts=self._random.randint(4, 24), questions=self._random.randint(1, 4), alike=False)
        self._write(sheet, length, plan, self._lists_exam, None, filler=True)

    def store(self, sheet: Sheet, length: int) -> None:
        """Key-value stores or tables, in filler or without."""
        random = self._random
        count = max(4, min(random.choice((6, 10, 16, 24, 40)), length // 32))
        plan = ExamPlan(facts=count, questions=random.randint(2, 10), alike=random.random() < 0.5)
        self._write(sheet, length, plan, self._store_exam, None, filler=random.random() < 0.8)

    def _recall_plan(self, length: int) -> ExamPlan:
        random = self._random
        most = max(2, length // 50)
        return ExamPlan(
            facts=min(most, random.choice((4, 6, 8, 12, 16, 24, 32, 40, 48, 64))),
            questions=random.randint(3, 12),
            alike=random.random() < 0.6,
        )

    def _facts_exam(self, plan: ExamPlan) -> Exam:
        return make_exam(self._random, plan, held_out=self._held_out)

    def _lists_exam(self, plan: ExamPlan) -> Exam:
        return make_lists(self._random, plan, held_out=self._held_out)

    def _store_exam(self, plan: ExamPlan) -> Exam:
        return make_store(self._random, plan, held_out=self._held_out)

    def _write(
        self,
        sheet: Sheet,
        length: int,
        plan: ExamPlan,
        make: Callable[[ExamPlan], Exam],
        chat: bool | None,
        *,
        filler: bool,
    ) -> None:
        """Makes exams, each smaller than the one before, until one fits in `length` tokens."""
        chat = self._random.random() < 0.5 if chat is None else chat
        while True:
            exam = make(plan)
            frame = self._chat_frame(exam) if chat else self._plain_frame(exam)
            lines = [encode(self._tokenizer, statement + "\n") for statement in exam.statements]
            room = length - sum(len(part.ids) for part in (frame.head, frame.tail, *lines))
            if not filler and room >= 0:
                return self._lay_out(sheet, exam, frame, lines, np.zeros(len(lines), np.int64), (0, 0))
            start, stop = self._filler.window(self._random, room) if filler and room > 0 else (0, 0)
            if stop - start >= length // 6:
                at = self._scatter(start, stop, exam)
                return self._lay_out(sheet, exam, frame, lines, at, (start, stop))
            if plan.facts <= 2 and plan.questions <= 1:
                raise ValueError(f"document: {length} tokens are too few for one question")
            plan = plan.smaller()

    def _scatter(self, start: int, stop: int, exam: Exam) -> NDArray[np.int64]:
        """For each statement a place in the filler's ids from `start` to `stop`, near one drawn evenly."""
        random = self._random
        places = self._filler.places
        inside = [
            array[np.searchsorted(array, start) : np.searchsorted(array, stop)]
            for array in (places.lines, places.sentences)
        ]
        # Lists and tables need lines of their own; in some documents every fact has one.
        anywhere = np.union1d(*inside) if random.random() < 0.6 else inside[0]
        at = []
        for statement in exam.statements:
            cuts = inside[0] if "\n" in statement or not statement[0].isalpha() else anywhere
            wish = random.randrange(start, stop)
            right = int(np.searchsorted(cuts, wish))
            near = cuts[max(0, right - 1) : right + 1]
            at.append(int(near[np.argmin(abs(near - wish))]))
        return np.array(at, np.int64)

    def _lay_out(
        self,
        sheet: Sheet,
        exam: Exam,
        frame: _Frame,
        lines: list[Encoded],
        at: NDArray[np.int64],
        window: tuple[int, int],
    ) -> None:
        """Writes head, filler with the statements in it, and tail."""
        ids = self._filler.ids
        sentences = self._filler.places.sentences
        sheet.write(frame.head.ids, frame.head_weight)
        counts = [len(line.spans) for line in lines]
        first_mark = np.cumsum([0, *counts])
        stated = [-1] * int(first_mark[-1])
        done = window[0]
        for i in np.argsort(at, kind="stable").tolist():
            place = int(at[i])
            if place > done:
                sheet.write(ids[done:place], TEXT_WEIGHT)
                done = place
            spot = int(np.searchsorted(sentences, place))
            within_line = window[1] > 0 and spot < len(sentences) and sentences[spot] == place
            line = encode(self._tokenizer, " " + exam.statements[i]) if within_line else lines[i]
            base = sheet.write(line.ids, STATEMENT_WEIGHT)
            for j, first in enumerate((line.spans[:, 0] + base).tolist()):
                stated[first_mark[i] + j] = first
        sheet.write(ids[done : window[1]], TEXT_WEIGHT)
        if frame.blank:
            self._write_blank(sheet)
        sources = [source for question in exam.questions for source in question.sources]
        sheet.write_answers(frame.tail, frame.tail_weight, [stated[source] for source in sources])

    def _write_blank(self, sheet: Sheet) -> None:
        """Puts an empty line after the last one, where its end is a token that tells how to."""
        last = self._tokenizer.decode([int(sheet.ids[sheet.used - 1])])
        if last in ("\n", ".\n"):
            sheet.used -= 1
            sheet.write(encode(self._tokenizer, last + "\n").ids, TEXT_WEIGHT)

    def _plain_frame(self, exam: Exam) -> _Frame:
        ask, reply = ("Question:", "Answer:") if self._random.random() < 0.8 else ("Q:", "A:")
        tail = "".join(f"{ask} {question.ask}\n{reply} {question.short}.\n" for question in exam.questions)
        return _Frame(
            encode(self._tokenizer, DOCUMENT),
            encode(self._tokenizer, tail),
            QUESTION_WEIGHT,
            QUESTION_WEIGHT,
            self._random.random() < 0.3,
        )

    def _chat_frame(self, exam: Exam) -> _Frame:
        random = self._random
        mode = random.choices((None, "enabled", "disabled"), (0.75, 0.12, 0.13))[0]
        messages: list[dict[str, str]] = []
        if random.random() < 0.35:
            messages.append({"role": "system", "content": random.choice(SYSTEMS)})
        first, *later = exam.questions
        if random.random() < 0.65:
            intro = random.choice(("", "", "Read this text.\n", "Here is a text.\n", "Text:\n"))
            lead = random.choice(("", "", "Question: ", "---\n", "Answer this question. "))
            messages.append({"role": "user", "content": intro + PLACE + lead + first.ask})
            messages.append(_reply(first, mode))
        else:
            intro = random.choice(("Read this text.\n", "Remember this text.\n", "Here is a text.\n", ""))
            outro = random.choice(("This was the text.", "I will ask you about this text.", "Please remember it."))
            messages.append({"role": "user", "content": intro + PLACE + outro})
            thought = {"reasoning_content": "The user gives me a text."} if mode == "enabled" else {}
            answer = random.choice(("I have read the text.", "I have read it. What do you want to know?"))
            messages.append({"role": "assistant", "content": answer, **thought})
            later = exam.questions
        for question in later:
            messages.append({"role": "user", "content": question.ask})
            messages.append(_reply(question, mode))
        head, tail = self._format.render(messages, thinking=mode).split(PLACE)
        encoded = encode(self._tokenizer, tail)
        weight = ai_weight(self._tokenizer, encoded.ids)
        return _Frame(encode(self._tokenizer, head), encoded, OTHER_WEIGHT, weight, random.random() < 0.4)


def _reply(question: Question, mode: str | None) -> dict[str, str]:
    """The assistant's message. The first time a value is written is the one that counts as the answer."""
    if mode != "enabled":
        return {"role": "assistant", "content": question.full}
    if not question.sources:
        return {"role": "assistant", "content": question.full, "reasoning_content": "The text does not say it."}
    return {
        "role": "assistant",
        "content": unmark(question.full),
        "reasoning_content": f"I look it up: {question.short}.",
    }


def sample_exams(random: Random, count: int) -> list[str]:
    """Statements, questions and answers as text, for the tokenizer."""
    texts = []
    for i in range(count):
        plan = ExamPlan(facts=random.choice((4, 8, 16)), questions=8, alike=bool(i % 2))
        exam = (make_exam, make_exam, make_lists, make_store)[i % 4](random, replace(plan))
        parts = [*exam.statements, *(f"{question.ask}\n{question.full}" for question in exam.questions)]
        texts.append(unmark("\n".join(parts)))
    return texts
