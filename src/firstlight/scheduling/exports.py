"""Where a prefill leaves checkpoints of its state, so that later requests can resume there.

Without cutting the prefill, states can be had at multiples of 64 tokens from a chunk's start, and at its end. Wanted are:

- *prompt end*: a little before the end. A repeat of the prompt must run at least its last token, and a chat template
  often spells the last few tokens (the header of the answer) otherwise when the conversation goes on, so a state of the
  very end would rarely be read. The end of the whole request is handed over without a copy (`residency.py`).
- *branch*: where this prompt leaves a path that others took, or that requests waiting now will take, if there is no
  checkpoint between. Such a place is likely the end of a system prompt.
- *ladder*: every 8,192 tokens, only into slots that nobody uses.
"""

from __future__ import annotations

import math

import numpy as np

from firstlight.scheduling.draft import Draft
from firstlight.scheduling.plan import CHUNK
from firstlight.scheduling.prefix_nodes import Hit, Origin
from firstlight.scheduling.progress import Progress
from firstlight.scheduling.publishing import Publisher

PROMPT_TAIL = 8  # tokens: more than the header of an answer
LADDER = 8192  # tokens
MAX_WISHES = 8  # a request's wishes at a time, so that many followers don't fill the slots


def wish(progress: Progress, looked_up: Hit) -> None:
    """Notes where a request that joins should leave checkpoints, given what was found of it in the tree."""
    length = progress.target - PROMPT_TAIL
    if length > progress.hit.length:
        progress.wishes[length] = Origin.PROMPT_END
    if looked_up.matched > progress.hit.length:
        progress.wishes[looked_up.matched] = Origin.BRANCH if looked_up.branches else Origin.PROMPT_END


def plan_exports(draft: Draft, publisher: Publisher) -> None:
    """Plans the exports of every prefill chunk in the draft."""
    for progress, count in draft.granted.items():
        start, end = progress.planned, progress.planned + count
        wishes = dict(progress.wishes)
        for length in range((start // LADDER + 1) * LADDER, end + 1, LADDER):
            wishes.setdefault(length, Origin.LADDER)
        taken = set()
        for length, origin in sorted(wishes.items(), key=lambda item: (item[1] is Origin.LADDER, item[0])):
            if length >= end + CHUNK and end < progress.target:
                continue  # the next chunk comes nearer
            progress.wishes.pop(length, None)
            offset = count if length >= end else (length - start) // CHUNK * CHUNK
            if offset <= 0 or offset in taken:
                continue
            slot = publisher.export_slot(_gain(progress, start + offset, origin, publisher))
            if slot:
                taken.add(offset)
                draft.export(progress, offset, slot)
                publisher.add_export(progress, start + offset, slot, origin)


def _gain(progress: Progress, length: int, origin: Origin, publisher: Publisher) -> float:
    """FLOPs for which another checkpoint may be evicted."""
    if origin is Origin.PROMPT_END:
        return publisher.geometry.prefill_flops(progress.hit.length, length)
    return math.inf if origin is Origin.BRANCH else 0.0


def worth_waiting(progress: Progress, hit: Hit, publisher: Publisher) -> bytes | None:
    """Whether a waiting request should let a running prefill bring their common prefix, instead of doing it again: the
    key of the page to wait for, or None.

    If it should wait, and the model has state, the prefill is asked for a checkpoint where the two part.
    """
    keys = progress.chain.keys
    provider = publisher.pending.get(keys[hit.depth]) if hit.depth < len(keys) else None
    if provider is None or (progress.online and not provider.online):
        return None
    ours, theirs = progress.tokens()[:-1], provider.tokens()
    shorter = min(len(ours), len(theirs))
    differing = np.flatnonzero(ours[:shorter] != theirs[:shorter])
    common = int(differing[0]) if len(differing) else shorter
    geometry = publisher.geometry
    full = common // geometry.page_size
    if full <= hit.depth:
        return None
    if geometry.has_state and not _brings_state(provider, common, hit, geometry.checkpoint_slots > 0):
        return None
    return keys[full - 1]


def _brings_state(provider: Progress, common: int, hit: Hit, can_export: bool) -> bool:
    if any(hit.length < export.length <= common for export in provider.exports):
        return True
    reachable = provider.planned + (common - provider.planned) // CHUNK * CHUNK
    if not can_export or reachable <= max(provider.planned, hit.length):
        return False
    if common not in provider.wishes:
        if len(provider.wishes) >= MAX_WISHES:
            return False
        provider.wishes[common] = Origin.BRANCH
    return True
