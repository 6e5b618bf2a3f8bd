"""The routes: a body is checked and becomes a job, its pieces become OpenAI's objects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from firstlight.config import ServerOptions
from firstlight.server.errors import ApiError
from firstlight.server.guards import KeyGuard, read_body
from firstlight.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, parse
from firstlight.server.replies import ChatReply, CompletionReply, Reply
from firstlight.server.run import Run
from firstlight.server.service import Job, Service
from firstlight.server.sse import DONE, EventStream, event, while_connected

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 64 << 10
"""Longer bodies are parsed in a thread."""


def create_app(service: Service, options: ServerOptions, created: int) -> FastAPI:
    """The application. created: Unix time that /v1/models reports."""
    app = FastAPI(title="Firstlight", openapi_url=None)
    api = _Api(service, options, created)
    app.add_api_route("/v1/chat/completions", api.chat, methods=["POST"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/metrics", api.metrics, methods=["GET"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _our_fault)
    if options.api_key:
        app.add_middleware(KeyGuard, key=options.api_key)
    return app


class _Api:
    def __init__(self, service: Service, options: ServerOptions, created: int) -> None:
        self._service = service
        self._body_limit = options.max_body_mib << 20
        self._model = {
            "id": service.name,
            "object": "model",
            "created": created,
            "owned_by": "firstlight",
            "max_model_len": service.max_context,
            "vocab_size": service.vocab_size,
        }

    async def chat(self, http: Request) -> Response:
        request = await self._parsed(ChatRequest, http)
        job = await self._service.chat_job(request, http.headers.get("x-service-class"))
        return await self._answer(http, request, job, ChatReply)

    async def completions(self, http: Request) -> Response:
        request = await self._parsed(CompletionRequest, http)
        job = await self._service.completion_job(request, http.headers.get("x-service-class"))
        return await self._answer(http, request, job, CompletionReply)

    async def models(self) -> Response:
        return json_response({"object": "list", "data": [self._model]})

    async def model(self, name: str) -> Response:
        if name != self._service.name:
            raise ApiError(404, f"the model `{name}` is not served here", param="model", code="model_not_found")
        return json_response(self._model)

    async def health(self) -> Response:
        if (failure := self._service.client.failure) is not None:
            return json_response({"status": "failed", "message": str(failure)}, 503)
        return json_response({"status": "ok"})

    async def metrics(self) -> Response:
        page = self._service.metrics.render(await self._service.client.stats())
        return Response(page, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _parsed(self, kind: type[Any], http: Request) -> Any:
        body = await read_body(http, self._body_limit)
        if len(body) <= INLINE_BODY_BYTES:
            return parse(kind, body)
        return await asyncio.to_thread(parse, kind, body)

    async def _answer(self, http: Request, request: GenerationRequest, job: Job, kind: type[Reply]) -> Response:
        reply = kind(self._service.name, token_ids=bool(request.return_token_ids), include_usage=request.include_usage)
        if not request.stream:
            return json_response(await while_connected(http.receive, self._whole(job, reply)))
        run = await while_connected(http.receive, self._service.start(job, streamed=True))
        return EventStream(_events(run, reply, len(job.prompts)), at_end=run.close)

    async def _whole(self, job: Job, reply: Reply) -> dict[str, Any]:
        return reply.whole(*await self._service.complete(job))


async def _events(run: Run, reply: Reply, count: int) -> AsyncGenerator[bytes, None]:
    for first in reply.first_chunks(count):
        yield event(first)
    async for pieces in run.pieces():
        chunks = [chunk for piece in pieces if (chunk := reply.chunk(piece)) is not None]
        if chunks:
            yield b"".join(map(event, chunks))
    yield b"".join(map(event, reply.last_chunks(run.usage()))) + DONE


def json_response(body: dict[str, Any], status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = json_response(error.body(), error.status)
    if error.status == 429:
        response.headers["retry-after"] = "1"
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return json_response(ApiError(error.status_code, message).body(), error.status_code)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never sent: there is nobody to read it


async def _our_fault(request: Request, error: Exception) -> Response:
    logger.error("failed to answer %s %s", request.method, request.url.path, exc_info=error)
    body = ApiError(500, "the server failed to answer this request; its log says why", code="internal_error").body()
    return json_response(body, 500)
