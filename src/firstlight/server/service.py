"""The API without HTTP: a checked request becomes a job of token ids, the job runs in the engine, pieces of answers
come out.

`serve` puts HTTP in front of it; `chat` and `generate` use it as it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from firstlight.engine.messages import Started
from firstlight.errors import FirstlightError
from firstlight.scheduling.sampling import SamplingParams, ServiceClass
from firstlight.server.answer import Answer, Piece, joined
from firstlight.server.engine_client import EngineClient, QueueFullError
from firstlight.server.errors import ApiError, bad_request
from firstlight.server.metrics import Metrics
from firstlight.server.protocol import SEED_LIMIT, ChatRequest, CompletionRequest, GenerationRequest
from firstlight.server.run import Run, Usage, engine_gone
from firstlight.server.spawn import EngineFailedError
from firstlight.weights.tokenizer import TextStream, Tokenizer

INLINE_CHARACTERS = 2000
"""Texts up to this long are tokenised in the event loop (well under a millisecond); longer ones in a thread."""
TOKENIZER_THREADS = 2
NO_TOKENIZER = (
    "this checkpoint has no tokenizer: it takes token ids only, through /v1/completions with return_token_ids"
)
"""Said at start, before anybody sends text."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Job:
    """A request, ready for the engine: one SamplingParams for each prompt."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    service_class: ServiceClass
    stop_strings: list[str]
    arrival: float


class Service:
    """One model behind an engine.

    tokenizer: None for checkpoints without one; then prompts are token ids and answers too.
    stop_token_ids: they end an answer, unless a request ignores them.
    seed: from it and a counter come the seeds of requests that bring none.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        started: Started,
        tokenizer: Tokenizer | None,
        stop_token_ids: Iterable[int],
        name: str,
        seed: int,
    ) -> None:
        self.client = client
        self.metrics = metrics
        self.name = name
        self.tokenizer = tokenizer
        self.max_context = started.max_context
        self.vocab_size = started.vocab_size
        # A checkpoint may declare ids that its model can't generate, and even ones too large for a message.
        self.stop_token_ids = frozenset(id for id in stop_token_ids if id < self.vocab_size)
        self.facts = started.facts
        self._seed = seed
        self._unseeded = itertools.count()
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def chat_job(self, request: ChatRequest, service_header: str | None = None) -> Job:
        """Render the chat template and tokenise. Raises ApiError."""
        arrival = time.monotonic()
        self._check(request)
        tokenizer = self._need_tokenizer("messages", "send token ids to /v1/completions")
        messages = request.conversation()
        variables = request.template_variables()
        size = sum(len(message["content"]) for message in messages)

        def encode() -> list[int]:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **variables)
            return tokenizer.encode(text, add_special_tokens=False)

        try:
            prompt = await self._in_thread(encode, size)
        except FirstlightError as error:
            raise bad_request(str(error), "messages") from error
        return self._job(request, [prompt], "messages", arrival, service_header)

    async def completion_job(self, request: CompletionRequest, service_header: str | None = None) -> Job:
        """Tokenise string prompts, check token ids. Raises ApiError."""
        arrival = time.monotonic()
        self._check(request)
        if request.stop:
            self._need_tokenizer("stop", "use stop_token_ids")
        if not request.return_token_ids:
            self._need_tokenizer(
                "return_token_ids",
                "set return_token_ids to true to get token ids (firstlight bench: --return-token-ids)",
            )
        prompts: list[list[int]] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                prompts.append(await self._tokenise(prompt))
            else:
                prompts.append(prompt)
        return self._job(request, prompts, "prompt", arrival, service_header)

    async def start(self, job: Job, *, streamed: bool) -> Run:
        """Hand the job to the engine; returns once it has all prompts in its queue. Raises ApiError.

        streamed: pieces are wanted as they come; otherwise at the end only, which costs fewer wake-ups.
        """
        only_end = not streamed and not job.stop_strings
        try:
            generations = self.client.submit(
                job.prompts, job.sampling, job.service_class, arrival=job.arrival, only_end=only_end
            )
        except QueueFullError as full:
            self.metrics.turned_away(job.service_class, "queue_full")
            raise ApiError(429, f"{full}; try again later", code="queue_full") from None
        except EngineFailedError as failure:
            self.metrics.turned_away(job.service_class, "failed")
            raise engine_gone(failure) from None
        answers = [
            Answer(index, self._text_stream(), job.stop_strings, sampling.stop_token_ids)
            for index, sampling in enumerate(job.sampling)
        ]
        run = Run(self.client, self.metrics, generations, answers)
        if not only_end:
            try:
                await run.wait_accepted()
            except BaseException:
                run.close()
                raise
        return run

    async def complete(self, job: Job) -> tuple[list[Piece], Usage]:
        """The whole answer to each prompt, and the token counts. Raises ApiError."""
        run = await self.start(job, streamed=False)
        try:
            parts: list[list[Piece]] = [[] for _ in job.prompts]
            async for pieces in run.pieces():
                for piece in pieces:
                    parts[piece.index].append(piece)
            return [joined(pieces) for pieces in parts], run.usage()
        finally:
            run.close()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check(self, request: GenerationRequest) -> None:
        if request.model is not None and request.model != self.name:
            raise ApiError(
                404,
                f"the model `{request.model}` is not served here; `{self.name}` is",
                param="model",
                code="model_not_found",
            )

    def _need_tokenizer(self, field: str, way_out: str) -> Tokenizer:
        if self.tokenizer is None:
            message = f"the checkpoint of `{self.name}` has no tokenizer, so text can't be read or written: {way_out}"
            raise bad_request(message, field, "no_tokenizer")
        return self.tokenizer

    async def _tokenise(self, text: str) -> list[int]:
        tokenizer = self._need_tokenizer("prompt", "send token ids as prompt")
        if not text:
            raise bad_request("`prompt` is empty", "prompt", "empty_prompt")
        return await self._in_thread(lambda: tokenizer.encode(text, add_special_tokens=True), len(text))

    async def _in_thread(self, work: Callable[[], Result], characters: int) -> Result:
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _job(
        self,
        request: GenerationRequest,
        prompts: list[list[int]],
        field: str,
        arrival: float,
        service_header: str | None,
    ) -> Job:
        stop_token_ids = set(request.stop_token_ids or ())
        self._check_ids(sorted(stop_token_ids), "stop_token_ids")
        if not request.ignore_eos:
            stop_token_ids |= self.stop_token_ids
        base = SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            stop_token_ids=tuple(sorted(stop_token_ids)),
        )
        sampling = []
        for number, prompt in enumerate(prompts):
            name = f"{field}[{number}]" if len(prompts) > 1 else field
            if not prompt:
                raise bad_request(f"`{name}` is empty", field, "empty_prompt")
            self._check_ids(prompt, name)
            seed = self._next_seed() if request.seed is None else request.seed % SEED_LIMIT
            sampling.append(
                replace(base, seed=seed, max_tokens=self._new_tokens(len(prompt), request.new_tokens, name))
            )
        return Job(prompts, sampling, request.service(service_header), request.stop, arrival)

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(id for id in ids if not 0 <= id < self.vocab_size)
            raise bad_request(
                f"`{name}` has the token id {wrong}; ids are 0 to {self.vocab_size - 1}", name, "token_id_out_of_range"
            )

    def _new_tokens(self, prompt_tokens: int, wanted: int | None, name: str) -> int:
        """The limit of new tokens: what was asked for, which must fit, or all that fit."""
        room = self.max_context - prompt_tokens
        if room < 1 or (wanted is not None and wanted > room):
            asked = f" and {wanted} more are asked for" if wanted is not None else ""
            raise bad_request(
                f"`{name}` has {prompt_tokens} tokens{asked}; prompt and answer together may have {self.max_context}",
                name,
                "context_length_exceeded",
            )
        return room if wanted is None else wanted

    def _next_seed(self) -> int:
        """Differs from request to request, and is the same again after a restart with the same --seed."""
        digest = hashlib.blake2b(f"{self._seed} {next(self._unseeded)}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1

    def _text_stream(self) -> TextStream | None:
        return None if self.tokenizer is None else TextStream(self.tokenizer)
