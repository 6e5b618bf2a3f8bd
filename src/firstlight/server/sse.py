"""Answers that watch their client: server-sent events, and plain JSON that is only worth computing while somebody
waits.

Both stop the work as soon as the client has left; a client that stays but doesn't read is dropped after a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from firstlight.server.errors import ApiError

SLOW_READER_SECONDS = 60.0
"""A client that takes longer than this to make room for the next chunk is dropped."""

DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled if the client leaves first. Raises ClientDisconnect then.

    The request's body must have been read: `receive` then has nothing more to give than the disconnect.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """A response that sends events as they are made."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], at_end: Callable[[], None]) -> None:
        """events: an ApiError that it raises becomes the last event. at_end: called in the end, whatever happens."""
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache"})
        self._events = events
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientDisconnect, TimeoutError):
            pass  # nobody is there to be told
        finally:
            await self._events.aclose()
            self._at_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                async with asyncio.timeout(SLOW_READER_SECONDS):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
