"""POST /v1/chat/completions."""

import json
import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from m3_runtime.request import End
from m3_runtime.server.answering import Answering
from m3_runtime.server.completion import (
    EventStream,
    Heading,
    all_updates,
    chat_logprobs,
    finish_reason,
    stop_reason,
    usage_of,
)
from m3_runtime.server.reading import ChatReading, Update
from m3_runtime.server.requests import ChatRequest
from m3_runtime.server.service import Service
from m3_runtime.tool_call import BrokenCall, ToolCall


async def answer_chat(service: Service, parsed: ChatRequest, answering: Answering, request: HttpRequest) -> Response:
    """The response to a request that is queued."""
    reading = answering.reading
    assert isinstance(reading, ChatReading)
    chat = _Chat(service, parsed, reading)
    if parsed.stream:
        return EventStream(answering, request, first=chat.first(), part=chat.part, last=chat.last)
    updates, end = await all_updates(answering, request)
    return JSONResponse(chat.whole(updates, end))


class _Chat:
    def __init__(self, service: Service, parsed: ChatRequest, reading: ChatReading) -> None:
        self._tokenizer = service.tokenizer
        self._parsed = parsed
        self._reading = reading
        self._heading = Heading(
            "chat.completion.chunk" if parsed.stream else "chat.completion", service.name, "chatcmpl"
        )
        self._n_calls = 0

    # ------------------------------------------------------------------------------------------------- streamed

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def part(self, update: Update) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if update.reclassified is not None:
            # What was sent as content cannot be taken back. A client that knows the field does it.
            deltas.append({"reasoning_content": update.reclassified, "content_was_reasoning": True})
        if update.thinking:
            deltas.append({"reasoning_content": update.thinking})
        if update.text:
            deltas.append({"content": update.text})
        if update.calls:
            deltas.append({"tool_calls": [self._call(call, with_index=True) for call in update.calls]})
        chunks = [self._chunk(delta) for delta in deltas]
        if update.logprobs and self._parsed.logprobs:
            if not update.text:
                chunks.append(self._chunk({}))
            chunks[-1]["choices"][0]["logprobs"] = chat_logprobs(update.logprobs, self._tokenizer)
        return chunks

    def last(self, end: End) -> list[dict[str, Any]]:
        chunk = self._chunk({})
        chunk["choices"][0].update(self._finish(end))
        chunks = [chunk]
        if self._parsed.include_usage:
            chunks.append(self._heading.around([], usage_of(end, self._reading.thinking_tokens)))
        return chunks

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._heading.around([choice])
        return {**body, "usage": None} if self._parsed.include_usage else body

    # ---------------------------------------------------------------------------------------------------- whole

    def whole(self, updates: list[Update], end: End) -> dict[str, Any]:
        reply = self._reading.reply
        called = [self._call(call) for call in self._reading.calls]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.text if reply.text or not called else None,
            "refusal": None,
        }
        if reply.thinking:
            message["reasoning_content"] = reply.thinking
        if called:
            message["tool_calls"] = called
        logprobs = None
        if self._parsed.logprobs:
            logprobs = chat_logprobs([token for update in updates for token in update.logprobs], self._tokenizer)
        choice = {"index": 0, "message": message, "logprobs": logprobs, **self._finish(end)}
        return self._heading.around([choice], usage_of(end, self._reading.thinking_tokens))

    # --------------------------------------------------------------------------------------------------- common

    def _finish(self, end: End) -> dict[str, Any]:
        finish: dict[str, Any] = {"finish_reason": finish_reason(end, called=bool(self._reading.calls))}
        if reason := stop_reason(end, self._reading.stop_string):
            finish["stop_reason"] = reason
        if self._reading.broken:
            finish["broken_tool_calls"] = [_broken(call) for call in self._reading.broken]
        return finish

    def _call(self, call: ToolCall, *, with_index: bool = False) -> dict[str, Any]:
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        body: dict[str, Any] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        if with_index:
            body = {"index": self._n_calls, **body}
            self._n_calls += 1
        return body


def _broken(call: BrokenCall) -> dict[str, str]:
    return {"text": call.text, "why": call.why}
