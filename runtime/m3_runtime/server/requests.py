"""The bodies of requests, as OpenAI's interface has them. What would change an answer and is not done is refused."""

import json
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_BIASES: Final = 1024
_MAX_STOP_CHARACTERS: Final = 1000
_NAME: Final = r"^[a-zA-Z0-9_./:-]{1,128}$"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _joined(content: object) -> object:
    """The text of a content: a string, or a list of text parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise ValueError(f"a part is {str(kind)[:40]!r}, expected 'text': this model reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError("a text part has no string 'text'")
        texts.append(part["text"])
    return "".join(texts)


Content: TypeAlias = Annotated[str, BeforeValidator(_joined)]


class FunctionCall(_Body):
    # Also a name that no tool has: a model may have made it up, and its client sends back what it got.
    name: str = Field(min_length=1, max_length=1000)
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            raise ValueError("is no valid JSON") from None
        if not isinstance(value, dict):
            raise ValueError("is no JSON object")
        return text


class CallOfTool(_Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # what a client keeps of a stream


class SystemMessage(_Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(_Body):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under the name that other servers give it
    tool_calls: list[CallOfTool] | None = None
    name: str | None = None
    # Parts of an answer that a client may hand back as they came.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(_Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(_Body):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # no answer is padded


class NamedSchema(_Body):
    name: str = Field(pattern=_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and has to be there")
        return self


class TemplateVariables(_Body):
    thinking_mode: Literal["enabled", "disabled", "adaptive"] | None = None


def _listed(stop: object) -> object:
    return [stop] if isinstance(stop, str) else stop


def _checked_stops(stops: list[str]) -> list[str]:
    if any(not stop or len(stop) > _MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"a stop string has 1 to {_MAX_STOP_CHARACTERS} characters")
    return stops


class Sampling(_Body):
    """What both kinds of completions have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], BeforeValidator(_listed), Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MAX_BIASES)
    n: Literal[1] | None = None
    # Beyond OpenAI's: what m3-run has.
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=1e-3, le=1000)
    # Of no consequence here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, stops: list[str] | None) -> list[str] | None:
        return stops and _checked_stops(stops)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "Sampling":
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, choice: object) -> object:
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise ValueError(f"{choice[:40]!r}, expected none, auto, required or a named function")
        if isinstance(choice, dict) and choice.get("type") != "function":
            raise ValueError(f"type is {str(choice.get('type'))[:40]!r}, expected function")
        return choice

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are both given")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name[:80]!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, and there are no tools")
        if self.forces_call and self.is_structured:
            raise ValueError("tool_choice asks for a call and response_format for a text")
        return self

    @property
    def forces_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def is_structured(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def thinking_mode(self) -> str | None:
        """`thinking_mode` of the template, None where the request leaves it to the server."""
        if self.chat_template_kwargs and self.chat_template_kwargs.thinking_mode:
            return self.chat_template_kwargs.thinking_mode
        if self.reasoning_effort:
            return "disabled" if self.reasoning_effort == "none" else "enabled"
        return None


def _single_prompt(prompt: object) -> object:
    """A list of one prompt is that prompt."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise ValueError(f"{len(prompt)} prompts, expected one for each request")
        return prompt[0]
    return prompt


class CompletionRequest(Sampling):
    prompt: Annotated[
        str | list[Annotated[int, Field(ge=0, lt=2**31)]], BeforeValidator(_single_prompt), Field(min_length=1)
    ]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
