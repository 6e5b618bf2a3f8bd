"""A server that answers by the clock, so that every figure of a load on it is known in advance.

    python tests/bench/paced_server.py [--first-ms 200] [--gap-ms 20]

prints its URL. An answer has `max_tokens` tokens: the first comes `first-ms` after the request, the others `gap-ms` apart.
A field `script` in the body replaces that: a list of steps, each [name, argument]. A field `behaviour` does without an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

VOCABULARY = 1000


def create_app(first_seconds: float, gap_seconds: float) -> FastAPI:
    """The application. It keeps the bodies that it got in `app.state.bodies`."""
    app = FastAPI()
    app.state.bodies = []
    app.state.left = 0

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": "paced", "object": "model", "vocab_size": VOCABULARY}]}

    async def answer(request: Request) -> Response:
        arrival = time.perf_counter()
        body = await request.json()
        app.state.bodies.append(body)
        if "status" in body:
            return JSONResponse({"error": {"message": f"status {body['status']} as asked"}}, body["status"])
        chat = request.url.path.endswith("chat/completions")
        if "script" in body:
            steps = _scripted(body["script"], chat)
        else:
            steps = _paced(body, chat, arrival, first_seconds, gap_seconds)
        return StreamingResponse(_watched(app, steps), media_type="text/event-stream")

    app.add_api_route("/v1/completions", answer, methods=["POST"])
    app.add_api_route("/v1/chat/completions", answer, methods=["POST"])
    return app


async def _watched(app: FastAPI, steps: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for data in steps:
            yield data
    except asyncio.CancelledError:
        app.state.left += 1
        raise


async def _paced(
    body: dict[str, Any], chat: bool, arrival: float, first_seconds: float, gap_seconds: float
) -> AsyncIterator[bytes]:
    count = body["max_tokens"] if "max_tokens" in body else body["max_completion_tokens"]
    if chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for number in range(count):
        due = arrival + first_seconds + number * gap_seconds
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        yield event(piece("x", chat, "length" if number == count - 1 else None, [7]))
    prompt = body.get("prompt", "")
    usage = {
        "prompt_tokens": len(prompt) if isinstance(prompt, list) else len(prompt.split()),
        "completion_tokens": count,
    }
    yield event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"


async def _scripted(script: list[list[Any]], chat: bool) -> AsyncIterator[bytes]:
    for name, argument in script:
        if name == "sleep":
            await asyncio.sleep(argument)
        elif name == "text":
            yield event(piece(argument, chat, None))
        elif name == "ids":
            yield event(piece("x" * len(argument), chat, None, argument))
        elif name == "role":
            yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        elif name == "finish":
            yield event(piece("", chat, argument))
        elif name == "usage":
            yield event({"choices": [], "usage": argument})
        elif name == "raw":
            yield argument.encode()
        elif name == "done":
            yield b"data: [DONE]\n\n"
        elif name == "break":
            raise ConnectionError("as asked")  # the chunked body has no end
        else:
            raise ValueError(f"a script has no step {name!r}")


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def piece(text: str, chat: bool, reason: str | None, ids: list[int] | None = None) -> dict[str, Any]:
    """A chunk with one piece of an answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if chat:
        choice["delta"] = {"content": text}
    else:
        choice["text"] = text
    if ids is not None:
        choice["token_ids"] = ids
    return {"id": "1", "object": "x", "choices": [choice]}


def main() -> None:
    """Serve on a free port until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-ms", type=float, default=200)
    parser.add_argument("--gap-ms", type=float, default=20)
    arguments = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(f"ready on http://127.0.0.1:{listener.getsockname()[1]} (model paced)", file=sys.stderr, flush=True)
    app = create_app(arguments.first_ms / 1e3, arguments.gap_ms / 1e3)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
