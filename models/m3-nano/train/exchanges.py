"""Small questions and their answers: definitions, sums, order, simple knowledge, talk, little tasks with words."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from facts import ANIMALS, COLORS, FRUITS, WORDS, capital
from knowledge import (
    ALPHABET,
    CAPITALS,
    CLASSES,
    COLORS_OF,
    DAYS,
    GLOSSES,
    LEGS,
    MONTHS,
    NUMBERS,
    OPPOSITES,
    PLAIN_FACTS,
    SOUNDS,
    TALK,
)

Definitions = Sequence[Sequence[str]]  #: pairs of a word and its gloss, the most common word first
Message = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """A question and its answer.

    thought: what the thinking block says when thinking is enabled. works: the block belongs to the answer, and is
    there in adaptive mode too.
    """

    user: str
    answer: str
    thought: str
    works: bool = False

    def messages(self, mode: str | None) -> list[Message]:
        """The two turns in a thinking mode; None is adaptive, as in the template."""
        reply: Message = {"role": "assistant", "content": self.answer}
        if mode == "enabled" or (self.works and mode != "disabled"):
            reply["reasoning_content"] = self.thought
        return [{"role": "user", "content": self.user}, reply]


class Exchanges:
    """Draws small questions with their answers."""

    def __init__(self, random: Random, definitions: Definitions) -> None:
        self._random = random
        self._definitions = definitions
        self._kinds: dict[Callable[[], Exchange], float] = {
            self._definition: 24.0,
            self._sum: 9.0,
            self._difference: 6.0,
            self._product: 2.0,
            self._larger_sum: 1.0,
            self._talk: 12.0,
            self._opposite: 3.0,
            self._order: 5.0,
            self._count: 2.5,
            self._capital: 2.5,
            self._animal: 2.0,
            self._color: 1.5,
            self._plain_fact: 2.0,
            self._repeat: 3.0,
            self._sort: 3.0,
            self._reverse: 2.5,
            self._spell: 2.5,
            self._case: 1.5,
            self._how_many: 1.5,
            self._yes_no: 3.5,
            self._compare: 2.5,
            self._number_word: 1.5,
            self._pick: 2.0,
        }

    def draw(self) -> Exchange:
        """One exchange; now and then the question is typed carelessly."""
        (kind,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
        exchange = kind()
        return Exchange(careless(self._random, exchange.user), exchange.answer, exchange.thought, exchange.works)

    def definition(self) -> Sequence[str]:
        """A word and its gloss, common words more often: an eighth of them is half of what is drawn."""
        return self._definitions[int(len(self._definitions) * self._random.random() ** 3)]

    def _definition(self) -> Exchange:
        if self._random.random() < 0.2:
            word, gloss = self._random.choice(list(GLOSSES.items()))
        else:
            word, gloss = self.definition()
            gloss = GLOSSES.get(word) or short_gloss(gloss)
        wordings = (
            "What does {} mean?",
            "What does {} mean?",
            "What does the word {} mean?",
            "Define {}.",
            "Define the word {}.",
            "What is the meaning of {}?",
            "What is the meaning of the word {}?",
            "Explain the word {}.",
            'What does "{}" mean?',
        )
        user = self._random.choice(wordings).format(word)
        if gloss.startswith(("a ", "an ", "the ", "any ")) and word.islower() and self._random.random() < 0.3:
            user = f"What is {article(word)}?"
        return Exchange(user, f"The word {word} means: {gloss.rstrip('.')}.", "The user asks what a word means.")

    def _sum(self) -> Exchange:
        a, b = self._random.randrange(21), self._random.randrange(21)
        return self._arithmetic(a, b, a + b, "+", "plus")

    def _difference(self) -> Exchange:
        b, a = sorted((self._random.randrange(21), self._random.randrange(21)))
        return self._arithmetic(a, b, a - b, "-", "minus")

    def _product(self) -> Exchange:
        a, b = self._random.randrange(11), self._random.randrange(11)
        return self._arithmetic(a, b, a * b, "*", "times")

    def _larger_sum(self) -> Exchange:
        a, b = self._random.randrange(100), self._random.randrange(100)
        return self._arithmetic(a, b, a + b, "+", "plus")

    def _arithmetic(self, a: int, b: int, result: int, sign: str, word: str) -> Exchange:
        wordings = [
            f"What is {a} {sign} {b}?",
            f"What is {a} {word} {b}?",
            f"{a}{sign}{b}",
            f"{a} {sign} {b}",
            f"{a} {sign} {b} = ?",
            f"What is {a}{sign}{b}?",
            f"How much is {a} {sign} {b}?",
            f"How much is {a} {word} {b}?",
            f"Calculate {a} {sign} {b}.",
        ]
        if sign == "+":
            wordings += [
                f"Add {a} and {b}.",
                f"What is the sum of {a} and {b}?",
                f"I have {a} apples and get {b} more. How many do I have?",
            ]
        if sign == "-":
            wordings += [f"Subtract {b} from {a}.", f"I have {a} apples and give away {b}. How many do I have?"]
        user = self._random.choice(wordings)
        return Exchange(user, f"{a} {word} {b} is {result}.", f"{a} {sign} {b} = {result}", works=True)

    def _talk(self) -> Exchange:
        ways, answer = self._random.choice(TALK)
        return Exchange(self._random.choice(ways), answer, "The user talks to me.")

    def _opposite(self) -> Exchange:
        one, two = self._random.choice(OPPOSITES)
        if (
            one not in ("new", "light", "short", "old")
            and two not in ("old", "light", "short")
            and self._random.random() < 0.4
        ):
            one, two = two, one
        wordings = (
            "What is the opposite of {}?",
            "Opposite of {}?",
            "Tell me the opposite of {}.",
            "The opposite of {} is what?",
        )
        return Exchange(
            self._random.choice(wordings).format(one),
            f"The opposite of {one} is {two}.",
            "The user asks for an opposite.",
        )

    def _order(self) -> Exchange:
        kind, series = self._random.choice(
            (("day", DAYS), ("month", MONTHS), ("letter", ALPHABET), ("number", [str(number) for number in range(31)]))
        )
        at = self._random.randrange(len(series) - 1)
        before, after = series[at], series[at + 1]
        if kind in ("day", "month") and self._random.random() < 0.1:
            before, after = series[-1], series[0]
        forward, backward = (
            (f"What {kind} comes after {before}?", f"What comes after {before}?", f"Which {kind} follows {before}?"),
            (f"What {kind} comes before {after}?", f"What comes before {after}?", f"Which {kind} is before {after}?"),
        )
        if self._random.random() < 0.5:
            return Exchange(
                self._random.choice(forward), f"After {before} comes {after}.", f"The user asks for the next {kind}."
            )
        return Exchange(
            self._random.choice(backward), f"Before {after} comes {before}.", f"The user asks for the {kind} before."
        )

    def _count(self) -> Exchange:
        start, stop = sorted(self._random.sample(range(1, 21), 2))
        if self._random.random() < 0.5:
            start = 1
        numbers = [str(number) for number in range(start, stop + 1)]
        user = f"Count from {start} to {stop}." if start > 1 or self._random.random() < 0.5 else f"Count to {stop}."
        if self._random.random() < 0.25:
            numbers.reverse()
            user = f"Count down from {stop} to {start}."
        return Exchange(user, ", ".join(numbers) + ".", "The user wants me to count.")

    def _capital(self) -> Exchange:
        country, city = self._random.choice(list(CAPITALS.items()))
        if self._random.random() < 0.25:
            user = self._random.choice(("{} is the capital of which country?", "Which country has the capital {}?"))
            return Exchange(user.format(city), f"{city} is the capital of {country}.", "The user asks for a country.")
        wordings = (
            "What is the capital of {}?",
            "What is the capital city of {}?",
            "Capital of {}?",
            "Tell me the capital of {}.",
        )
        return Exchange(
            self._random.choice(wordings).format(country),
            f"The capital of {country} is {city}.",
            "The user asks for a capital.",
        )

    def _animal(self) -> Exchange:
        thought = "The user asks about an animal."
        if self._random.random() < 0.5:
            animal, sound = self._random.choice(list(SOUNDS.items()))
            user = f"What sound does {article(animal)} make?"
            return Exchange(user, f"{capital(article(animal))} {sound}.", thought)
        animal, legs = self._random.choice(list(LEGS.items()))
        user = f"How many legs does {article(animal)} have?"
        return Exchange(user, f"{capital(article(animal))} has {legs} legs.", thought)

    def _color(self) -> Exchange:
        thing, color = self._random.choice(list(COLORS_OF.items()))
        named = f"the {thing}" if thing in ("sky", "sun", "sea", "night") else thing
        if thing in ("banana", "lemon", "cherry", "carrot", "crow", "elephant", "leaf", "tomato"):
            named = article(thing)
        user = self._random.choice(("What color is {}?", "Which color is {}?", "What is the color of {}?")).format(
            named
        )
        return Exchange(user, f"{capital(named)} is {color}.", "The user asks for a color.")

    def _plain_fact(self) -> Exchange:
        user, answer = self._random.choice(PLAIN_FACTS)
        return Exchange(user, answer, "The user asks a simple question.")

    def _words(self, least: int, most: int) -> list[str]:
        """Different words, half of the time from the dictionary."""
        count = self._random.randint(least, most)
        if self._random.random() < 0.5:
            return self._random.sample(WORDS, count)
        drawn = dict.fromkeys(self.definition()[0] for _ in range(count))
        return [*drawn, *self._random.sample(sorted(set(WORDS) - set(drawn)), count - len(drawn))]

    def _repeat(self) -> Exchange:
        words = " ".join(self._words(1, 8))
        if self._random.random() < 0.3:
            words = self._random.choice(self._definitions)[1]
        wordings = ("Repeat after me: {}", "Say: {}", "Repeat: {}", "Please repeat this: {}", "Say {}")
        return Exchange(self._random.choice(wordings).format(words), words, "The user wants me to repeat something.")

    def _sort(self) -> Exchange:
        length = self._random.randint(2, 6)
        if self._random.random() < 0.3:
            words = self._words(length, length)
            user = f"Sort these words: {' '.join(words)}"
            letters = ", ".join(f"{word[0]} {word}" for word in sorted(words))
            return Exchange(user, " ".join(sorted(words)), letters, works=True)
        numbers = self._random.sample(range(self._random.choice((10, 20, 100))), length)
        between = self._random.choice((" ", ", "))
        listed, ordered = (between.join(map(str, some)) for some in (numbers, sorted(numbers)))
        wordings = ("Sort these numbers: {}", "Sort {}", "Put these numbers in order: {}", "Sort the numbers {}.")
        thought = f"The smallest is {min(numbers)} and the largest is {max(numbers)}."
        return Exchange(self._random.choice(wordings).format(listed), ordered, thought, works=True)

    def _reverse(self) -> Exchange:
        words = self._words(2, 6)
        wordings = ("Reverse these words: {}", "Say these words backwards: {}", "Reverse the order of these words: {}")
        user = self._random.choice(wordings).format(" ".join(words))
        return Exchange(user, " ".join(reversed(words)), "The last word comes first.")

    def _word(self) -> str:
        pool = self._random.choice((WORDS, ANIMALS, FRUITS, COLORS))
        if self._random.random() < 0.5:
            word = self.definition()[0]
            return word if word.isalpha() and len(word) < 9 else self._random.choice(pool)
        return self._random.choice(pool)

    def _spell(self) -> Exchange:
        word = self._word()
        user = self._random.choice(("Spell {}.", "Spell the word {}.", "How do you spell {}?", "How is {} spelled?"))
        return Exchange(user.format(word), f"{word}: {' '.join(word.upper())}", "The user wants me to spell a word.")

    def _case(self) -> Exchange:
        word = self._word()
        wordings = ("Write {} in upper case.", "Write {} in capital letters.", "Put {} in upper case.")
        return Exchange(self._random.choice(wordings).format(word), word.upper(), "The user wants capital letters.")

    def _how_many(self) -> Exchange:
        words = self._words(2, 7)
        user = f"How many words are these: {' '.join(words)}"
        thought = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))
        return Exchange(user, f"These are {len(words)} words.", thought, works=True)

    def _yes_no(self) -> Exchange:
        kind, other = self._random.sample(sorted(CLASSES), 2)
        truth = self._random.random() < 0.5
        thing = self._random.choice(CLASSES[kind if truth else other])
        if thing in CLASSES[kind] and not truth:
            truth = True  # "orange" is a color and a fruit
        thing = thing if other in ("color", "day") or thing[0].isupper() or thing in COLORS else article(thing)
        answer = f"Yes, {thing} is {article(kind)}." if truth else f"No, {thing} is not {article(kind)}."
        return Exchange(f"Is {thing} {article(kind)}?", answer, "The user asks a yes or no question.")

    def _compare(self) -> Exchange:
        a, b = self._random.sample(range(21), 2)
        thought = "The user compares two numbers."
        if self._random.random() < 0.5:
            word = self._random.choice(("larger", "smaller"))
            right = max(a, b) if word == "larger" else min(a, b)
            return Exchange(f"Which is {word}, {a} or {b}?", f"{right} is {word}.", thought)
        word, more = self._random.choice((("more", True), ("larger", True), ("less", False), ("smaller", False)))
        yes = (a > b) is more
        return Exchange(
            f"Is {a} {word} than {b}?",
            f"{'Yes' if yes else 'No'}, {a} is {'' if yes else 'not '}{word} than {b}.",
            thought,
        )

    def _number_word(self) -> Exchange:
        number = self._random.randrange(21)
        if self._random.random() < 0.5:
            return Exchange(
                f"Write {number} as a word.", f"{capital(NUMBERS[number])}.", "The user wants a number as a word."
            )
        return Exchange(f"Write {NUMBERS[number]} as a number.", f"{number}.", "The user wants a word as a number.")

    def _pick(self) -> Exchange:
        words = self._words(3, 6)
        place = self._random.choice(("first", "second", "third", "last"))
        word = words[{"first": 0, "second": 1, "third": 2, "last": -1}[place]]
        user = f"What is the {place} word of: {' '.join(words)}"
        return Exchange(user, f"The {place} word is {word}.", "The user asks for a word of a list.")


def short_gloss(gloss: str) -> str:
    """A dictionary's gloss without what stands in parentheses or after a semicolon, if that leaves two words."""
    short = re.sub(r"\s*\([^)]*\)", "", gloss.split(";")[0]).strip(" ,:")
    return short if " " in short else gloss


def careless(random: Random, text: str) -> str:
    """`text` as people may type it: sometimes with a small first letter or without the mark at its end."""
    if random.random() < 0.15:
        text = text[:1].lower() + text[1:]
    if random.random() < 0.15:
        text = text.rstrip(".?!")
    return text


def article(noun: str) -> str:
    """`noun` after "a" or "an"."""
    vowel = noun[0] in "aeio" or (noun[0] == "u" and not noun.startswith(("un", "us")))
    return f"{'an' if vowel else 'a'} {noun}"
