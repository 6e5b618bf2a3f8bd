from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn
from bench.paced_server import create_app


@dataclass
class Paced:
    """A paced server in a thread. bodies: of the requests that it got. left: streams whose client went away."""

    url: str
    app: Any

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return list(self.app.state.bodies)

    @property
    def left(self) -> int:
        return int(self.app.state.left)


def paced(first_seconds: float, gap_seconds: float) -> contextlib.AbstractContextManager[Paced]:
    return in_a_thread(create_app(first_seconds, gap_seconds))


@contextlib.contextmanager
def in_a_thread(app: Any) -> Iterator[Paced]:
    """An application on a free port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield Paced(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def paced_server() -> Iterator[Callable[[float, float], Paced]]:
    """Starts servers: (seconds to the first token, seconds between tokens) -> the server."""
    with contextlib.ExitStack() as stack:
        yield lambda first, gap: stack.enter_context(paced(first, gap))
