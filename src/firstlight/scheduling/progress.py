"""What the scheduler knows of a request's progress, and what it tells the server about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from firstlight.scheduling.prefix_keys import KeyChain
from firstlight.scheduling.prefix_nodes import NO_HIT, Checkpoint, Hit, Node, Origin
from firstlight.scheduling.request import Request
from firstlight.scheduling.sampling import FinishReason, ServiceClass

NEVER = 1 << 62


class Phase(enum.Enum):
    """Where a request stands.

    WAITING → PREFILL → DECODE → ENDED; a preempted request goes back to WAITING.
    """

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True)
class TokenEvent:
    """News of a request, from `Scheduler.commit`.

    tokens: new ones, a stop token included. finish: why it ended, None while it goes on.
    cached_tokens: with its first token, how much of the prompt came from the cache; None afterwards.
    """

    request_id: str
    tokens: list[int]
    finish: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(slots=True, eq=False)
class ExportedState:
    """A state that a plan exports: of the first `length` tokens, in `slot`; not in the tree yet."""

    length: int
    slot: int
    origin: Origin


@dataclass(slots=True, eq=False)
class Progress:
    """One request that the scheduler holds.

    order: its place in the queue, by arrival; kept through preemptions.
    output: every token generated and known, even past the answer's end; `answer` of them are the client's.
    computed: tokens whose KV and state are known to be in its pages and slot, by committed plans.
    planned: tokens whose prefill has been planned. target: known tokens when it joined, the prefill's end.
    last_plan: number of the last plan that includes it; its resources return when that has committed.
    draining: it has left the batch, or will not come back to it, and waits for `last_plan`.
    pages: its page table's entries; those before `first_page` were given back early, by a preemption.
    inserted: how many leading pages stand in the tree; `node` is the last of them. shadows: the tree's pages for
        prefixes of which this request has a copy of its own; pinned, since `node` continues them.
    hit: what it took over when it joined. source_pinned: what the hit only copies or reads is still held.
    wishes: lengths at which a checkpoint is wanted. exports: planned, but not in the tree yet; `insert_at` is the
        computed length at which the page of one of them is full. made: those that are in the tree now.
    protected: an offline request that may not be preempted for online ones (`preemption.py`). joined_with: tokens of
        output when it joined.
    """

    request: Request
    order: int
    max_new: int
    stops: frozenset[int]
    chain: KeyChain
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    answer: int = 0
    cached_tokens: int | None = None
    computed: int = 0
    planned: int = 0
    target: int = 0
    row: int = 0
    slot: int = 0
    last_plan: int = -1
    draining: bool = False
    preempted: bool = False
    protected: bool = False
    joined_with: int = 0
    awaited: bytes | None = None
    pages: list[int] = field(default_factory=list)
    first_page: int = 0
    inserted: int = 0
    node: Node | None = None
    shadows: list[int] = field(default_factory=list)
    hit: Hit = NO_HIT
    source_pinned: bool = False
    wishes: dict[int, Origin] = field(default_factory=dict)
    exports: list[ExportedState] = field(default_factory=list)
    insert_at: int = NEVER
    made: list[Checkpoint] = field(default_factory=list)
    _tokens: np.ndarray | None = None

    @property
    def online(self) -> bool:
        """Whether it is of the online class."""
        return self.request.service is ServiceClass.ONLINE

    @property
    def known(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    @property
    def useful(self) -> int:
        """Computed tokens that belong to the prompt or the answer; what a later request may share."""
        return min(self.computed, len(self.request.prompt) + self.answer)

    def tokens(self) -> np.ndarray:
        """[known] int32: prompt and output."""
        if not self.output:
            return self.request.prompt
        if self._tokens is None or len(self._tokens) != self.known:
            self._tokens = np.concatenate([self.request.prompt, np.asarray(self.output, np.int32)])
        return self._tokens
