"""Answers requests with recorded streams, byte for byte and at the recorded times.

    python benchmarks/replay_server.py RECORDING.json

A recording is what one server sent for each prompt under load: {"model": id, "answers": {prompt: [[seconds after the request,
bytes as latin-1 text], ...]}}. Whoever asks with a recorded prompt gets the same answer again, as often as it is asked for.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

Answer = list[tuple[float, str]]


def create_app(recording: dict[str, Any]) -> FastAPI:
    """The application. A prompt that wasn't recorded is a fault of the caller's."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": recording["model"], "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        arrival = time.perf_counter()
        body = await request.json()
        answer: Answer = recording["answers"][body["prompt"]]

        async def replay() -> AsyncIterator[bytes]:
            for seconds, data in answer:
                await asyncio.sleep(max(arrival + seconds - time.perf_counter(), 0))
                yield data.encode("latin-1")

        return StreamingResponse(replay(), media_type="text/event-stream")

    return app


async def record(url: str, model: str, lines: Sequence[dict[str, Any]], at_once: int) -> dict[str, Any]:
    """What the server at `url` sends for each line's prompt, in a closed loop. Raises RuntimeError when it refuses one."""
    answers: dict[str, Answer] = {}
    rest = iter(lines)
    fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}}

    async def work(session: aiohttp.ClientSession) -> None:
        for line in rest:
            body = {**fields, "prompt": line["prompt"], "max_tokens": line["output_tokens"]}
            begin = time.perf_counter()
            async with session.post(
                f"{url}/v1/completions", json={**body, "ignore_eos": True, "temperature": 0}
            ) as response:
                if response.status != 200:
                    raise RuntimeError(f"{url}: HTTP status {response.status}: {await response.text()}")
                answers[line["prompt"]] = [
                    (time.perf_counter() - begin, data.decode("latin-1")) async for data in response.content.iter_any()
                ]

    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work(session))
    return {"model": model, "answers": answers}


def main() -> None:
    """Serve a recording on a free port until killed."""
    recording = json.loads(Path(sys.argv[1]).read_text())
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(f"ready on {url} (model {recording['model']})", file=sys.stderr, flush=True)
    config = uvicorn.Config(create_app(recording), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
