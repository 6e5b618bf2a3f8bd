"""Responses that watch their client, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from firstlight.server import sse
from firstlight.server.errors import ApiError
from firstlight.server.sse import EventStream, while_connected


class Client:
    """An ASGI client that reads `reads` chunks and then does as `then` says: leave, or stop reading."""

    def __init__(self, reads: int, then: str) -> None:
        self.reads = reads
        self.then = then
        self.got: list[bytes] = []
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            return
        if len(self.got) < self.reads:
            self.got.append(message["body"])
            return
        if self.then == "leave":
            self.left.set()
        await asyncio.Event().wait()


async def numbers() -> AsyncGenerator[bytes, None]:
    for number in range(100):
        yield str(number).encode()
        await asyncio.sleep(0)


@pytest.mark.parametrize("reads", [0, 1, 5])
@pytest.mark.parametrize("then", ["leave", "stop reading"])
def test_the_work_ends_when_nobody_reads(reads: int, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "SLOW_READER_SECONDS", 0.05)
    ends: list[str] = []

    async def respond() -> list[bytes]:
        client = Client(reads, then)
        stream = EventStream(numbers(), at_end=lambda: ends.append("end"))
        await asyncio.wait_for(stream({}, client.receive, client.send), 5)  # type: ignore[arg-type]
        return client.got

    assert asyncio.run(respond()) == [str(number).encode() for number in range(reads)]
    assert ends == ["end"]


def test_an_error_in_the_middle_is_the_last_event() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise ApiError(503, "the engine is gone", code="engine_failed")

    async def respond() -> list[bytes]:
        client = Client(10, "stop reading")
        await asyncio.wait_for(EventStream(events(), at_end=lambda: None)({}, client.receive, client.send), 5)  # type: ignore[arg-type]
        return client.got

    first, error, end = asyncio.run(respond())
    assert first == b"data: 1\n\n"
    assert error.startswith(b'data: {"error":{"message":"the engine is gone","type":"server_error"')
    assert end == b""


def test_while_connected() -> None:
    async def check() -> None:
        client = Client(0, "leave")
        assert await while_connected(client.receive, asyncio.sleep(0, "done")) == "done"  # type: ignore[arg-type]

        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        asyncio.get_running_loop().call_later(0.01, client.left.set)
        with pytest.raises(ClientDisconnect):
            await while_connected(client.receive, work())  # type: ignore[arg-type]
        assert cancelled.is_set()

    asyncio.run(check())
