"""The engine: one scheduler, one executor (on one rank or several), and the loop step between them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import torch

from firstlight.config import EngineOptions
from firstlight.engine.executor import Executor, Pending
from firstlight.engine.loading import allocate_caches, cache_bytes, cache_geometry, load_model
from firstlight.engine.messages import Delta, EngineStats
from firstlight.engine.ranks import Followers, LeadingExecutor, rank_device
from firstlight.quant import dtype_name
from firstlight.scheduling.accounts import IntegrityError
from firstlight.scheduling.errors import RequestRefusedError
from firstlight.scheduling.plan import StepPlan
from firstlight.scheduling.request import Request
from firstlight.scheduling.scheduler import Scheduler
from firstlight.weights.location import model_name

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""Between two checks of the accounts of rows, pages and slots, which are made when nothing runs."""


class Engine:
    """Runs requests on a model. All methods are called from one thread.

    max_context: longest request, prompt and answer, in tokens. vocab_size: token ids are below this. facts: for people.
    """

    def __init__(self, options: EngineOptions, *, poison: bool = False) -> None:
        """Loads the model. poison: fill unused cache memory with NaN, to show up reads of it (tests).

        Raises FirstlightError or ValueError, with a message for people.
        """
        self.options = options
        self.followers = Followers(options) if options.tensor_parallel > 1 else None
        try:
            mesh = self.followers.mesh if self.followers else None
            self.loaded = load_model(options, mesh, rank_device(options, 0) if self.followers else None)
            self.options = options = self.loaded.options
            memory = cache_bytes(options, self.loaded)
            if self.followers:
                memory = min(memory, self.followers.cache_bytes())
            self.geometry = cache_geometry(options, self.loaded, memory)
            if self.followers:
                self.followers.send_geometry(self.geometry)
            self.pool = allocate_caches(self.loaded, self.geometry)
            rows = min(options.max_running, self.geometry.slots or options.max_running)
            executor = Executor(self.loaded, self.pool, options.max_running, graphs=options.graphs, poison=poison)
            self.executor: Executor | LeadingExecutor = self.followers.lead(executor) if self.followers else executor
        except BaseException as error:
            if self.followers is not None:
                self.followers.close_after(error)
            raise
        self.depth = options.depth or (1 if self.loaded.device.type == "cpu" else 2)
        self.max_context = min(self.loaded.max_context, self.geometry.pages * self.geometry.page_size)
        self.vocab_size = self.loaded.vocab_size
        scheduling = options.model_copy(update={"depth": self.depth, "max_running": rows})
        self.scheduler = Scheduler(scheduling, self.geometry, self.max_context)
        self.in_flight: deque[tuple[StepPlan, Pending]] = deque()
        self.steps = 0
        self._checked_at = float("-inf")

    @property
    def facts(self) -> dict[str, str]:
        """What was loaded, and how the cache is split, for people."""
        loaded, geometry = self.loaded, self.geometry
        facts = {
            "model": model_name(self.options.model),
            "family": loaded.model.config.model_type,
            "device": f"{loaded.device} ({loaded.hardware.name})",
            "dtype": dtype_name(loaded.dtype),
            "cache": f"{geometry.pages:,} pages of {geometry.page_size} tokens ({geometry.page_bytes:,} bytes each)",
        }
        if geometry.has_state:
            facts["state"] = (
                f"{geometry.slots:,} slots ({geometry.slot_bytes:,} bytes each, "
                f"up to {geometry.checkpoint_slots:,} of them for checkpoints)"
            )
        if self.options.tensor_parallel > 1:
            facts["ranks"] = str(self.options.tensor_parallel)
        return facts

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestRefusedError for one that can never run, or names tokens that don't exist."""
        unknown = request.prompt[(request.prompt < 0) | (request.prompt >= self.vocab_size)]
        if len(unknown):
            last = self.vocab_size - 1
            raise RequestRefusedError(400, f"token id {unknown[0]} is not in the vocabulary; legal ids: 0 to {last}")
        self.scheduler.submit(request)

    def abort(self, id: str) -> None:
        """Forget a request; no more deltas for it. Unknown ids are ignored."""
        self.scheduler.abort(id)

    def has_work(self) -> bool:
        """Whether `step` would do something: requests waiting or running, or plans in flight."""
        return bool(self.in_flight) or self.scheduler.unfinished > 0

    def check(self) -> None:
        """Raise FirstlightError if another rank has died, which only the next step would show otherwise."""
        if self.followers is not None:
            self.followers.check()

    def step(self) -> Sequence[Delta]:
        """Start one plan, if there is one, and commit the oldest once `depth` are in flight or nothing can be planned."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.in_flight.append((plan, self.executor.execute(plan)))
            self.steps += 1
        if not self.in_flight or (plan is not None and len(self.in_flight) < self.depth):
            return ()
        oldest, pending = self.in_flight.popleft()
        events = self.scheduler.commit(oldest, pending.wait())
        if not self.has_work():
            self._check_at_rest()
        return [Delta(event.request_id, event.tokens, event.finish, event.cached_tokens or 0) for event in events]

    def _check_at_rest(self) -> None:
        """See that rows, pages and slots add up, now and then when nothing runs. A leak is logged: requests go on."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            try:
                self.scheduler.check_integrity()
            except IntegrityError as error:
                logger.error("the caches' accounts don't add up: %s", error)

    def stats(self) -> EngineStats:
        """Counts now, and sums since the start."""
        scheduler, metrics = self.scheduler, self.scheduler.metrics
        running, waiting = scheduler.by_class()
        device = self.loaded.device
        allocator = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
        return EngineStats(
            running=running,
            waiting=waiting,
            pages_used=scheduler.pages.total - scheduler.pages.free,
            pages_capacity=scheduler.pages.total,
            page_size=self.geometry.page_size,
            slots_used=scheduler.slots.total - scheduler.slots.free,
            slots_capacity=scheduler.slots.total,
            steps=self.steps,
            preemptions=metrics.preemptions,
            prefix_queried_tokens=metrics.looked_up_tokens,
            prefix_matched_tokens=metrics.matched_tokens,
            prefix_lost_tokens=metrics.lost_tokens,
            prefix_evicted_tokens=metrics.evicted_pages * self.geometry.page_size,
            device_reserved_bytes=allocator.get("reserved_bytes.all.current", 0),
            allocator_retries=allocator.get("num_alloc_retries", 0),
        )

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.followers is not None:
            self.followers.close()
            self.followers = None
