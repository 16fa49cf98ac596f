"""Chat completions with OpenAI's client: whole and streamed, thinking, tools, sampling, structured output."""

import json

import openai
import pytest
from pydantic import BaseModel

from m3_runtime.engine import GGUF
from m3_runtime.text import ChatTokenizer

MODEL = "m3-nano"
SUM = [{"role": "user", "content": "What is 7 plus 5?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def chat(client: openai.OpenAI, messages, **options):
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, "temperature": 0, **options})


def streamed(client: openai.OpenAI, messages, **options):
    """The parts of a streamed answer, joined."""
    joined = {"content": "", "reasoning": "", "calls": [], "finish": None, "usage": None, "pieces": [], "logprobs": []}
    for chunk in chat(client, messages, stream=True, stream_options={"include_usage": True}, **options):
        assert chunk.object == "chat.completion.chunk" and chunk.model == MODEL
        if not chunk.choices:
            joined["usage"] = chunk.usage
            continue
        (choice,) = chunk.choices
        assert joined["finish"] is None
        joined["finish"] = choice.finish_reason
        joined["content"] += choice.delta.content or ""
        joined["pieces"].append(choice.delta.content or "")
        joined["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        joined["calls"] += choice.delta.tool_calls or []
        if choice.logprobs:
            joined["logprobs"] += choice.logprobs.content
    return joined


def test_an_answer_whole_and_streamed(client):
    answer = chat(client, SUM)
    (choice,) = answer.choices
    assert choice.message.content == "7 plus 5 is 12." and choice.message.role == "assistant"
    assert choice.message.reasoning_content == "7 + 5 = 12"
    assert choice.finish_reason == "stop" and answer.model == MODEL and answer.object == "chat.completion"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens == 9
    parts = streamed(client, SUM)
    assert (parts["content"], parts["reasoning"], parts["finish"]) == ("7 plus 5 is 12.", "7 + 5 = 12", "stop")
    assert len(parts["pieces"]) > 10  # token by token
    assert parts["usage"].completion_tokens == usage.completion_tokens
    assert parts["usage"].prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_without_thinking(client):
    for options in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"thinking_mode": "disabled"}}},
    ):
        message = chat(client, SUM, **options).choices[0].message
        assert "12" in message.content and not hasattr(message, "reasoning_content")
    thinking = chat(client, SUM, reasoning_effort="high").choices[0].message
    assert thinking.reasoning_content and "think" not in thinking.content


def test_limits_of_tokens(client):
    answer = chat(client, SUM, max_tokens=12)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12
    assert chat(client, SUM, max_completion_tokens=12).choices[0].message == answer.choices[0].message
    with pytest.raises(
        openai.BadRequestError, match=r"2048 tokens; the prompt has \d+ and 2040 are asked for"
    ) as error:
        chat(client, SUM, max_tokens=2040)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["is 12"], "7 plus 5 "),
        (["plus 5 is 13", "5 is 12."], "7 plus "),  # the longer one never comes true
        (["never", "7"], ""),
        (["12.?"], "7 plus 5 is 12."),  # held back to the end, then it was none
    ],
)
def test_stop_strings_do_not_leak(client, stop, expected):
    whole = chat(client, SUM, stop=stop)
    parts = streamed(client, SUM, stop=stop, logprobs=True)
    assert whole.choices[0].message.content == parts["content"] == expected
    assert whole.choices[0].finish_reason == parts["finish"] == "stop"
    # A token of which the stop string begins inside is not among them.
    assert expected.startswith("".join(entry.token for entry in parts["logprobs"])) and len(parts["logprobs"]) >= len(
        expected.split()
    )
    if expected != "7 plus 5 is 12.":
        assert whole.choices[0].stop_reason in stop


def test_log_probabilities(client):
    whole = chat(client, SUM, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob
    parts = streamed(client, SUM, logprobs=True, top_logprobs=3)
    assert parts["logprobs"] == entries
    assert chat(client, SUM, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_sampling(client, nano_gguf):
    story = [{"role": "user", "content": "Tell me something."}]
    drawn = [chat(client, story, temperature=1.5, top_p=1, seed=seed, max_tokens=30) for seed in (1, 1, 2, -1)]
    texts = [(answer.choices[0].message.content, str(answer.choices[0].message)) for answer in drawn]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    # 7 is what the answer begins with; -100 keeps it out of it.
    answer = chat(client, SUM, logprobs=True, reasoning_effort="none")
    assert answer.choices[0].message.content.startswith("7")
    with GGUF(nano_gguf) as file:
        (seven,) = ChatTokenizer(file.metadata).encode("7")
    banned = chat(client, SUM, reasoning_effort="none", logit_bias={str(seven): -100})
    assert "7" not in banned.choices[0].message.content
    repeated = chat(client, SUM, presence_penalty=2, frequency_penalty=2, extra_body={"top_k": 1, "min_p": 0.1})
    assert repeated.choices[0].message.content


# --------------------------------------------------------------------------------------------------------------- tools


def test_a_tool_loop_evaluates_only_what_is_new(client):
    """Like a coding agent: calls and results, turn after turn, the whole conversation sent each time."""
    cities = ["Rome", "Paris", "Oslo", "Cairo", "Lima"]
    messages = []
    before = 0
    for turn, city in enumerate(cities):
        messages.append({"role": "user", "content": f"What is the weather in {city}?"})
        for step in range(2):
            answer = chat(client, messages, tools=[WEATHER], max_tokens=120)
            cached, prompt = answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens
            if turn or step:
                # All that the turn before held, up to the token that ended it, which was not evaluated any more.
                assert cached == before - 1
            before = prompt + answer.usage.completion_tokens
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if step == 0:
                assert answer.choices[0].finish_reason == "tool_calls" and not message.content
                (call,) = message.tool_calls
                assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": city}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
            else:
                assert answer.choices[0].finish_reason == "stop" and message.content


def test_calls_are_streamed_without_their_markup(client):
    parts = streamed(client, [{"role": "user", "content": "What is the weather in Rome?"}], tools=[WEATHER])
    (call,) = parts["calls"]
    assert (call.index, call.type, call.function.name) == (0, "function", "get_weather") and call.id
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert parts["finish"] == "tool_calls" and parts["content"] == "" and "minimax" not in parts["reasoning"]


def test_tool_choice(client):
    ask = [{"role": "user", "content": "What is 7 plus 5?"}]
    typed = {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {
                "nights": {"type": "integer"},
                "class": {"enum": ["first", "second"]},
                "breakfast": {"type": "boolean"},
                "guest": {"type": "object", "properties": {"name": {"const": "Ann"}}, "required": ["name"]},
            },
            "required": ["nights", "class", "breakfast", "guest"],
        },
    }
    tools = [WEATHER, {"type": "function", "function": typed}]
    required = chat(client, ask, tools=tools, tool_choice="required", max_tokens=200, parallel_tool_calls=False)
    assert len(required.choices[0].message.tool_calls) == 1 and required.choices[0].finish_reason == "tool_calls"
    named = {"type": "function", "function": {"name": "book"}}
    for seed in range(3):
        answer = chat(
            client,
            ask,
            tools=tools,
            tool_choice=named,
            max_tokens=200,
            temperature=1,
            seed=seed,
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "book" and set(arguments) == {"nights", "class", "breakfast", "guest"}
        assert isinstance(arguments["nights"], int) and isinstance(arguments["breakfast"], bool)
        assert arguments["class"] in ("first", "second") and arguments["guest"] == {"name": "Ann"}
    weather = [{"role": "user", "content": "What is the weather in Rome?"}]
    refused = chat(client, weather, tools=tools, tool_choice="none", max_tokens=60)
    assert refused.choices[0].message.tool_calls is None and "minimax" not in (refused.choices[0].message.content or "")


def test_results_of_tools_are_matched_with_their_calls(client):
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for id, city in (("a", "Rome"), ("b", "Oslo"))
    ]
    start = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    rome = {"role": "tool", "tool_call_id": "a", "content": "hot"}
    oslo = {"role": "tool", "tool_call_id": "b", "content": "cold"}
    one = chat(client, [*start, rome, oslo], tools=[WEATHER], max_tokens=5)
    other = chat(client, [*start, oslo, rome], tools=[WEATHER], max_tokens=5)
    assert other.usage.prompt_tokens_details.cached_tokens == one.usage.prompt_tokens - 1  # the same prompt
    with pytest.raises(openai.BadRequestError, match=r"messages.2.tool_call_id: no call 'c'"):
        chat(client, [*start, {**rome, "tool_call_id": "c"}], tools=[WEATHER])
    broken = [{**calls[0], "function": {"name": "get_weather", "arguments": "{"}}]
    with pytest.raises(openai.BadRequestError, match="no valid JSON"):
        chat(client, [start[0], {**start[1], "tool_calls": broken}, rome], tools=[WEATHER])


# --------------------------------------------------------------------------------------------------- structured output


class Item(BaseModel):
    name: str
    count: int
    tags: list[str]


class Order(BaseModel):
    items: list[Item]
    paid: bool


def test_json_of_a_schema_with_the_client_s_own_parser(client):
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    parts = streamed(client, SUM, response_format=form, max_tokens=100, logprobs=True)
    assert isinstance(json.loads(parts["content"])["sum"], int) and parts["finish"] == "stop"
    assert parts["reasoning"] == "7 + 5 = 12"  # it may think first
    assert "".join(entry.token for entry in parts["logprobs"]) == parts["content"]
    complete = 0
    for seed in range(4):
        # A small model drawing freely: whatever it writes must be of the form, as far as it comes.
        try:
            answer = client.chat.completions.parse(
                model=MODEL,
                messages=SUM,
                response_format=Order,
                seed=seed,
                temperature=1,
                max_tokens=400,
                reasoning_effort="none",
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Order)
        complete += 1
    assert complete


def test_json_objects_and_characters_of_several_bytes(client):
    answer = chat(client, SUM, response_format={"type": "json_object"}, max_tokens=200, reasoning_effort="none")
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    value = 'ein "Zebra" \u00fcber \u4e2d\u6587 \U0001f600\n</mm:think>]<]minimax[>[<tool_call>'
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"text": value}}}}
    answer = chat(client, SUM, response_format=form, max_tokens=200)
    assert json.loads(answer.choices[0].message.content) == {"text": value}  # markup in a string is text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "frob"}, "frob"),
        ({"not": {"type": "string"}}, "not"),
        ({"$ref": "http://127.0.0.1:1/x"}, "cannot be compiled"),
        ({"type": "string", "pattern": "(?<=x)y"}, "cannot be compiled"),
    ],
)
def test_a_schema_that_cannot_be_compiled(client, schema, message):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=f"response_format: the schema.*{message}"):
        chat(client, SUM, response_format=form)


# -------------------------------------------------------------------------------------------------- completions, models


def test_completions(client):
    options = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0}
    whole = client.completions.create(**options, max_tokens=8, logprobs=2)
    (choice,) = whole.choices
    assert whole.object == "text_completion" and choice.finish_reason == "length" and whole.usage.completion_tokens == 8
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.top_logprobs[0]) == 2
    chunks = list(client.completions.create(**options, max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert client.completions.create(**options).usage.completion_tokens == 16  # OpenAI's default
    ids = client.completions.create(**{**options, "prompt": [5, 6, 7]}, max_tokens=2)
    assert ids.usage.prompt_tokens == 3
    with pytest.raises(openai.BadRequestError, match="token id 999999, expected 0 to 4095"):
        client.completions.create(**{**options, "prompt": [999999]})
    with pytest.raises(openai.BadRequestError, match="2 prompts, expected one"):
        client.completions.create(**{**options, "prompt": ["a", "b"]})


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.context_length == 2048
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'gpt-4' does not exist, this server has 'm3-nano'"):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat(client, SUM, model="gpt-4")
