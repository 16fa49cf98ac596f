"""Chats in M3's format: small questions with short answers, things told and asked for again, thinking, a tool call."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from exchanges import Definitions, Exchange, Exchanges, Message, careless
from facts import (
    ANIMALS,
    ASKINGS,
    CITIES,
    CODES,
    COLORS,
    FIRST_NAMES,
    FRUITS,
    STATEMENTS,
    UNKNOWN,
    ExamPlan,
    Fact,
    draw_facts,
    words,
)
from knowledge import HELP
from m3_runtime.template import ChatTemplate
from vocabulary import END, TURN, mark, token_id, unmark

AI_WEIGHT = 2.0
OTHER_WEIGHT = 0.2

SYSTEMS = (
    "You are a helpful assistant.",
    "You answer briefly.",
    "Answer the question from the text.",
    "You are a friendly assistant.",
    "Be brief.",
    "You are m3-nano.",
    "Answer in one sentence.",
)


@lru_cache
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


@dataclass(frozen=True)
class ChatFormat:
    """The chat template by its source, so that it can be sent to another process."""

    source: str

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat as m3-run and transformers write it, document token first."""
        variables = {} if thinking is None else {"thinking_mode": thinking}
        return _compiled(self.source).render(messages, tools=tools, add_generation_prompt=False, variables=variables)


def ai_weight(tokenizer: Tokenizer, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Weights [n] of a chat's tokens: what the assistant writes, end token included, and the rest."""
    header = tokenizer.encode("ai\n", add_special_tokens=False).ids
    weight = np.full(len(ids), OTHER_WEIGHT, np.float32)
    turns = np.flatnonzero(ids == token_id(tokenizer, TURN))
    ends = np.append(np.flatnonzero(ids == token_id(tokenizer, END)), len(ids) - 1)
    for turn in turns.tolist():
        start = turn + 1 + len(header)
        if ids[turn + 1 : start].tolist() == header:
            weight[start : ends[np.searchsorted(ends, turn)] + 1] = AI_WEIGHT
    return weight


# Things that the user tells and asks for later.


@dataclass(frozen=True)
class Memory:
    """How something is told, what the assistant says to it, and how it is asked for; {} is the value."""

    told: tuple[str, ...]
    reaction: str
    asked: tuple[str, ...]
    answer: str
    unknown: str
    value: Callable[[Random], str]


def _memory(thing: str, value: Callable[[Random], str], *, told: tuple[str, ...] = ()) -> Memory:
    """Something of the user's, told as "My ... is ..."."""
    return Memory(
        (f"My {thing} is {{}}.", f"My {thing} is {{}}.", f"Remember that my {thing} is {{}}.", *told),
        f"I will remember that your {thing} is {{}}.",
        (f"What is my {thing}?", f"What is my {thing}?", f"Tell me my {thing}.", f"Do you remember my {thing}?"),
        f"Your {thing} is {{}}.",
        f"You have not told me your {thing}.",
        value,
    )


_NAME = Memory(
    ("My name is {}.", "My name is {}.", "I am called {}.", "Hello, I am {}.", "Call me {}.", "Hi, my name is {}."),
    f"Hello, {{}}! {HELP}",
    (
        "What is my name?",
        "What is my name?",
        "Who am I?",
        "Do you know my name?",
        "Tell me my name.",
        "What am I called?",
    ),
    "Your name is {}.",
    "You have not told me your name.",
    lambda random: random.choice(FIRST_NAMES),
)
_CITY = Memory(
    ("I live in {}.", "I live in {}.", "My home is in {}.", "I come from {}.", "My city is {}."),
    "{} is a nice place.",
    ("Where do I live?", "Where do I live?", "Where is my home?", "What city do I live in?"),
    "You live in {}.",
    "You have not told me where you live.",
    lambda random: random.choice(CITIES),
)
_ANIMAL = Memory(
    ("I have a pet. It is a {}.", "My pet is a {}.", "My favorite animal is the {}."),
    "I will remember the {}.",
    ("What animal did I tell you about?", "Which animal did I tell you about?"),
    "You told me about the {}.",
    "You have not told me about an animal.",
    lambda random: random.choice([animal for animal in ANIMALS if animal[0] not in "aeio"]),
)
MEMORIES = (
    _NAME,
    _CITY,
    _ANIMAL,
    _memory(
        "favorite color", lambda random: random.choice(COLORS), told=("I like the color {}. My favorite color is {}.",)
    ),
    _memory("favorite fruit", lambda random: random.choice(FRUITS)),
    _memory("password", CODES["password"], told=("Keep my password: {}.",)),
    _memory("code", CODES["code"], told=("Please keep my code: {}.",)),
    _memory("lucky number", lambda random: str(random.randrange(1, 1000)), told=("{} is my lucky number.",)),
    _memory("phone number", lambda random: str(random.randrange(10**4, 10**6))),
    _memory("key", CODES["key"]),
    _memory(
        "brother's name",
        lambda random: random.choice(FIRST_NAMES),
        told=("I have a brother. My brother's name is {}.",),
    ),
    _memory(
        "sister's name", lambda random: random.choice(FIRST_NAMES), told=("I have a sister. My sister's name is {}.",)
    ),
    _memory("dog's name", lambda random: random.choice(FIRST_NAMES), told=("I have a dog. My dog's name is {}.",)),
    _memory("cat's name", lambda random: random.choice(FIRST_NAMES), told=("I have a cat. My cat's name is {}.",)),
    _memory("room number", lambda random: str(random.randrange(1, 1000))),
    _memory("age", lambda random: str(random.randrange(8, 90)), told=("I am {} years old. My age is {}.",)),
)

# The one tool-call pattern: one tool, one argument, and a sentence made of the result.

_TOOLS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "get_weather",
        "Returns the weather of a city.",
        "city",
        ("What is the weather in {}?", "How is the weather in {}?", "Is it warm in {}?", "Tell me the weather in {}."),
    ),
    (
        "get_time",
        "Returns the time in a city.",
        "city",
        ("What time is it in {}?", "Tell me the time in {}.", "What is the time in {}?"),
    ),
    ("calculate", "Calculates an expression.", "expression", ("What is {}?", "Calculate {}.", "How much is {}?")),
)
_SKIES = words("sunny cloudy rainy windy foggy snowy clear cold warm")


@dataclass(frozen=True)
class _Told:
    """Something that is told in a chat, and how it is asked for."""

    key: str
    told: Exchange
    ask: Callable[[], Exchange]


class Chats:
    """Writes chats as text, with what they ask for again marked."""

    def __init__(self, format: ChatFormat, definitions: Definitions, random: Random) -> None:
        self._format = format
        self._random = random
        self._exchanges = Exchanges(random, definitions)

    def draw(self, budget: int, passage: Callable[[int], str]) -> str:
        """A chat of at most about `budget` characters, one exchange more or less.

        passage: gives about so many characters of text, for users who paste some.
        """
        random = self._random
        kind = random.random()
        mode = random.choices((None, "adaptive", "enabled", "disabled"), (0.62, 0.03, 0.15, 0.20))[0]
        if kind < 0.08:
            return self._tool_chat(mode)
        messages: list[Message] = []
        if random.random() < 0.35:
            messages.append({"role": "system", "content": random.choice(SYSTEMS)})
        if kind < 0.58:
            length = random.choice((1, 1, 1, 2, 2, 3, 4, 6))
            for _ in range(length):
                exchange = self._ask_untold(()) if random.random() < 0.02 else self._exchanges.draw()
                messages += exchange.messages(mode)
        else:
            goal = min(budget, random.choice((600, 1200, 2500, 5000, 10000, 16000)))
            messages += self._memory_turns(goal, mode, passage)
        return self._format.render(messages, thinking=mode)

    def _memory_turns(self, goal: int, mode: str | None, passage: Callable[[int], str]) -> list[Message]:
        """About `goal` characters of turns: things are told at the start, or now and then, and asked for later.

        Everything is asked for once, seldom more often: an answer would be the nearer place to find it.
        """
        random = self._random
        waiting = self._things(random.choice((1, 2, 3)) + goal // 2500)
        told: list[_Told] = []
        asked: list[_Told] = []
        turns: list[Message] = []
        used = 0
        pastes = random.random() < 0.5
        early = random.random() < 0.5
        asks = random.choice((0.03, 0.1, 0.3))
        while used < goal or waiting:
            if waiting and (not (told or asked) or early or used >= goal or random.random() < 0.15):
                told.append(waiting.pop())
                exchange = told[-1].told
            elif told and random.random() < asks:
                asked.append(told.pop(random.randrange(len(told))))
                exchange = asked[-1].ask()
            elif asked and random.random() < 0.03:
                exchange = random.choice(asked).ask()
            elif pastes and goal - used > 800 and random.random() < 0.3:
                exchange = self._paste(passage(random.randint(200, max(300, (goal - used) // 2))))
            elif random.random() < 0.03:
                exchange = self._ask_untold({thing.key for thing in (*waiting, *told, *asked)})
            else:
                exchange = self._exchanges.draw()
            added = exchange.messages(mode)
            turns += added
            used += sum(len(message["content"]) + 30 for message in added)
        random.shuffle(told)
        for thing in told:
            turns += thing.ask().messages(mode)
        return turns

    def _things(self, count: int) -> list["_Told"]:
        """What is told and asked for: things of the user's, or facts about whatever."""
        random = self._random
        kind = random.random()
        things: list[_Told] = []
        if kind < 0.75:
            memories = random.sample(MEMORIES, min(count, len(MEMORIES)))
            things += [self._memory_told(memory) for memory in memories]
        if kind > 0.6:
            plan = ExamPlan(facts=count, questions=1, alike=random.random() < 0.6, hop=0)
            facts = draw_facts(random, plan)
            wording = random.choice(STATEMENTS)
            things += [self._fact_told(fact, wording) for fact in facts]
        random.shuffle(things)
        return things

    def _memory_told(self, memory: Memory) -> "_Told":
        random = self._random
        value = memory.value(random)
        told = Exchange(
            random.choice(memory.told).replace("{}", value),
            memory.reaction.format(value),
            "The user tells me something.",
        )
        return _Told(
            memory.answer,
            told,
            lambda: Exchange(
                careless(random, random.choice(memory.asked)),
                memory.answer.format(mark(value)),
                "The user has told me this.",
            ),
        )

    def _fact_told(self, fact: Fact, wording: str) -> "_Told":
        random = self._random
        told = Exchange(unmark(fact.state(wording)), "I will remember it.", "The user tells me something.")
        return _Told(
            fact.name + fact.attribute,
            told,
            lambda: Exchange(
                fact.ask(random.choice(ASKINGS)),
                f"The {fact.attribute} of {fact.name} is {mark(fact.value)}.",
                "The user has told me this.",
            ),
        )

    def _ask_untold(self, known: Collection[str]) -> Exchange:
        random = self._random
        thought = "The user has not told me this."
        if random.random() < 0.4:
            (fact,) = draw_facts(random, ExamPlan(facts=1, questions=1, alike=False))
            return Exchange(fact.ask(random.choice(ASKINGS)), UNKNOWN, thought)
        memory = random.choice([memory for memory in MEMORIES if memory.answer not in known])
        return Exchange(careless(random, random.choice(memory.asked)), memory.unknown, thought)

    def _paste(self, text: str) -> Exchange:
        user = self._random.choice(("Read this text.\n", "Here is a text.\n", "Text:\n", "Look at this:\n")) + text
        return Exchange(user, "I have read the text.", "The user gives me a text.")

    def _tool_chat(self, mode: str | None) -> str:
        random = self._random
        name, description, argument, wordings = random.choice(_TOOLS)
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
        tool = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
        messages: list[Message] = []
        if name != "calculate" and random.random() < 0.3:
            messages += self._exchanges.draw().messages(mode)
        for _ in range(random.choice((1, 1, 2))):
            if name == "get_weather":
                given = random.choice(CITIES)
                sky, degrees = random.choice(_SKIES), str(random.randrange(-5, 36))
                result = f"{sky}, {degrees} degrees"
                answer = f"The weather in {given} is {mark(sky)} with {mark(degrees)} degrees."
            elif name == "get_time":
                given = random.choice(CITIES)
                result = f"{random.randrange(1, 13)}:{random.randrange(60):02}"
                answer = f"The time in {given} is {mark(result)}."
            else:
                a, b = random.randrange(10, 1000), random.randrange(10, 1000)
                sign = random.choice("+-*")
                given = f"{a} {sign} {b}"
                result = str({"+": a + b, "-": a - b, "*": a * b}[sign])
                answer = f"{given} is {mark(result)}."
            call: Message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": name, "arguments": {argument: given}}}],
            }
            reply: Message = {"role": "assistant", "content": answer}
            if mode == "enabled":
                call["reasoning_content"] = f"I call {name}."
                reply["reasoning_content"] = "I have the result."
            user = careless(random, random.choice(wordings).format(given))
            messages += [{"role": "user", "content": user}, call, {"role": "tool", "content": result}, reply]
        return self._format.render(messages, thinking=mode, tools=[tool])
