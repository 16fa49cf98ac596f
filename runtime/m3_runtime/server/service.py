"""One model behind the server: requests to jobs of the scheduler."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from m3_runtime.errors import ContextError, InputError
from m3_runtime.reply import opens_thinking
from m3_runtime.request import Constraint, End, Request
from m3_runtime.sampler import Adjustment, Sampler, SamplerOptions, new_seed
from m3_runtime.scheduler import Scheduler
from m3_runtime.server.answering import Answering
from m3_runtime.server.constraint import GrammarCompiler, ReplyConstraint
from m3_runtime.server.reading import ChatForm, ChatReading, Reading, TextReading
from m3_runtime.server.refusal import RefusalError
from m3_runtime.server.requests import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Message,
    NamedTool,
    Sampling,
    ToolMessage,
)
from m3_runtime.server.tool_grammar import tool_grammar
from m3_runtime.template import ChatTemplate
from m3_runtime.text import ChatTokenizer
from m3_runtime.tool_call import NAMESPACE

_COMPLETION_TOKENS: Final = 16  # OpenAI's default: a text has no end of its own


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    max_tokens: int | None  #: of an answer; None: no limit but the context
    seconds: float  #: from its arrival to its end
    body_bytes: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that is known to make sense, before it is queued."""

    ids: Sequence[int]
    sampler: Sampler
    reading: Reading
    max_tokens: int
    constraint: Constraint | None = None
    top_logprobs: int | None = None


class Service:
    """Makes prompts, and hands them to the scheduler. Preparing is for any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: ChatTokenizer,
        metadata: Mapping[str, object],
        *,
        name: str,
        n_vocab: int,
        limits: Limits,
        thinking: str | None = None,
    ) -> None:
        """metadata: of the file. name: the id of the model. thinking: `thinking_mode` where a request has none."""
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.name = name
        self.limits = limits
        self.context = scheduler.options.context
        self._template = ChatTemplate.from_metadata(metadata)
        self._check_thinking(thinking, "--thinking")
        self._thinking = thinking
        self._sampling = SamplerOptions.from_metadata(metadata)
        self._n_vocab = n_vocab
        self._unused = [*tokenizer.unused_ids(), *range(len(tokenizer), n_vocab)]
        self._grammars = GrammarCompiler(tokenizer, n_vocab)

    # ------------------------------------------------------------------------------------------------ preparing

    def prepare_chat(self, request: ChatRequest) -> Prepared:
        """Raises RefusalError or InputError for what cannot be done."""
        self._check_model(request.model)
        self._check_thinking(request.thinking_mode, "thinking_mode")
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        prompt = self._prompt(request, tools)
        ids = self.tokenizer.encode(prompt)
        structured = self._structured(request, prompt)
        with_tools = request.tool_choice != "none" and bool(tools)
        form = ChatForm(
            stops=request.stop or (),
            tools=tools,
            with_tools=with_tools,
            single_call=request.parallel_tool_calls is False,
            thinking=opens_thinking(prompt),
            structured=structured,
        )
        return Prepared(
            ids=ids,
            sampler=self._sampler(request, banned=[] if with_tools else self._tool_ids()),
            reading=ChatReading(self.tokenizer, form),
            max_tokens=self._most_tokens(len(ids), request.most_tokens),
            constraint=structured or self._forced_call(request, prompt),
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )

    def prepare_completion(self, request: CompletionRequest) -> Prepared:
        """Raises RefusalError or InputError for what cannot be done."""
        self._check_model(request.model)
        if isinstance(request.prompt, str):
            ids: Sequence[int] = self.tokenizer.encode(request.prompt)
        else:
            ids = request.prompt
            if max(ids) >= self._n_vocab:
                raise InputError(f"prompt: token id {max(ids)}, expected 0 to {self._n_vocab - 1}")
        return Prepared(
            ids=ids,
            sampler=self._sampler(request),
            reading=TextReading(self.tokenizer, request.stop or ()),
            max_tokens=self._most_tokens(len(ids), request.max_tokens, default=_COMPLETION_TOKENS),
            top_logprobs=request.logprobs,
        )

    def start(self, prepared: Prepared, on_end: Callable[[End], None]) -> Answering:
        """Queues a request; from the event loop. on_end: called when the job has ended. Raises BusyError."""
        answering = Answering(prepared.reading, on_end)
        answering.job = self.scheduler.submit(
            Request(
                ids=prepared.ids,
                sampler=prepared.sampler,
                listener=answering,
                max_tokens=prepared.max_tokens,
                end_ids=self.tokenizer.end_ids,
                constraint=prepared.constraint,
                top_logprobs=prepared.top_logprobs,
                seconds=self.limits.seconds,
            )
        )
        return answering

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            message = f"the model {name[:100]!r} does not exist, this server has {self.name!r}"
            raise RefusalError(404, message, param="model", code="model_not_found")

    def _check_thinking(self, mode: str | None, what: str) -> None:
        if mode is not None and "thinking_mode" not in self._template.variables:
            raise InputError(f"{what}: the chat template of this file has no thinking_mode")

    def _prompt(self, request: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> str:
        variables: dict[str, object] = dict(self.tokenizer.template_variables())
        if mode := request.thinking_mode or self._thinking:
            variables["thinking_mode"] = mode
        messages = [_as_dict(message) for message in _in_order_of_calls(request.messages)]
        return self._template.render(messages, tools=tools or None, variables=variables)

    def _structured(self, request: ChatRequest, prompt: str) -> ReplyConstraint | None:
        form = request.response_format
        if form is None or form.type == "text":
            return None
        return self._grammars.json(form.json_schema.schema_ if form.json_schema else {"type": "object"}, prompt=prompt)

    def _forced_call(self, request: ChatRequest, prompt: str) -> ReplyConstraint | None:
        if not request.forces_call:
            return None
        choice = request.tool_choice
        functions = [tool.function for tool in request.tools or ()]
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
        grammar = tool_grammar(
            [function.model_dump() for function in functions],
            self.tokenizer,
            parallel=request.parallel_tool_calls is not False,
        )
        return self._grammars.lark(grammar, prompt=prompt, what="tool_choice: the call")

    def _tool_ids(self) -> list[int]:
        """What starts a tool call, and stands for nothing else."""
        id = self.tokenizer.token_id(NAMESPACE)
        return [] if id is None else [id]

    def _sampler(self, request: Sampling, banned: Sequence[int] = ()) -> Sampler:
        given: dict[str, Any] = {
            "temperature": request.temperature,
            # 0 is allowed by OpenAI: the best token alone.
            "top_p": 1e-9 if request.top_p == 0 else request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "repeat_penalty": request.repeat_penalty,
        }
        options = replace(self._sampling, **{name: value for name, value in given.items() if value is not None})
        adjustment = Adjustment(
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            bias=self._bias(request.logit_bias or {}),
        )
        seed = new_seed() if request.seed is None else request.seed % 2**64
        return Sampler(options, seed, [*self._unused, *banned], adjustment)

    def _bias(self, given: Mapping[str, float]) -> dict[int, float]:
        bias = {}
        for text, value in given.items():
            if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < self._n_vocab):
                raise InputError(f"logit_bias: {text[:40]!r}, expected a token id from 0 to {self._n_vocab - 1}")
            bias[int(text)] = value
        return bias

    def _most_tokens(self, n_prompt: int, asked: int | None, default: int | None = None) -> int:
        """Tokens that a reply may have; default: where the request does not say, None: as many as there is room for.

        Raises ContextError if prompt and reply do not fit in the context.
        """
        limit, room = self.limits.max_tokens, self.context - n_prompt
        if asked is not None and limit is not None and asked > limit:
            raise RefusalError(400, f"max_tokens is {asked}, this server allows {limit}", param="max_tokens")
        if room < (asked or 1):
            wanted = "" if asked is None else f" and {asked} are asked for as answer"
            raise ContextError(
                f"this model's maximum context length is {self.context} tokens; the prompt has {n_prompt}{wanted}"
            )
        return asked or min(room, limit or room, default or room)


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Results of tools in the order of their calls: the model's format tells them apart by nothing else."""
    ordered: list[Message] = []
    places: dict[str, int] = {}
    results: list[tuple[int, ToolMessage]] = []
    for i, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in places:
                raise RefusalError(
                    400,
                    f"messages.{i}.tool_call_id: no call {message.tool_call_id[:80]!r} in the assistant's message "
                    "before it, or its result is there already",
                    param=f"messages.{i}.tool_call_id",
                )
            results.append((places.pop(message.tool_call_id), message))
            continue
        ordered += [result for _, result in sorted(results, key=lambda pair: pair[0])]
        results = []
        calls = message.tool_calls or () if isinstance(message, AssistantMessage) else ()
        places = {call.id: place for place, call in enumerate(calls)}
        ordered.append(message)
    return ordered + [result for _, result in sorted(results, key=lambda pair: pair[0])]


def _as_dict(message: Message) -> dict[str, Any]:
    """A message as the template takes it."""
    given: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message, AssistantMessage):
        given["content"] = message.content or ""
        given["reasoning_content"] = message.reasoning_content or message.reasoning
        if message.tool_calls:
            given["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")},
                }
                for call in message.tool_calls
            ]
    return given
