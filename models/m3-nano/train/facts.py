"""Facts for recall: names that look alike, attributes and values, and the sentences that state them and ask for them.

Everything here is text. A value stands between marks (`vocabulary.mark`), in the statement and in the answer, so that
its tokens can be found once the text is encoded.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from vocabulary import mark


def words(text: str) -> tuple[str, ...]:
    """The words of a table that is written as one string."""
    return tuple(text.split())


FIRST_NAMES = words(
    "Ada Alan Alice Anna Ben Bruno Carla Carl Clara Dan David Diana Dora Edith Ella Emma Eric Eva Felix Frank "
    "Fred George Grace Hanna Harry Helen Henry Hugo Ida Irene Jack James Jane John Julia Karl Kate Laura Leo Lily "
    "Louis Lucy Maria Mark Martin Mary Max Nina Nora Olga Oscar Otto Paul Peter Rita Robert Rosa Ruth Sam Sara "
    "Simon Sofia Susan Thomas Tina Tom Vera Victor Walter William"
)
LAST_NAMES = words(
    "Adams Allen Baker Bell Bishop Black Brooks Brown Carter Clark Cole Cook Cooper Cross Davis Dean Duke Ellis "
    "Evans Fisher Ford Foster Fox Gray Green Hall Harris Hill Hunt Irving Jackson Jones Kelly King Knight Lane "
    "Lee Long Marsh Mason Miller Moore Morgan Nash Nelson North Page Palmer Parker Porter Price Reed Rice Rivers "
    "Rose Scott Shaw Smith Stone Taylor Turner Wade Walker Ward Waters Webb West White Wood Young"
)
ADJECTIVES = words(
    "red blue green silver golden black white broken hidden quiet ancient heavy narrow frozen burning hollow iron "
    "wooden paper glass stone copper northern southern eastern western little great lonely crooked old new round "
    "square"
)
NOUNS = words(
    "lantern bridge river tower garden engine window mirror kettle anchor compass library station temple harbor valley "
    "forest castle island orchard market school cabin tunnel hammer ladder wagon bottle basket whistle clock chair"
)
THINGS = words(
    "Tower Room Gate Bridge Station Ship Box Unit Sector Lamp Door House Train Robot Camp Mine Tank Farm Shop "
    "Field Case File Dock Lab Truck Pump Tunnel Island Port Cabin"
)
PLACE_STARTS = words(
    "North South East West Red Green Long Old New High Low Clear Stone Oak Sand Snow Moor Wood Fair Ash"
)
PLACE_ENDS = words(
    "field brook ton ford ham wood bridge land mouth hill dale port well gate mill wick bury water side lake"
)
WORDS = words(
    "apple river stone cloud tiger maple ocean candle silver winter garden rocket pepper violin button harbor falcon "
    "marble ribbon saddle turtle window yellow zebra copper dragon ember forest guitar helmet island jacket kettle "
    "lemon mirror needle orange pencil rabbit shadow ticket velvet walnut anchor basket carpet desert engine feather"
)
COLORS = words("red blue green yellow black white brown gray pink purple orange silver golden")
CITIES = words(
    "London Paris Rome Berlin Madrid Vienna Oslo Dublin Lisbon Athens Moscow Cairo Tokyo Delhi Boston Chicago Dallas "
    "Denver Toronto Sydney Geneva Prague Warsaw Venice Milan Naples Munich Hamburg"
)
ANIMALS = words(
    "dog cat horse cow sheep goat pig duck hen rabbit mouse lion tiger bear wolf fox deer elephant monkey snake "
    "frog fish eagle owl bee ant whale camel donkey turtle"
)
FRUITS = words("apple pear plum cherry lemon orange banana grape peach melon fig date berry lime mango olive")
RELATIONS = words("keeper owner friend teacher doctor guard pilot brother sister partner")

_ONSETS = words("b d f g h j k l m n p r s t v w z br dr fl gr kr pl st th tr")
_VOWELS = words("a e i o u")
_CODAS = ("", "n", "l", "r", "s", "x", "m", "th", "k")

STATEMENTS = (
    "The {a} of {n} is {v}.",
    "The {a} of {n} is {v}.",
    "The {a} of {n} is {v}.",
    "The {a} for {n} is {v}.",
    "{N} has the {a} {v}.",
    "{N}'s {a} is {v}.",
    "Remember: the {a} of {n} is {v}.",
    "Remember that the {a} of {n} is {v}.",
    "Note that the {a} of {n} is {v}.",
    "{N}: the {a} is {v}.",
    "As for {n}, the {a} is {v}.",
    "By the way, the {a} of {n} is {v}.",
    "It is known that {n} has the {a} {v}.",
    "The {a} given to {n} was {v}.",
    "Everybody knows that the {a} of {n} is {v}.",
)
ASKINGS = (
    "What is the {a} of {n}?",
    "What is the {a} of {n}?",
    "What is the {a} of {n}?",
    "What is the {a} of {n}?",
    "What is {n}'s {a}?",
    "Tell me the {a} of {n}.",
    "Give me the {a} of {n}.",
    "Which {a} does {n} have?",
    "What was the {a} of {n}?",
    "I need the {a} of {n}.",
    "The {a} of {n}?",
    "Can you tell me the {a} of {n}?",
    "Do you remember the {a} of {n}?",
    "{N}: what is the {a}?",
    "what is the {a} of {n}",
)
UNKNOWN = "I do not know."


def _digits(random: Random) -> str:
    length = random.choice((2, 3, 3, 4, 4, 4, 5))
    return str(random.randrange(10 ** (length - 1), 10**length))


def _password(random: Random) -> str:
    return f"{random.choice(WORDS)} {random.choice(WORDS)}"


def _key(random: Random) -> str:
    letters = random.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=random.choice((2, 3)))
    return "".join(letters) + _digits(random)


def _of(words: Sequence[str]) -> Callable[[Random], str]:
    return lambda random: random.choice(words)


# How a value of an attribute is drawn. Only the values of the first group are hard to guess and seldom twice the same.
CODES: dict[str, Callable[[Random], str]] = {
    "code": _digits,
    "number": _digits,
    "PIN": _digits,
    "password": _password,
    "key": _key,
}
ATTRIBUTES: dict[str, Callable[[Random], str]] = {
    **CODES,
    "color": _of(COLORS),
    "city": _of(CITIES),
    "animal": _of(ANIMALS),
    "fruit": _of(FRUITS),
}


def is_held_out(name: str) -> bool:
    """Whether a name is for the evaluation only: one in eight, by a hash."""
    return zlib.crc32(name.encode()) % 8 == 0


def capital(text: str) -> str:
    """`text` with a large first letter."""
    return text[:1].upper() + text[1:]


def _invented(random: Random) -> str:
    syllables = "".join(random.choice(_ONSETS) + random.choice(_VOWELS) for _ in range(random.choice((2, 2, 3))))
    return capital(syllables + random.choice(_CODAS))


def _changed(random: Random, word: str) -> str:
    """`word` with another vowel in place of one of its own."""
    at = random.choice([i for i, letter in enumerate(word) if i and letter in "aeiou"])
    return word[:at] + random.choice([vowel for vowel in _VOWELS if vowel != word[at]]) + word[at + 1 :]


class Names:
    """Draws names of people, places and things, either all for training or all for the evaluation."""

    def __init__(self, random: Random, *, held_out: bool = False) -> None:
        self._random = random
        self._held_out = held_out

    def draw(self, count: int, *, alike: bool = False) -> list[str]:
        """`count` different names; alike: of one kind, made of few parts, so that every part of a name matters."""
        random = self._random
        kinds = (self._people, self._numbered, self._lettered, self._objects, self._places, self._spelled)
        if alike:
            return self._fitting(random.choice(kinds), count, math.ceil(math.sqrt(2.5 * count)))
        names: list[str] = []
        while len(names) < count:
            (name,) = self._fitting(random.choice(kinds), 1, 10)
            if name not in names:
                names.append(name)
        return names

    def people(self, count: int) -> list[str]:
        """`count` different people."""
        return self._fitting(self._people, count, math.ceil(math.sqrt(2.5 * count)))

    def _fitting(self, kind: Callable[[int], list[str]], count: int, side: int) -> list[str]:
        """Names of one kind; side: how many different parts to draw, more if they do not give enough names."""
        names: dict[str, None] = {}
        while len(names) < count:
            fitting = [name for name in kind(side) if is_held_out(name) is self._held_out and name not in names]
            self._random.shuffle(fitting)
            names |= dict.fromkeys(fitting[: count - len(names)])
            side += 2
        return list(names)

    def _grid(self, starts: Sequence[str], ends: Sequence[str], side: int, pattern: str) -> list[str]:
        random = self._random
        rows, columns = (random.sample(words, min(side, len(words))) for words in (starts, ends))
        return [pattern.format(row, column) for row in rows for column in columns]

    def _people(self, side: int) -> list[str]:
        return self._grid(FIRST_NAMES, LAST_NAMES, side, "{} {}")

    def _objects(self, side: int) -> list[str]:
        return self._grid(ADJECTIVES, NOUNS, side, "the {} {}")

    def _places(self, side: int) -> list[str]:
        return self._grid(PLACE_STARTS, PLACE_ENDS, side, "{}{}")

    def _numbered(self, side: int) -> list[str]:
        top = self._random.choice((100, 1000))
        numbers = [str(number) for number in self._random.sample(range(1, top), min(side * side, top - 1))]
        thing = self._random.choice(THINGS)
        return [f"{thing} {number}" for number in numbers]

    def _lettered(self, side: int) -> list[str]:
        return self._grid("ABCDEFGHJKLMNPQRSTUVWXYZ", "123456789", side, self._random.choice(THINGS) + " {}{}")

    def _spelled(self, side: int) -> list[str]:
        words = [_invented(self._random) for _ in range(side)]
        return [*words, *(_changed(self._random, word) for word in words for _ in range(side - 1))]


@dataclass(frozen=True)
class Fact:
    name: str
    attribute: str
    value: str

    def state(self, wording: str) -> str:
        """A sentence that says so, with the value marked."""
        return wording.format(n=self.name, N=capital(self.name), a=self.attribute, v=mark(self.value))

    def ask(self, wording: str) -> str:
        """A question whose answer is the value."""
        return wording.format(n=self.name, N=capital(self.name), a=self.attribute)


@dataclass(frozen=True)
class Question:
    """A question about a document.

    short, full: the answer as bare values and as a sentence, both with the same marked values. sources: for each of
    them the number of the marked value in the document (counted over all statements) that it repeats.
    """

    ask: str
    short: str
    full: str
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Exam:
    """Statements to scatter in a document and questions to ask after it."""

    statements: list[str]
    questions: list[Question]


@dataclass(frozen=True, kw_only=True)
class ExamPlan:
    """What an exam consists of. The shares of the kinds of questions need not add up to 1."""

    facts: int
    questions: int
    alike: bool
    codes_only: bool = False  #: only attributes whose values cannot be guessed
    single: float = 0.60
    pair: float = 0.15
    hop: float = 0.15  #: asks for an attribute of somebody's keeper
    reverse: float = 0.05  #: gives the value, asks for the name
    unknown: float = 0.05  #: asks for a name that the document does not have

    def smaller(self) -> "ExamPlan":
        """For a document that was too short."""
        return replace(self, facts=max(2, self.facts * 4 // 5), questions=max(1, self.questions * 2 // 3))


def make_exam(random: Random, plan: ExamPlan, *, held_out: bool = False) -> Exam:
    """Facts about names and questions about them."""
    names = Names(random, held_out=held_out)
    hops = max(1, plan.facts // 5) if plan.hop and plan.facts >= 4 and random.random() < 2 * plan.hop + 0.2 else 0
    facts = draw_facts(random, replace(plan, facts=plan.facts - hops), held_out=held_out, people=bool(hops))
    if hops:
        known = {fact.name for fact in facts}
        relations = random.sample(RELATIONS, random.choice((1, 1, 2)))
        things = [name for name in names.draw(hops + len(known), alike=plan.alike) if name not in known][:hops]
        people = [fact.name for fact in facts]
        facts += [Fact(name, random.choice(relations), random.choice(people)) for name in things]
    spare = _unused(names, {fact.name for fact in facts}, plan.alike)
    wordings = (
        [random.choice(STATEMENTS)] if random.random() < 0.4 else random.sample(STATEMENTS, random.choice((2, 4, 8)))
    )
    statements = [fact.state(random.choice(wordings)) for fact in facts]
    return Exam(statements, _draw_questions(random, plan, facts, hops, spare))


def draw_facts(random: Random, plan: ExamPlan, *, held_out: bool = False, people: bool = False) -> list[Fact]:
    """`plan.facts` facts about names, or about people only; no name has an attribute twice."""
    names = Names(random, held_out=held_out)
    count = plan.facts
    table = CODES if plan.codes_only or random.random() < 0.6 else ATTRIBUTES
    attributes = random.sample(sorted(table), random.choice((1, 1, 2, 3)))
    per_name = random.choice((1, len(attributes)))
    wanted = math.ceil(count / per_name)
    drawn = names.people(wanted) if people else names.draw(wanted, alike=plan.alike)
    pairs = [(name, attribute) for name in drawn for attribute in random.sample(attributes, per_name)][:count]
    facts: list[Fact] = []
    values: set[str] = set()
    for name, attribute in pairs:
        value = table[attribute](random)
        while value in values and attribute in CODES:
            value = table[attribute](random)
        values.add(value)
        facts.append(Fact(name, attribute, value))
    random.shuffle(facts)
    return facts


def _unused(names: Names, known: set[str], alike: bool) -> str:
    while True:
        for name in names.draw(8, alike=alike):
            if name not in known:
                return name


def _draw_questions(random: Random, plan: ExamPlan, facts: list[Fact], hops: int, spare: str) -> list[Question]:
    """hops: how many facts at the end name somebody whom other facts are about."""
    direct = len(facts) - hops
    kinds = {
        _ask_single: plan.single,
        _ask_pair: plan.pair if direct >= 2 else 0.0,
        _ask_hop: plan.hop if hops else 0.0,
        _ask_reverse: plan.reverse,
        _ask_unknown: plan.unknown,
    }
    questions: list[Question] = []
    known: set[int] = set()
    tries = 0
    wordings = [random.choice(ASKINGS)] if random.random() < 0.3 else list(ASKINGS)
    while not questions or (len(questions) < plan.questions and tries < 4 * plan.questions):
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        question = kind(random, facts, direct, spare, random.choice(wordings))
        tries += 1
        # A value is asked for once: the second time it would be nearer in the first answer than in its statement.
        if question is not None and known.isdisjoint(question.sources):
            known.update(question.sources)
            questions.append(question)
    return questions


def _ask_single(random: Random, facts: list[Fact], direct: int, spare: str, wording: str) -> Question:
    at = random.randrange(len(facts))
    fact = facts[at]
    value = mark(fact.value)
    return Question(fact.ask(wording), value, f"The {fact.attribute} of {fact.name} is {value}.", (at,))


def _ask_pair(random: Random, facts: list[Fact], direct: int, spare: str, wording: str) -> Question:
    one, two = random.sample(range(direct), 2)
    first, second = facts[one], facts[two]
    if first.attribute == second.attribute:
        ask = f"What are the {first.attribute}s of {first.name} and {second.name}?"
        if random.random() < 0.3:
            ask = f"Tell me the {first.attribute}s of {first.name} and {second.name}."
    else:
        ask = f"What are the {first.attribute} of {first.name} and the {second.attribute} of {second.name}?"
    values = mark(first.value), mark(second.value)
    full = (
        f"The {first.attribute} of {first.name} is {values[0]}, "
        f"and the {second.attribute} of {second.name} is {values[1]}."
    )
    return Question(ask, " and ".join(values), full, (one, two))


def _ask_hop(random: Random, facts: list[Fact], direct: int, spare: str, wording: str) -> Question | None:
    relation_at = random.randrange(direct, len(facts))
    relation = facts[relation_at]
    at = random.choice([i for i in range(direct) if facts[i].name == relation.value])
    fact = facts[at]
    value = mark(fact.value)
    ask = Fact(f"the {relation.attribute} of {relation.name}", fact.attribute, "").ask(ASKINGS[0])
    name = mark(fact.name)
    full = f"The {relation.attribute} of {relation.name} is {name}, and the {fact.attribute} of {fact.name} is {value}."
    return Question(ask, f"{name}, {value}", full, (relation_at, at))


def _ask_reverse(random: Random, facts: list[Fact], direct: int, spare: str, wording: str) -> Question | None:
    at = random.randrange(direct)
    fact = facts[at]
    if fact.attribute not in CODES:
        return None
    name = mark(fact.name)
    return Question(
        f"Who or what has the {fact.attribute} {fact.value}?",
        name,
        f"{fact.value} is the {fact.attribute} of {name}.",
        (at,),
    )


def _ask_unknown(random: Random, facts: list[Fact], direct: int, spare: str, wording: str) -> Question:
    attribute = random.choice(facts[:direct]).attribute
    return Question(Fact(spare, attribute, "").ask(wording), "unknown", UNKNOWN, ())
