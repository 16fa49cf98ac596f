"""Lists to be repeated, and key-value stores and tables to look things up in, as exams."""

from collections.abc import Sequence
from random import Random

from facts import ANIMALS, CITIES, CODES, COLORS, FRUITS, NOUNS, UNKNOWN, WORDS, Exam, ExamPlan, Names, Question
from vocabulary import mark

_SUBJECTS = ("shopping list", "packing list", "list", "word list", "guest list", "menu", "plan")
_POOLS = (WORDS, ANIMALS, FRUITS, CITIES, COLORS, NOUNS)


def make_lists(random: Random, plan: ExamPlan, *, held_out: bool = False) -> Exam:
    """One to four lists of together about `plan.facts` items; the questions ask for whole lists or single items."""
    count = random.choice((1, 1, 2, 3, 4)) if plan.facts >= 8 else 1
    owners = Names(random, held_out=held_out).draw(count)
    statements: list[str] = []
    questions: list[Question] = []
    base = 0
    for owner in owners:
        pool = random.choice(_POOLS)
        items = random.sample(pool, min(len(pool), max(2, plan.facts // count)))
        if random.random() < 0.25:
            items = [str(random.randrange(10, 1000)) for _ in items]
        title = f"{random.choice(_SUBJECTS)} of {owner}"
        statements.append(_list_text(random, title, items))
        sources = tuple(range(base, base + len(items)))
        base += len(items)
        whole = ", ".join(map(mark, items))
        ask = random.choice(("Repeat the {}.", "What is on the {}?", "Copy the {}.", "Write down the {}.")).format(
            title
        )
        questions.append(Question(ask, whole, f"The {title}: {whole}.", sources))
        if random.random() < 0.4:
            at = random.randrange(len(items) - 1)
            item = mark(items[at + 1])
            ask = f"What comes after {items[at]} on the {title}?"
            questions.append(Question(ask, item, f"After {items[at]} comes {item}.", (sources[at + 1],)))
    random.shuffle(questions)
    return Exam(statements, questions[: plan.questions])


def _list_text(random: Random, title: str, items: Sequence[str]) -> str:
    marked = [mark(item) for item in items]
    start = f"The {title}:"
    form = random.randrange(3)
    if form == 0:
        return f"{start} {', '.join(marked)}."
    lines = [f"- {item}" if form == 1 else f"{i}. {item}" for i, item in enumerate(marked, 1)]
    return "\n".join([start, *lines])


# Key-value stores.

_KEY_STARTS = [
    "max",
    "min",
    "start",
    "stop",
    "user",
    "host",
    "port",
    "path",
    "file",
    "page",
    "line",
    "block",
    "cache",
    "queue",
    "retry",
    "timer",
]
_KEY_ENDS = [
    "size",
    "count",
    "name",
    "limit",
    "time",
    "level",
    "mode",
    "speed",
    "width",
    "height",
    "depth",
    "index",
    "color",
    "key",
    "state",
]


def make_store(random: Random, plan: ExamPlan, *, held_out: bool = False) -> Exam:
    """One store of `plan.facts` entries, or a table of names with their attributes, and lookups."""
    return _make_table(random, plan, held_out) if random.random() < 0.4 else _make_settings(random, plan)


def _make_settings(random: Random, plan: ExamPlan) -> Exam:
    keys: dict[str, None] = {}
    starts = random.sample(_KEY_STARTS, 5) if plan.alike else _KEY_STARTS
    while len(keys) < plan.facts:
        number = f"_{random.randrange(1, 10)}" if plan.facts > 24 or random.random() < 0.3 else ""
        keys[f"{random.choice(starts)}_{random.choice(_KEY_ENDS)}{number}"] = None
    values = [
        str(random.randrange(1, 10 ** random.choice((2, 3, 4)))) if random.random() < 0.7 else random.choice(WORDS)
        for _ in keys
    ]
    text = random.choice((_json_text, _ini_text, _colon_text))(list(keys), values)
    questions = []
    for at in random.sample(range(len(values)), min(plan.questions, len(values))):
        key, value = list(keys)[at], mark(values[at])
        wording = random.choice(("What is the value of {}?", "What is {}?", "Look up {}.", "What is {} set to?"))
        questions.append(Question(wording.format(key), value, f"The value of {key} is {value}.", (at,)))
    if random.random() < 0.3:
        missing = f"{random.choice(starts)}_{random.choice(_KEY_ENDS)}_0"
        questions.append(Question(f"What is the value of {missing}?", "unknown", UNKNOWN, ()))
        random.shuffle(questions)
    return Exam([text], questions)


def _json_text(keys: Sequence[str], values: Sequence[str]) -> str:
    entries = [
        f'"{key}": {mark(value)}' if value.isdigit() else f'"{key}": "{mark(value)}"'
        for key, value in zip(keys, values, strict=True)
    ]
    return "{" + ",\n".join(entries) + "}"


def _ini_text(keys: Sequence[str], values: Sequence[str]) -> str:
    return "\n".join(f"{key} = {mark(value)}" for key, value in zip(keys, values, strict=True))


def _colon_text(keys: Sequence[str], values: Sequence[str]) -> str:
    return "\n".join(f"{key}: {mark(value)}" for key, value in zip(keys, values, strict=True))


def _make_table(random: Random, plan: ExamPlan, held_out: bool) -> Exam:
    columns = random.sample(sorted(CODES), random.choice((1, 2, 3)))
    names = Names(random, held_out=held_out).draw(max(2, plan.facts // len(columns)), alike=plan.alike)
    rows = [[CODES[column](random) for column in columns] for _ in names]
    left, between, right = random.choice((("| ", " | ", " |"), ("", ", ", ""), ("", " | ", "")))
    table = [["name", *columns], *([name, *map(mark, row)] for name, row in zip(names, rows, strict=True))]
    text = "\n".join(left + between.join(cells) + right for cells in table)
    cells = [(i, j) for i in range(len(names)) for j in range(len(columns))]
    questions = []
    for i, j in random.sample(cells, min(plan.questions, len(cells))):
        value = mark(rows[i][j])
        ask = f"What is the {columns[j]} of {names[i]}?"
        full = f"The {columns[j]} of {names[i]} is {value}."
        questions.append(Question(ask, value, full, (i * len(columns) + j,)))
    return Exam([text], questions)
