"""What the prefix tree is made of, and what it answers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Origin(enum.StrEnum):
    """How a checkpoint came about; see `exports.py`."""

    PROMPT_END = "prompt_end"
    REQUEST_END = "request_end"
    BRANCH = "branch"
    LADDER = "ladder"


@dataclass(slots=True, eq=False)
class Node:
    """One page in the tree.

    depth: its index in a page table. tokens: how many of its positions are filled. checkpoints: that end inside it.
    child_lengths: tokens into the next page at which checkpoints end, longest first, one for each of them.
    """

    key: bytes
    parent: Node | None
    depth: int
    page: int
    tokens: int
    children: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    child_lengths: tuple[int, ...] = ()
    credit: float = 0.0
    ticket: int = 0


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A prefix of `length` tokens can be resumed: its last tokens are in `node`'s page, its state in `slot` (or 0)."""

    key: bytes
    node: Node
    length: int
    slot: int
    origin: Origin
    readers: int = 0  # requests that resumed at it
    superseded: bool = False  # kept only until its slot is wanted
    credit: float = 0.0
    ticket: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request may take over.

    length: tokens it need not prefill. pages: full pages to share, in order. node: the last of them.
    source: node whose page is to be copied for the tokens after the shared pages; None if there are none.
    checkpoint: whose slot is read in place; None without state.
    matched: tokens for which KV is there; more than `length` if a checkpoint is wanting.
    depth: leading full pages that are in the tree, whether or not they can be used.
    branches: others went on from there differently.
    """

    length: int
    pages: list[int]
    node: Node | None
    source: Node | None
    checkpoint: Checkpoint | None
    matched: int
    depth: int
    branches: bool


NO_HIT = Hit(0, [], None, None, None, 0, 0, False)
