"""A Service on an engine of one's own, for `serve`, `chat` and `generate`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from firstlight.config import EngineOptions
from firstlight.engine.messages import Started
from firstlight.server.engine_client import EngineClient
from firstlight.server.metrics import Metrics
from firstlight.server.service import Service
from firstlight.server.spawn import EngineProcess
from firstlight.weights.location import model_name
from firstlight.weights.tokenizer import Tokenizer, load_tokenizer_and_stops


def open_service(
    process: EngineProcess,
    started: Started,
    tokenizer: Tokenizer | None,
    stop_token_ids: Iterable[int],
    name: str,
    seed: int,
    limit: int,
) -> Service:
    """The service of a loaded engine; call it inside the event loop. limit: requests in the engine at most."""
    metrics = Metrics()
    return Service(EngineClient(process, metrics, limit), metrics, started, tokenizer, stop_token_ids, name, seed)


@asynccontextmanager
async def local_service(options: EngineOptions, limit: int, engine: str) -> AsyncIterator[Service]:
    """Start an engine, serve from it, end it. Raises EngineFailedError when it can't start."""
    with EngineProcess(options, engine) as process:
        tokenizer, stops = load_tokenizer_and_stops(options.model)
        started = await asyncio.to_thread(process.wait_started)
        name = model_name(options.model)
        service = open_service(process, started, tokenizer, stops, name, options.seed, limit)
        try:
            yield service
        finally:
            await service.client.close()
            service.close()
