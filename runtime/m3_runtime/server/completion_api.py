"""POST /v1/completions."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from m3_runtime.request import End, Token
from m3_runtime.server.answering import Answering
from m3_runtime.server.completion import (
    EventStream,
    Heading,
    all_updates,
    finish_reason,
    stop_reason,
    token_text,
    usage_of,
)
from m3_runtime.server.reading import Update
from m3_runtime.server.requests import CompletionRequest
from m3_runtime.server.service import Service


async def answer_completion(
    service: Service, parsed: CompletionRequest, answering: Answering, request: HttpRequest
) -> Response:
    """The response to a request that is queued."""
    completion = _Completion(service, parsed, answering)
    if parsed.stream:
        return EventStream(answering, request, first=[], part=completion.part, last=completion.last)
    updates, end = await all_updates(answering, request)
    return JSONResponse(completion.whole(updates, end))


class _Completion:
    def __init__(self, service: Service, parsed: CompletionRequest, answering: Answering) -> None:
        self._tokenizer = service.tokenizer
        self._parsed = parsed
        self._reading = answering.reading
        self._heading = Heading("text_completion", service.name, "cmpl")
        self._offset = 0

    def part(self, update: Update) -> list[dict[str, Any]]:
        choice = {
            "index": 0,
            "text": update.text,
            "logprobs": self._logprobs(update.logprobs),
            "finish_reason": None,
        }
        return [self._around(choice)]

    def last(self, end: End) -> list[dict[str, Any]]:
        bodies = [self._around({"index": 0, "text": "", "logprobs": None, **self._finish(end)})]
        if self._parsed.include_usage:
            bodies.append(self._heading.around([], usage_of(end, 0)))
        return bodies

    def whole(self, updates: list[Update], end: End) -> dict[str, Any]:
        text = "".join(update.text for update in updates)
        logprobs = self._logprobs([token for update in updates for token in update.logprobs])
        choice = {"index": 0, "text": text, "logprobs": logprobs, **self._finish(end)}
        return self._heading.around([choice], usage_of(end, 0))

    def _around(self, choice: dict[str, Any]) -> dict[str, Any]:
        body = self._heading.around([choice])
        return {**body, "usage": None} if self._parsed.include_usage else body

    def _finish(self, end: End) -> dict[str, Any]:
        reason = stop_reason(end, self._reading.stop_string)
        return {"finish_reason": finish_reason(end), **({"stop_reason": reason} if reason else {})}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self._parsed.logprobs is None:
            return None
        texts = [token_text(token.id, self._tokenizer)[0] for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        top = [{token_text(id, self._tokenizer)[0]: logprob for id, logprob in token.top} for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": top,
            "text_offset": offsets,
        }
