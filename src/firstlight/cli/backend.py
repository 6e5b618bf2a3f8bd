"""Who answers `chat` and `generate`: an engine started for the purpose, or a server that runs already. Both take the
fields of an API request and give OpenAI's objects back."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.config import EngineOptions, checked_key, checked_url
from firstlight.errors import FirstlightError

if TYPE_CHECKING:
    from firstlight.server.service import Service

TIMEOUT_SECONDS = 3600.0
"""An offline request may wait long for its turn."""


class RequestError(FirstlightError):
    """The answer to a request is an error. status: HTTP's; 429 means "later", 5xx that the server is in trouble."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(body["error"]["message"])
        self.status = status
        self.body = body


class BackendGoneError(FirstlightError):
    """Nobody answers (any more)."""


class Backend(Protocol):
    """fields: a body of /v1/chat/completions if it has `messages`, else of /v1/completions; without `model`."""

    async def complete(self, fields: dict[str, Any], service_class: str) -> dict[str, Any]:
        """The whole answer. Raises RequestError, BackendGoneError."""

    def stream(self, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a chat. Raises RequestError, BackendGoneError."""


class LocalBackend:
    """Answers from an engine of our own."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def complete(self, fields: dict[str, Any], service_class: str) -> dict[str, Any]:
        from firstlight.server.errors import ApiError
        from firstlight.server.protocol import ChatRequest, CompletionRequest, load
        from firstlight.server.replies import ChatReply, CompletionReply, Reply

        kind: type[Reply]
        request: ChatRequest | CompletionRequest
        try:
            if "messages" in fields:
                kind, request = ChatReply, load(ChatRequest, fields)
                job = await self._service.chat_job(request, service_class)
            else:
                kind, request = CompletionReply, load(CompletionRequest, fields)
                job = await self._service.completion_job(request, service_class)
            reply = kind(self._service.name, token_ids=bool(request.return_token_ids), include_usage=False)
            return reply.whole(*await self._service.complete(job))
        except ApiError as error:
            raise _request_error(error.status, error.body()) from None

    async def stream(self, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        from firstlight.server.errors import ApiError
        from firstlight.server.protocol import ChatRequest, load
        from firstlight.server.replies import ChatReply

        try:
            job = await self._service.chat_job(load(ChatRequest, fields))
            reply = ChatReply(self._service.name, token_ids=False, include_usage=True)
            run = await self._service.start(job, streamed=True)
            try:
                async with aclosing(run.pieces()) as rounds:
                    async for pieces in rounds:
                        for piece in pieces:
                            if (chunk := reply.chunk(piece)) is not None:
                                yield chunk
                for chunk in reply.last_chunks(run.usage()):
                    yield chunk
            finally:
                run.close()
        except ApiError as error:
            raise _request_error(error.status, error.body()) from None


class RemoteBackend:
    """Answers from a server at `url`, such as http://127.0.0.1:8000, with or without /v1. limit: connections at once."""

    def __init__(self, url: str, key: str | None, limit: int) -> None:
        try:
            self._parts = checked_url(url)
        except ValueError as error:
            raise FirstlightError(str(error)) from None
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json"}
        if key:
            try:
                self._headers["Authorization"] = f"Bearer {checked_key(key)}".encode()
            except ValueError as error:
                raise FirstlightError(f"--api-key (or FIRSTLIGHT_API_KEY): {error}") from None
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="request")
        self._connections: set[http.client.HTTPConnection] = set()

    async def complete(self, fields: dict[str, Any], service_class: str) -> dict[str, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._complete, fields, service_class)

    async def stream(self, fields: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        loop = asyncio.get_running_loop()
        connection, response = await loop.run_in_executor(self._threads, self._post, body, "online")
        try:
            while line := await loop.run_in_executor(self._threads, response.readline):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise BackendGoneError(chunk["error"]["message"])
                    yield chunk
            raise BackendGoneError(f"{self._parts.netloc} ended the answer before its end")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken_off(error) from None
        finally:
            self._hang_up(connection)

    def close(self) -> None:
        """Hang up on every answer that hasn't come, and end the threads."""
        for connection in list(self._connections):
            self._hang_up(connection)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _complete(self, fields: dict[str, Any], service_class: str) -> dict[str, Any]:
        connection, response = self._post(fields, service_class)
        try:
            reply: dict[str, Any] = json.loads(response.read())
            return reply
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken_off(error) from None
        finally:
            self._hang_up(connection)

    def _post(
        self, fields: dict[str, Any], service_class: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An answer with status 200, to be read, and then hung up on."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=TIMEOUT_SECONDS)
        self._connections.add(connection)
        path = "/chat/completions" if "messages" in fields else "/completions"
        try:
            headers = {**self._headers, "X-Service-Class": service_class}
            connection.request("POST", self._parts.path + path, json.dumps(fields), headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._hang_up(connection)
            message = f"no answer from {self._parts.netloc}: {error}; is the server running?"
            raise BackendGoneError(message) from None
        self._hang_up(connection)
        raise _request_error(response.status, _error_body(text, response.status))

    def _hang_up(self, connection: http.client.HTTPConnection) -> None:
        """Close, also while another thread waits for data from it."""
        self._connections.discard(connection)
        if connection.sock is not None:
            with contextlib.suppress(OSError):  # the other side was faster
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _broken_off(self, error: Exception) -> BackendGoneError:
        return BackendGoneError(f"{self._parts.netloc} broke off its answer: {error}")


@asynccontextmanager
async def open_backend(
    options: EngineOptions | None, url: str | None, key: str | None, limit: int, engine: str | None = None
) -> AsyncIterator[Backend]:
    """An engine with `options`, ended afterwards; or without them the server at `url`.

    limit: requests at once. engine: another class of engines than ours, as `module:name`.
    Raises EngineFailedError when the engine can't start.
    """
    if options is None:
        remote = RemoteBackend(url or "", key, limit)
        try:
            yield remote
        finally:
            remote.close()
        return
    from firstlight.server.launch import exit_quietly
    from firstlight.server.local import local_service
    from firstlight.server.spawn import ENGINE

    signal.signal(signal.SIGTERM, exit_quietly)
    async with local_service(options, limit, engine or ENGINE) as service:
        yield LocalBackend(service)


def _request_error(status: int, body: dict[str, Any]) -> FirstlightError:
    """429 and 4xx are about the request, 5xx about the backend."""
    return BackendGoneError(body["error"]["message"]) if status >= 500 else RequestError(status, body)


def _error_body(text: bytes, status: int) -> dict[str, Any]:
    try:
        body = json.loads(text)
        if isinstance(body["error"]["message"], str):
            return {"error": body["error"]}
    except (ValueError, KeyError, TypeError):
        pass  # not one of ours: a proxy's page, say
    return {"error": {"message": f"HTTP status {status}", "type": "http_error", "param": None, "code": None}}
