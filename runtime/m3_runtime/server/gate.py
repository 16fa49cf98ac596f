"""Who may ask: key, host, origin, and how much a body may have. Before anything of a request is looked at."""

import asyncio
import hmac
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from m3_runtime.server.refusal import RefusalError

LOOPBACK: Final = frozenset(("localhost", "127.0.0.1", "::1"))

_BODY_SECONDS: Final = 60.0  # for a body to arrive


class Gate:
    """Middleware that refuses requests without the key, and those that a foreign web page has a browser send."""

    def __init__(
        self, app: ASGIApp, *, key: str | None, hosts: Collection[str] | None, open_paths: Collection[str]
    ) -> None:
        """key: None asks for none. hosts: names under which the server answers, None: any; open_paths: without key."""
        self._app = app
        self._key = key
        self._hosts = hosts
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["path"])
            except RefusalError as refusal:
                response = JSONResponse(refusal.body, refusal.status, refusal.headers)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "")
        # A name that somebody else's DNS points to this machine would make their page one of this server.
        if self._hosts is not None and _name(host) not in self._hosts:
            raise RefusalError(403, f"the host {host[:80]!r} is not a name of this server", code="wrong_host")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise RefusalError(403, f"pages of {origin[:80]!r} may not use this server", code="wrong_origin")
        if self._key is None or path in self._open:
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            message = "the API key is missing or wrong, expected it as Authorization: Bearer KEY"
            raise RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises RefusalError if it is no JSON, has more than `most` bytes, or does not come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers ask first before they send this type for another site's page.
    if kind != "application/json":
        message = f"the body is {kind[:80]!r}, expected Content-Type: application/json"
        raise RefusalError(415, message, code="wrong_content_type")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise RefusalError(408, f"the body did not arrive within {_BODY_SECONDS:.0f} s", code="timeout") from None
    return b"".join(parts)


def _too_large(most: int) -> RefusalError:
    return RefusalError(413, f"the body is larger than {most} bytes", code="body_too_large")
