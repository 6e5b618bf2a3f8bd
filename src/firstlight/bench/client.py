"""One request: sent, its stream read, the time of every chunk noted, and what went wrong named.

aiohttp does HTTP: its C parser costs a tenth of the CPU time of Python ones, and the time that the client takes is time
that it would report as the server's.
"""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from firstlight.bench.errors import BenchError
from firstlight.bench.outcome import Failure, Outcome
from firstlight.bench.stream import Chunk, EventReader, MalformedStreamError
from firstlight.config import BenchOptions, checked_url

KEEP_ALIVE_SECONDS = 4.0
"""Idle connections are closed before common servers do (after 5 s), so that none is used that is being closed."""
_PROMPTS = "--input-tokens and --trace say what is asked"
_LENGTHS = "--output-tokens, or `output_tokens` in a --trace, says how long answers are"
_STREAMED = "answers are always streamed, with their usage, or there would be nothing to time; leave it out"
TAKEN = {
    "prompt": _PROMPTS,
    "messages": _PROMPTS,
    "max_tokens": _LENGTHS,
    "max_completion_tokens": _LENGTHS,
    "stream": _STREAMED,
    "stream_options": _STREAMED,
}
"""Fields that --field can't set, by what does."""
MAX_ERROR_BYTES = 4096
"""Of the body of an answer that is an error."""


class Client:
    """Sends requests to one endpoint of one server. A context manager, inside an event loop."""

    def __init__(self, options: BenchOptions) -> None:
        """Raises BenchError for a URL or a --field that is none."""
        self._options = options
        try:
            self._base = checked_url(options.url).geturl()
        except ValueError as error:
            raise BenchError(str(error)) from None
        path = "chat/completions" if options.endpoint == "chat" else "completions"
        self._url = f"{self._base}/{path}"
        headers = {"Content-Type": "application/json"}
        if options.api_key:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._headers = headers
        self._fields: dict[str, Any] = {
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            self._fields["ignore_eos"] = True
        if options.return_token_ids:
            self._fields["return_token_ids"] = True
        self._fields.update(map(_field, options.field))
        self._session: aiohttp.ClientSession | None = None
        self.model: dict[str, Any] = {}
        self.tokens_seen = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self._options.timeout_seconds),
            headers=self._headers,
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def find_model(self) -> None:
        """Ask the server for its model and keep what it says of it in `model`. Raises BenchError if it doesn't tell."""
        assert self._session is not None
        wanted = self._options.served_name
        try:
            async with self._session.get(f"{self._base}/models") as response:
                body = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BenchError(f"no answer from {self._base}: {error}; is the server running?") from None
        try:
            if status != 200:
                raise ValueError(f"HTTP status {status}: {_error_text(body)}")
            models = {str(model["id"]): model for model in msgspec.json.decode(body)["data"]}
        except (ValueError, KeyError, TypeError) as error:
            if wanted is None:
                raise BenchError(f"{self._base}/models tells no model ({error}); give --served-name") from None
            models = {}
        if wanted is None and not models:
            raise BenchError(f"{self._base}/models lists no model; give --served-name")
        name = wanted or next(iter(models))
        if models and name not in models:
            raise BenchError(f"--served-name {name}: the server has {', '.join(models)}")
        self.model = models.get(name, {"id": name})
        self._fields = {"model": name, **self._fields}

    async def ask(self, content: dict[str, Any], outcome: Outcome, keep_answer: bool = False) -> None:
        """Send a request and fill `outcome` with what comes; failures are noted there, none is raised.

        content: `prompt` or `messages`. keep_answer: note the answer itself, too. When it is cancelled, the connection
        is closed, which tells the server that nobody wants the rest.
        """
        assert self._session is not None
        body = msgspec.json.encode({**self._fields, **content, "max_tokens": outcome.asked_output})
        outcome.sent = outcome.ended = time.perf_counter()
        began = False
        try:
            async with self._session.post(self._url, data=body) as response:
                began = True
                if response.status != 200:
                    text = _error_text(await response.content.read(MAX_ERROR_BYTES))
                    outcome.failure = Failure(f"http_{response.status}", text or response.reason or "")
                    return
                await self._read(response, outcome, keep_answer)
        except TimeoutError:
            limit = self._options.timeout_seconds
            outcome.failure = Failure("timeout", f"no end within {limit:g} s, after {len(outcome.chunk_times)} chunks")
        except MalformedStreamError as error:
            outcome.failure = Failure("malformed", str(error))
        except (aiohttp.ClientError, OSError) as error:
            outcome.failure = Failure("cut_off" if began else "connection", f"{type(error).__name__}: {error}")

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome, keep_answer: bool) -> None:
        reader = EventReader()
        async for data in response.content.iter_any():
            now = time.perf_counter()
            for chunk in reader.feed(data):
                self._note(chunk, now, outcome, keep_answer)
                if outcome.failure is not None:
                    return
        if not reader.done:
            count = len(outcome.chunk_times)
            outcome.failure = Failure("cut_off", f"the stream ended without [DONE], after {count} chunks")
        elif not outcome.chunk_times:
            outcome.failure = Failure("no_tokens", "the answer was whole and had no token in it")

    def _note(self, chunk: Chunk, now: float, outcome: Outcome, keep_answer: bool) -> None:
        if chunk.error is not None:
            outcome.failure = Failure("error_event", _message(chunk.error))
            return
        if chunk.usage is not None:
            outcome.input_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            outcome.cached_tokens = details.cached_tokens if details is not None else None
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        outcome.ended = now
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if choice.token_ids is not None:
            outcome.told_ids = (outcome.told_ids or 0) + len(choice.token_ids)
        if choice.has_tokens:
            outcome.chunk_times.append(now)
            self.tokens_seen += len(choice.token_ids or (0,))
        if keep_answer:
            outcome.answer += choice.answer_text
            outcome.answer_ids += choice.token_ids or ()


def _field(text: str) -> tuple[str, Any]:
    """NAME=JSON as a pair. Raises BenchError."""
    name, equals, value = text.partition("=")
    if name in TAKEN:
        raise BenchError(f"--field {text}: each request has its own `{name}`: {TAKEN[name]}")
    try:
        if not name or not equals:
            raise ValueError("no `=`")
        return name, json.loads(value)
    except ValueError as error:
        raise BenchError(f"--field {text}: it must be NAME=JSON, such as top_k=20 ({error})") from None


def _error_text(body: bytes) -> str:
    """The message of an error's body: OpenAI's form, or whatever it is."""
    try:
        return _message(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace").strip()[:200]


def _message(error: Any) -> str:
    """The sentence in an error object, with or without its wrapping."""
    inner = error.get("error", error) if isinstance(error, dict) else error
    message = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(message)[:500]
