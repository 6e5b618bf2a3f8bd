"""A step's plan and its result: the only things that pass between the scheduler and an executor.

Up to `depth` plans are in flight, so a plan is made before the tokens of the one before it are known. It holds upper
bounds and changes only. What changes every step (lengths, last tokens, accepted drafts) lives with the executor, in its
*request table*: one row per running request with its length, last token, sampling parameters, page-table row and slot.

An executor applies plans in the order of their numbers, and within one plan in this order:

1. `leaves`: the rows are freed; a row whose slot has a log (speculation) folds it first, since the slot may live on as
   a checkpoint;
2. `joins`: rows are filled, with length = `cached`;
3. `pages`: entries of the page table are written;
4. `moves`: pages and slots are copied, in the order of the list;
5. one forward over `decode` rows, then `prefill` chunks; each reads its state at `state_in`, writes it at `state_out`,
   and writes `exports` on the way;
6. a token is sampled for every decode row and every final chunk: these are the plan's *sampling rows*, in this order.

Row, page and slot 0 belong to nobody: a plan never names them as a target, and `state_in` 0 means "start from zeros".
Because plans are applied in order, a row, page or slot that an earlier plan in flight still uses may be reused by a
later one; the executor must not reorder or overlap two plans' effects on its tables and pools.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from firstlight.scheduling.sampling import SamplingParams

CHUNK = 64  # tokens: inside a prefill, states can be exported at multiples of this, the recurrent kernels' chunk


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A request takes a row of the request table. Its first pages come in the same plan's `pages`.

    row: the row, >= 1.
    request_id: for logs and for the executor's own bookkeeping.
    tokens: [n] int32, every token known so far: the prompt, and after a preemption also what had been generated.
        The plan's chunks (start, count) are slices of it, so the executor keeps it until the final chunk. Not copied:
        never write to it.
    prompt_length: how many of `tokens` are the prompt, 1 <= prompt_length <= n; the rest was generated.
    cached: the row's length to start from, 0 <= cached < n: KV of tokens [0, cached) is in its pages, and the state
        after them in the slot that its first chunk reads.
    sampling: how its tokens are chosen; noise is keyed by (seed, position), so a resumed request goes on unchanged.
    slot: its own live state slot; 0 for models without state.
    adapter: index of its adapter, 0 for the base model.
    """

    row: int
    request_id: str
    tokens: np.ndarray
    prompt_length: int
    cached: int
    sampling: SamplingParams
    slot: int
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a prefill: tokens [start, start + count) of the row's `Join.tokens`.

    final: it ends with the last known token, so that a token is sampled from its last position.
    state_in: slot of the state before `start`: a shared checkpoint in the first chunk after a hit, else the row's own
        slot; 0: start from zeros. state_out: the row's own slot. Both 0 for models without state.
    """

    row: int
    start: int
    count: int
    final: bool
    state_in: int
    state_out: int


@dataclass(frozen=True, slots=True)
class Export:
    """The state after `offset` tokens of a chunk, written to a second slot: a checkpoint in the making.

    chunk: index into the plan's `prefill`. row: that chunk's row.
    offset: tokens from the chunk's start; a multiple of `CHUNK`, or the chunk's whole count. 0 < offset <= count.
    slot: where the state goes; read by nobody before this plan has been executed.
    """

    chunk: int
    row: int
    offset: int
    slot: int


class MoveKind(enum.StrEnum):
    """What a move copies."""

    PAGE = "page"
    SLOT = "slot"


class Place(enum.StrEnum):
    """Where a page or slot lies. The scheduler of today plans moves on the device only."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of one page (all layers, K and V) or one slot, before the step's forward.

    group: index of the cache group among the groups of its kind (page groups or slot groups).
    """

    kind: MoveKind
    source: int
    target: int
    source_place: Place = Place.DEVICE
    target_place: Place = Place.DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """The rows that run their last token (and, with speculation, up to `drafts` drafted ones after it).

    rows, state_in, state_out: [D] int32. The state is updated in place (state_in == state_out), 0 without state.
    The arrays may be shared between plans while the batch doesn't change: never write to them.
    """

    rows: np.ndarray
    state_in: np.ndarray
    state_out: np.ndarray
    drafts: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of this part, drafts included."""
        return len(self.rows) * (1 + self.drafts)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Upper bounds of the step, from which a bucket is chosen.

    tokens: of the whole step. requests: decode rows + chunks. query: tokens of one request. context: length of one
    request with this step's tokens.
    """

    tokens: int
    requests: int
    query: int
    context: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What one step does; see the module docstring for the order in which its parts are applied.

    number: 0, 1, 2, ... in the order of execution.
    leaves: [*] int32 rows freed; a join of the same plan may take one of them.
    pages: for each page group of the model an int32 array [*, 3] of (row, index, page): the page table's entry
        (row, index) becomes page. Entries not named keep their value.
    """

    number: int
    leaves: np.ndarray
    joins: list[Join]
    pages: tuple[np.ndarray, ...]
    moves: list[Move]
    decode: Decode
    prefill: list[Chunk]
    exports: list[Export]
    bounds: Bounds

    @property
    def sampling_rows(self) -> np.ndarray:
        """[S] int32 rows that sample a token, in the order of `StepResult`: decode rows, then final chunks."""
        final = [chunk.row for chunk in self.prefill if chunk.final]
        return np.concatenate([self.decode.rows, np.asarray(final, np.int32)]) if final else self.decode.rows


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What came of a plan. Results are committed in the order of the plans.

    tokens: [S, width] int32, width >= 1: the tokens of each sampling row, in order; entries past its count are ignored.
    counts: [S] int32, 0 <= counts <= width. A decode row that commits c tokens has run c inputs: its last token and the
        first c - 1 of the new ones; the newest has not been run. 0: the row was left as it was before the plan (say,
        because it had sampled a stop token already). A final chunk commits exactly 1.
    """

    tokens: np.ndarray
    counts: np.ndarray
