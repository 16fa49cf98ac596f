"""The endpoints of the server."""

import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from m3_runtime.server.answering import Answering, ClientGoneError
from m3_runtime.server.chat_api import answer_chat
from m3_runtime.server.completion_api import answer_completion
from m3_runtime.server.gate import Gate, read_body
from m3_runtime.server.metrics import Counting, Metrics
from m3_runtime.server.refusal import RefusalError, of_error, of_validation
from m3_runtime.server.requests import ChatRequest, CompletionRequest
from m3_runtime.server.service import Prepared, Service

Body = TypeVar("Body", bound=BaseModel)

_CLIENT_GONE: Final = 499  # nginx's word for it; nobody reads the response

#: Files of the page, by path.
_PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_API: Final = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")


@dataclass(frozen=True, kw_only=True)
class AppOptions:
    """How the server is reached."""

    key: str | None  #: API key
    hosts: Collection[str] | None  #: names under which it answers, None: any


def new_app(service: Service, metrics: Metrics, options: AppOptions) -> FastAPI:
    """The application. Nothing of it asks another machine for anything: FastAPI's documentation pages would."""
    app = FastAPI(title="m3-serve", docs_url=None, redoc_url=None, openapi_url=None)
    endpoints = _Endpoints(service, metrics)
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.completion, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=["GET"])
    app.add_api_route("/health", endpoints.health, methods=["GET"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    for path, (name, kind) in _PAGE.items():
        app.add_api_route(path, _page_file(name, kind), methods=["GET", "HEAD"])
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(RefusalError, _on_error)
    app.add_middleware(Gate, key=options.key, hosts=options.hosts, open_paths=("/health", *_PAGE))
    app.add_middleware(Counting, metrics=metrics, paths=(*_API, *_PAGE))
    return app


def _page_file(name: str, kind: str) -> Callable[[], Awaitable[Response]]:
    data = files("m3_runtime.server").joinpath("page", name).read_bytes()

    async def page_file() -> Response:
        return Response(data, media_type=kind, headers=_PAGE_HEADERS)

    return page_file


async def _on_error(request: Request, error: Exception) -> Response:
    """Every error has OpenAI's shape, those of the framework (an unknown path, a wrong method) too."""
    if isinstance(error, HTTPException):
        known = f"{request.method} {request.url.path[:200]}: {error.detail}"
        refusal = RefusalError(error.status_code, known, headers=dict(error.headers or {}))
    else:
        refusal = of_error(error)
        if refusal.status >= 500:
            print(f"m3-serve: {request.url.path}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            traceback.print_exception(error)
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


class _Endpoints:
    def __init__(self, service: Service, metrics: Metrics) -> None:
        self._service = service
        self._metrics = metrics
        self._started = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, self._service.prepare_chat, answer_chat)

    async def completion(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, self._service.prepare_completion, answer_completion)

    async def _answer(
        self,
        request: Request,
        kind: type[Body],
        prepare: Callable[[Body], Prepared],
        answer: Callable[[Service, Body, Answering, Request], Awaitable[Response]],
    ) -> Response:
        service = self._service
        try:
            service.scheduler.check_open()  # before any work for it
            body = await read_body(request, service.limits.body_bytes)
            parsed = await asyncio.to_thread(_parsed, kind, body)
            prepared = await asyncio.to_thread(prepare, parsed)
            answering = service.start(prepared, self._metrics.ended)
            try:
                return await answer(service, parsed, answering, request)
            except BaseException:
                answering.cancel()
                raise
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            refusal = of_error(error, retry_after=service.scheduler.retry_after())
            if refusal.status >= 500 and not isinstance(error, RefusalError):
                raise
            return JSONResponse(refusal.body, refusal.status, refusal.headers)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self._service.name:
            message = f"the model {name[:100]!r} does not exist, this server has {self._service.name!r}"
            raise RefusalError(404, message, param="model", code="model_not_found")
        return self._model()

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._started,
            "owned_by": "m3-gguf",
            "context_length": self._service.context,
        }

    async def health(self) -> Response:
        scheduler = self._service.scheduler
        if scheduler.failure:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ok", "running": scheduler.running, "waiting": scheduler.waiting})

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _parsed(kind: type[Body], body: bytes) -> Body:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise of_validation(error) from None
