"""What answers of both kinds have: finish reason, usage, log probabilities, server-sent events."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse

from m3_runtime.native import version
from m3_runtime.request import End, EndReason, Token
from m3_runtime.server.answering import Answering, ClientGoneError
from m3_runtime.server.reading import Update
from m3_runtime.server.refusal import RefusalError
from m3_runtime.text import ChatTokenizer

FINGERPRINT: Final = f"m3-gguf-{version()}"

_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class Heading:
    """The fields that every part of an answer begins with."""

    def __init__(self, kind: str, model: str, prefix: str) -> None:
        """kind: the "object" of the answer. prefix: of its id."""
        self.kind = kind
        self._model = model
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "id": self._id,
            "object": self.kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
        return body if usage is None else {**body, "usage": usage}


def finish_reason(end: End, *, called: bool = False) -> str:
    """OpenAI's word for it."""
    if end.reason in (EndReason.MAX_TOKENS, EndReason.CONTEXT, EndReason.TIME):
        return "length"
    return "tool_calls" if called else "stop"


def stop_reason(end: End, stop_string: str | None) -> str | None:
    """Which of several causes a finish reason had: the stop string, "context" or "time". Not part of OpenAI's."""
    return {EndReason.CONTEXT: "context", EndReason.TIME: "time"}.get(end.reason, stop_string)


def usage_of(end: End, thinking_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.generated_tokens,
        "total_tokens": end.prompt_tokens + end.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": thinking_tokens},
    }


def token_text(id: int, tokenizer: ChatTokenizer) -> tuple[str, list[int] | None]:
    """A token as text, a part of a character as U+FFFD, and its bytes."""
    if id >= len(tokenizer):
        return "", None
    data = tokenizer.token_bytes(id)
    return data.decode("utf-8", errors="replace"), list(data)


def chat_logprobs(tokens: list[Token], tokenizer: ChatTokenizer) -> dict[str, Any]:
    def entry(id: int, logprob: float) -> dict[str, Any]:
        text, data = token_text(id, tokenizer)
        return {"token": text, "logprob": logprob, "bytes": data}

    content = [
        {**entry(token.id, token.logprob or 0.0), "top_logprobs": [entry(*pair) for pair in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


async def all_updates(answering: Answering, request: HttpRequest) -> tuple[list[Update], End]:
    """Waits for the end of an answer that is not streamed."""
    updates = [update async for update in answering.updates(request) if update is not None]
    assert answering.end is not None
    return updates, answering.end


class EventStream(StreamingResponse):
    """An answer as server-sent events, each with a JSON object, the last one with [DONE]."""

    def __init__(
        self,
        answering: Answering,
        request: HttpRequest,
        *,
        first: list[dict[str, Any]],
        part: Callable[[Update], list[dict[str, Any]]],
        last: Callable[[End], list[dict[str, Any]]],
    ) -> None:
        """first, part, last: the objects at the start, for an update, and when all is there."""
        self._answering = answering
        events = self._events(request, first, part, last)
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)

    async def _events(
        self,
        request: HttpRequest,
        first: list[dict[str, Any]],
        part: Callable[[Update], list[dict[str, Any]]],
        last: Callable[[End], list[dict[str, Any]]],
    ) -> AsyncIterator[str]:
        answering = self._answering
        try:
            for body in first:
                yield _event(body)
            async for update in answering.updates(request):
                if update is None:
                    yield ": still at work\n\n"
                    continue
                for body in part(update):
                    yield _event(body)
            assert answering.end is not None
            for body in last(answering.end):
                yield _event(body)
            yield "data: [DONE]\n\n"
        except ClientGoneError:
            return
        except RefusalError as refusal:  # too late for another status
            yield _event(refusal.body)
        finally:
            answering.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
