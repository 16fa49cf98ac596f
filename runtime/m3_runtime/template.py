"""The chat template of a GGUF file: messages to the text of a prompt, as transformers renders it."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from jinja2 import Template, meta
from jinja2.exceptions import TemplateSyntaxError

from m3_runtime.errors import InputError
from m3_runtime.sandbox import RefusedError, TemplateEnvironment

MAX_TEMPLATE_CHARACTERS = 1 << 20

Message = Mapping[str, Any]

# The names under which a message may carry its reasoning, best first (source: transformers 5.24).
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled Jinja template. Only this template is ever used: one that fails is an error, not another format."""

    def __init__(self, source: str) -> None:
        """Raises InputError if `source` is no template."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise InputError(f"chat template: {len(source)} characters, at most {MAX_TEMPLATE_CHARACTERS}")
        environment = TemplateEnvironment()
        try:
            self._template: Template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except Exception as error:
            raise InputError(_message(error)) from None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "ChatTemplate":
        """The template of a GGUF file. Raises InputError if the file has none or it cannot be compiled."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            raise InputError(
                "tokenizer.chat_template: the file has no chat template; only --raw with -p or -f works without one"
            )
        if not isinstance(source, str):
            raise InputError(f"tokenizer.chat_template: expected a string, found {type(source).__name__}")
        return cls(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages`.

        messages: dicts of JSON values with `role` and `content`, for the assistant also `reasoning_content`
        and `tool_calls`; keys whose value is None count as absent. tools: JSON schemas. variables: further names for
        the template, for example `thinking_mode`.

        Raises InputError, with the template's line where it is known, if the template fails, refuses the messages
        with `raise_exception`, or touches what the sandbox forbids.
        """
        try:
            return self._template.render(
                dict(variables or {}),
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            raise InputError(_message(error)) from None


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Drops empty keys; reasoning under any of its names is given under `reasoning_content` and `thinking`."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in _REASONING if key in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _message(error: Exception) -> str:
    """One line: where the template failed and why."""
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _template_line(error.__traceback__)
    where = "chat template" if line is None else f"chat template, line {line}"
    text = " ".join(str(error).split())
    if isinstance(error, RefusedError):
        return f"{where} refuses the conversation: {text}"
    return f"{where}: {type(error).__name__}" + (f": {text}" if text else "")


def _template_line(traceback: TracebackType | None) -> int | None:
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
