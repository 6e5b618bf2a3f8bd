"""uvicorn in front of a loaded engine: signals, draining, and what happens when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator

import uvicorn

from firstlight.config import EngineOptions, ServerOptions
from firstlight.engine.messages import Started
from firstlight.server.app import create_app
from firstlight.server.local import open_service
from firstlight.server.spawn import EngineProcess
from firstlight.weights.location import model_name
from firstlight.weights.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEATH_NOTICE_SECONDS = 2.0
"""After the engine's death the server goes on this long: streams end with an error, /health says 503."""


class Server(uvicorn.Server):
    """uvicorn's server, with our ready line, and signals that only ever ask it to drain."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike the original, doesn't raise the signal again afterwards: the engine is still to be closed then."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready_line, file=sys.stderr, flush=True)


async def run(
    process: EngineProcess,
    started: Started,
    tokenizer: Tokenizer | None,
    stop_token_ids: Iterable[int],
    listener: socket.socket,
    engine_options: EngineOptions,
    server_options: ServerOptions,
) -> None:
    """Serve on `listener` until a signal, then drain. Raises EngineFailedError if the engine died."""
    name = server_options.served_name or model_name(engine_options.model)
    limit = engine_options.max_running + server_options.max_waiting
    service = open_service(process, started, tokenizer, stop_token_ids, name, engine_options.seed, limit)
    config = uvicorn.Config(
        create_app(service, server_options, int(time.time())),
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=server_options.drain_seconds,
    )
    logger.info("%s", ", ".join(f"{name} {fact}" for name, fact in started.facts.items()))
    server = Server(config, f"firstlight: ready on {url_of(listener)} (model {name})")
    loop = asyncio.get_running_loop()
    service.client.on_failure = lambda: loop.call_later(DEATH_NOTICE_SECONDS, setattr, server, "should_exit", True)
    try:
        await server.serve(sockets=[listener])
    finally:
        failure = service.client.failure
        await service.client.close()
        service.close()
    if failure is not None:
        raise failure


def url_of(listener: socket.socket) -> str:
    """http://HOST:PORT of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
