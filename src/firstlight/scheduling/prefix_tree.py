"""The prefix tree: which pages and state checkpoints hold which prefixes, and what a new request can take over.


A node is one page of KV, reached by the key of its prefix. Its children continue it. A node at the end of a request may
be partly filled. A *checkpoint* says that a prefix can be resumed at a length that is no multiple of the page, or, in a
model with state, at any length at all: it names the node whose page holds the last tokens and the slot of the state.

    page size 4:    root ── [a b c d] ── [e f g h] ── [i j]
                                │            └ checkpoint at 6 (slot 9)
                                └ checkpoint at 4 (slot 3)

A prompt `a b c d e f X ...` resumes at 6: it shares the first page, copies the second (its own tokens go behind `f`) and
reads slot 9 in place. Without state there are no slots, full pages can be resumed at without a checkpoint, and only the
end of a partly filled page has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from firstlight.scheduling.accounts import Account
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.eviction import EvictionQueue
from firstlight.scheduling.metrics import Metrics
from firstlight.scheduling.prefix_keys import KeyChain
from firstlight.scheduling.prefix_nodes import Checkpoint, Hit, Node, Origin


class PrefixTree:
    """The tree over two accounts; it holds one reference to each page and slot that it keeps."""

    def __init__(self, geometry: CacheGeometry, pages: Account, slots: Account, metrics: Metrics) -> None:
        self._geometry = geometry
        self._pages = pages
        self._slots = slots
        self._metrics = metrics
        self._nodes: dict[bytes, Node] = {}
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._roots: dict[bytes, Node] = {}
        self._reads = dict.fromkeys(Origin, 0)
        self._node_queue: EvictionQueue[Node] = EvictionQueue(self._node_is_idle_leaf)
        self._checkpoint_queue: EvictionQueue[Checkpoint] = EvictionQueue(self._checkpoint_is_idle)

    @property
    def checkpoint_count(self) -> int:
        """Slots held by checkpoints."""
        return len(self._checkpoints) if self._geometry.has_state else 0

    @property
    def answers_come_back(self) -> bool:
        """Whether conversations go on from the ends of requests (or nothing is known yet). They don't, and go on from
        the ends of prompts, where clients leave out or change what was answered, such as its reasoning."""
        return self._reads[Origin.REQUEST_END] >= self._reads[Origin.PROMPT_END]

    # Looking up

    def match(self, chain: KeyChain, tokens: np.ndarray, limit: int) -> Hit:
        """The longest prefix of `tokens`, of at most `limit` tokens, that can be resumed. Changes nothing."""
        depth = self.matched_pages(chain.keys)
        size = self._geometry.page_size
        matched = min(depth * size, limit)
        branches = depth > 0 and self._nodes[chain.keys[depth - 1]].children > 0
        checkpoint = self._deepest_checkpoint(chain, tokens, depth, limit)
        shared = min(depth, limit // size)
        if self._geometry.has_state:
            if checkpoint is None:
                return Hit(0, [], None, None, None, matched, depth, branches)
            shared = checkpoint.length // size
        elif checkpoint is None or checkpoint.length <= shared * size:
            checkpoint = None
        else:
            shared = checkpoint.length // size
        length = checkpoint.length if checkpoint else shared * size
        node = self._nodes[chain.keys[shared - 1]] if shared else None
        source = checkpoint.node if checkpoint and length % size else None
        return Hit(length, self._path_pages(node), node, source, checkpoint, max(matched, length), depth, branches)

    def matched_pages(self, keys: list[bytes]) -> int:
        """How many of the leading pages are in the tree. A node's ancestors always are, hence the binary search."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in self._nodes:
                low = middle
            else:
                high = middle - 1
        return low

    def _deepest_checkpoint(self, chain: KeyChain, tokens: np.ndarray, depth: int, limit: int) -> Checkpoint | None:
        size = self._geometry.page_size
        if not self._geometry.has_state:
            depth = min(depth, limit // size)
        node = self._nodes[chain.keys[depth - 1]] if depth else self._roots.get(chain.root)
        while node is not None:
            start = (node.depth + 1) * size
            for count in node.child_lengths:
                if start + count <= min(limit, len(tokens)):
                    found = self._checkpoints.get(chain.at(tokens, start + count))
                    if found is not None:
                        return found
            if not self._geometry.has_state:
                return None  # the node itself can be resumed at
            node = node.parent
        return None

    def _path_pages(self, node: Node | None) -> list[int]:
        pages = []
        while node is not None and node.depth >= 0:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    # Growing

    def node_before(self, chain: KeyChain, page: int) -> Node | None:
        """The node (or root) that page `page` of this chain continues; None if it is not in the tree any more."""
        if page:
            return self._nodes.get(chain.keys[page - 1])
        return self._roots.get(chain.root) or Node(chain.root, None, -1, 0, self._geometry.page_size)

    def insert(self, parent: Node, keys: list[bytes], pages: list[int], tokens: int) -> list[Node]:
        """The nodes of pages that continue `parent`; the last of them has `tokens` positions filled. Where a key is there
        already, its node stays, and the caller's page remains the caller's alone."""
        nodes, kept = [], []
        node, size = parent, self._geometry.page_size
        for key, page in zip(keys, pages, strict=True):
            known = self._nodes.get(key)
            if known is None:
                known = self._nodes[key] = Node(key, node, node.depth + 1, page, size)
                node.children += 1
                kept.append(page)
                if node.depth < 0:
                    self._roots[node.key] = node
            node = known
            nodes.append(node)
        if kept:
            self._pages.keep(kept)
            if nodes[-1].page == kept[-1]:
                nodes[-1].tokens = tokens
        self._use_node(nodes[-1])  # the others are used whenever it is
        return nodes

    def attach(
        self, chain: KeyChain, tokens: np.ndarray, length: int, node: Node, slot: int, origin: Origin
    ) -> Checkpoint:
        """A checkpoint of tokens [0, length) whose last tokens are in `node`'s page; takes over the caller's reference
        to `slot` (0: no state)."""
        key = chain.at(tokens, length)
        known = self._checkpoints.get(key)
        if known is None:
            known = self._checkpoints[key] = Checkpoint(key, node, length, slot, origin)
            node.checkpoints += (known,)
            parent = self._parent(node)
            parent.child_lengths = tuple(sorted((*parent.child_lengths, self._within(known)), reverse=True))
            if slot:
                self._slots.keep([slot])
        if slot:
            self._slots.release([slot])
        self._use_checkpoint(known)
        self.offer(known.node)
        return known

    # Using and leaving

    def pin(self, hit: Hit) -> None:
        """Takes a reference to everything a hit shares, copies or reads."""
        self._pages.share(hit.pages)
        if hit.node is not None:
            self._use_node(hit.node)
        if hit.source is not None:
            self._pages.share([hit.source.page])
            self._use_node(hit.source)
        if hit.checkpoint is not None and hit.checkpoint.slot:
            self._slots.share([hit.checkpoint.slot])

    def count_reader(self, hit: Hit) -> None:
        """A request has resumed here."""
        if hit.checkpoint is not None:
            hit.checkpoint.readers += 1
            hit.checkpoint.superseded = False
            self._reads[hit.checkpoint.origin] += 1
            self._use_checkpoint(hit.checkpoint)

    def unpin_source(self, hit: Hit) -> None:
        """Gives back what was only read: the copied page and the slot."""
        if hit.source is not None:
            self._pages.release([hit.source.page])
            self.offer(hit.source)
        if hit.checkpoint is not None and hit.checkpoint.slot:
            self._slots.release([hit.checkpoint.slot])
            self._checkpoint_queue.offer(hit.checkpoint)
            self.offer(hit.checkpoint.node)

    def offer(self, node: Node | None) -> None:
        """To be called when a reference to the node's page has been given back: it may have become evictable."""
        if node is not None and self._node_is_idle_leaf(node):
            self._node_queue.offer(node)

    def supersede(self, checkpoint: Checkpoint, readers: int) -> None:
        """There is a better checkpoint than this one for those who go on from here: if no more than `readers` ever
        resumed at it, and it doesn't mark a branch, it goes first."""
        passing = checkpoint.origin in (Origin.REQUEST_END, Origin.PROMPT_END)
        if passing and checkpoint.readers <= readers and checkpoint.ticket >= 0:
            checkpoint.superseded = True
            checkpoint.credit = 0.0
            self._checkpoint_queue.offer(checkpoint)

    # Evicting

    def evict_pages(self, free: int) -> bool:
        """Evicts until `free` pages are free; False if there is nothing left to evict before that."""
        while self._pages.free < free:
            node = self._node_queue.take()
            if node is None:
                return False
            parent = self._remove_node(node)
            # Mostly the parent is the next to go; that is seen without a way through the queue.
            while parent is not None and self._pages.free < free and self._node_queue.take_at_once(parent):
                parent = self._remove_node(parent)
            self.offer(parent)
        return True

    def evict_slot(self, gain_flops: float = math.inf) -> bool:
        """Evicts one checkpoint, which frees its slot; False if all are in use, or worth more than one that would save
        `gain_flops`."""
        below = self._checkpoint_queue.clock + gain_flops / self._geometry.slot_bytes
        checkpoint = self._checkpoint_queue.take(below)
        if checkpoint is None:
            return False
        self._remove_checkpoint(checkpoint)
        node = checkpoint.node
        if node.tokens < self._geometry.page_size and not node.checkpoints and self._node_is_idle_leaf(node):
            self.offer(self._remove_node(node))  # a partly filled page is of no use without its checkpoint
        return True

    def clear(self) -> None:
        """Evicts all that is not in use."""
        self.evict_pages(self._pages.total)

    def _remove_node(self, node: Node) -> Node | None:
        """Takes a leaf out of the tree; returns its parent, unless that is the root."""
        for checkpoint in node.checkpoints:
            self._remove_checkpoint(checkpoint)
        del self._nodes[node.key]
        node.ticket = -1
        self._pages.forget(node.page)
        self._metrics.evicted_pages += 1
        parent = self._parent(node)
        parent.children -= 1
        if parent.depth >= 0:
            parent.credit = max(parent.credit, node.credit)  # it was used whenever its child was
            return parent
        if not parent.children:
            del self._roots[parent.key]
        return None

    def _remove_checkpoint(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint.key]
        checkpoint.ticket = -1
        node = checkpoint.node
        node.checkpoints = tuple(other for other in node.checkpoints if other is not checkpoint)
        parent = self._parent(node)
        place = parent.child_lengths.index(self._within(checkpoint))
        parent.child_lengths = parent.child_lengths[:place] + parent.child_lengths[place + 1 :]
        if checkpoint.slot:
            self._slots.forget(checkpoint.slot)

    def _within(self, checkpoint: Checkpoint) -> int:
        """Tokens of the checkpoint in its node's page."""
        return checkpoint.length - checkpoint.node.depth * self._geometry.page_size

    @staticmethod
    def _parent(node: Node) -> Node:
        assert node.parent is not None, "a root has no page"
        return node.parent

    def _node_is_idle_leaf(self, node: Node) -> bool:
        return (
            not node.children
            and node.ticket >= 0
            and self._pages.references(node.page) == 1
            and (not node.checkpoints or all(map(self._checkpoint_is_idle, node.checkpoints)))
        )

    def _checkpoint_is_idle(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.slot == 0 or self._slots.references(checkpoint.slot) == 1

    # What an eviction would cost

    def _use_node(self, node: Node) -> None:
        start = node.depth * self._geometry.page_size
        flops = self._geometry.prefill_flops(start, start + node.tokens)
        self._node_queue.use(node, flops / max(self._geometry.page_bytes, 1))

    def _use_checkpoint(self, checkpoint: Checkpoint) -> None:
        if checkpoint.slot:
            flops = self._geometry.prefill_flops(self._fallback(checkpoint), checkpoint.length)
            self._checkpoint_queue.use(checkpoint, flops / self._geometry.slot_bytes)
            self._checkpoint_queue.offer(checkpoint)

    def _fallback(self, checkpoint: Checkpoint) -> int:
        """The length from which a request would have to prefill without this checkpoint."""
        for node in self._ancestry(checkpoint.node):
            shorter = [
                other.length for other in node.checkpoints if other.length < checkpoint.length and not other.superseded
            ]
            if shorter:
                return max(shorter)
        return 0

    def _ancestry(self, node: Node | None) -> Iterator[Node]:
        while node is not None:
            yield node
            node = node.parent

    def check_integrity(self) -> None:
        """Raises AssertionError if nodes, children and checkpoints don't agree with each other."""
        children: dict[bytes, int] = {}
        for node in self._nodes.values():
            assert node.parent is not None
            parent = self._nodes.get(node.parent.key) or self._roots.get(node.parent.key)
            assert parent is node.parent, f"page {node.page} at depth {node.depth} continues a node that is gone"
            children[parent.key] = children.get(parent.key, 0) + 1
        for node in (*self._nodes.values(), *self._roots.values()):
            assert node.children == children.get(node.key, 0), f"page {node.page}: {node.children} children counted"
        held = [checkpoint for node in self._nodes.values() for checkpoint in node.checkpoints]
        assert len(held) == len(self._checkpoints), f"{len(held)} checkpoints on nodes, {len(self._checkpoints)} known"
