"""What stands in front of the API: the key, and the limit on the size of bodies. Plain ASGI, so that streams pass
untouched."""

from __future__ import annotations

import hmac

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key, for load balancers."""


class KeyGuard:
    """Lets a request pass if it has `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._authorized(scope):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is required: send the header `Authorization: Bearer KEY`"
        body = msgspec.json.encode(ApiError(401, message, code="invalid_api_key").body())
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _authorized(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                # In constant time, so that a key can't be guessed byte by byte.
                return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
        return False


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is known to be longer than the limit."""
    too_long = ApiError(413, f"the body is longer than {limit_bytes >> 20} MiB (--max-body-mib)", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise too_long
    chunks = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit_bytes:
                raise too_long
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError(400, "the client left before the body was complete") from None
    return b"".join(chunks)
