"""Putting what a request has computed into the prefix tree, for others to take over.

Full pages go in as prefills commit, and with them the checkpoints that were exported on the way; at a request's end its
last, partly filled page, and its live slot.
"""

from __future__ import annotations

import math

from firstlight.scheduling.accounts import Account
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.prefix_nodes import Node, Origin
from firstlight.scheduling.prefix_tree import PrefixTree
from firstlight.scheduling.progress import NEVER, ExportedState, Progress


class Publisher:
    """caching: whether anything is put there at all. pending: by page key, the request about to bring that page."""

    def __init__(
        self, geometry: CacheGeometry, pages: Account, slots: Account, tree: PrefixTree, caching: bool
    ) -> None:
        self.geometry = geometry
        self.pages = pages
        self.slots = slots
        self.tree = tree
        self.caching = caching
        self.pending: dict[bytes, Progress] = {}
        self._exporting = 0  # slots of exports that aren't in the tree yet

    def expect(self, progress: Progress) -> None:
        """The request is about to prefill the pages after its hit."""
        if self.caching:
            for key in progress.chain.keys[progress.inserted :]:
                self.pending.setdefault(key, progress)

    def expect_no_more(self, progress: Progress) -> None:
        """It will bring none but those it has brought."""
        for key in progress.chain.keys[progress.inserted :]:
            if self.pending.get(key) is progress:
                del self.pending[key]

    def insert(self, progress: Progress) -> None:
        """Puts the full pages of what is computed, and the checkpoints within them, into the tree."""
        size = self.geometry.page_size
        full = progress.useful // size
        if not self.caching:
            return
        if full > progress.inserted:
            progress.chain.extend(progress.tokens()[: full * size])
            parent = self.tree.node_before(progress.chain, progress.inserted)
            if parent is None:
                return  # a preempted request's earlier pages have been evicted since
            self._insert_pages(progress, parent, progress.chain.keys[progress.inserted : full], size)
            progress.inserted = full
        self._attach_exports(progress)

    def _insert_pages(self, progress: Progress, parent: Node, keys: list[bytes], tokens: int) -> None:
        pages = progress.pages[progress.inserted : progress.inserted + len(keys)]
        nodes = self.tree.insert(parent, keys, pages, tokens)
        shadows = [node.page for node, page in zip(nodes, pages, strict=True) if node.page != page]
        self.pages.share(shadows)
        progress.shadows += shadows
        progress.node = nodes[-1]
        for key in keys:
            if self.pending.get(key) is progress:
                del self.pending[key]

    # Checkpoints exported on the way

    def export_slot(self, gain_flops: float) -> int:
        """A slot for a checkpoint to be exported to, 0 if there is none.

        gain_flops: what the new checkpoint would save; another one is evicted only if it is worth less. 0: none is.
        """
        if not self._room_for_checkpoint(gain_flops):
            return 0
        if not self.slots.free and not self.tree.evict_slot(gain_flops):
            return 0
        self._exporting += 1
        return self.slots.allocate(1)[0]

    def _room_for_checkpoint(self, gain_flops: float = math.inf) -> bool:
        while self.tree.checkpoint_count + self._exporting >= self.geometry.checkpoint_slots:
            if not self.tree.evict_slot(gain_flops):
                return False
        return True

    def add_export(self, progress: Progress, length: int, slot: int, origin: Origin) -> None:
        """Notes that a plan writes the state after `length` tokens to `slot`."""
        progress.exports.append(ExportedState(length, slot, origin))
        self._await_export_page(progress)

    def _attach_exports(self, progress: Progress) -> None:
        if not progress.exports:
            return
        size = self.geometry.page_size
        waiting = []
        for export in progress.exports:
            depth = (export.length - 1) // size
            if export.length > progress.computed or depth >= progress.inserted:
                waiting.append(export)
                continue
            self._exporting -= 1
            node = self.tree.node_before(progress.chain, depth + 1)
            if node is None:
                self.slots.release([export.slot])
            else:
                tokens = progress.tokens()
                made = self.tree.attach(progress.chain, tokens, export.length, node, export.slot, export.origin)
                progress.made.append(made)
        progress.exports = waiting
        self._await_export_page(progress)

    def _await_export_page(self, progress: Progress) -> None:
        size = self.geometry.page_size
        ends = [((export.length - 1) // size + 1) * size for export in progress.exports]
        progress.insert_at = min(ends, default=NEVER)

    def drop_exports(self, progress: Progress) -> None:
        """Gives back the slots of exports that didn't get into the tree."""
        self._exporting -= len(progress.exports)
        self.slots.release([export.slot for export in progress.exports])
        progress.exports, progress.insert_at = [], NEVER

    # What is left at the end

    def hand_over(self, progress: Progress) -> None:
        """Leaves to the tree what reaches past the last full page, and the live slot, whose state is a checkpoint."""
        length = progress.useful
        rest = length - progress.inserted * self.geometry.page_size
        if progress.hit.checkpoint is not None:
            self.tree.supersede(progress.hit.checkpoint, readers=1)
        # Past the answer's end the slot has seen tokens that no other prompt will have.
        state = bool(progress.slot) and length == progress.computed and self._room_for_own_state(progress)
        if rest and (state or progress.exports or not self.geometry.has_state):
            self._insert_partial(progress, length, rest)
        else:
            progress.node = self.tree.node_before(progress.chain, progress.inserted)
        node = progress.node
        if node is None or node.depth < 0 or node.depth * self.geometry.page_size + node.tokens < length:
            return  # pages on the way have been evicted
        if rest and not self.geometry.has_state:
            self.tree.attach(progress.chain, progress.tokens(), length, node, 0, Origin.REQUEST_END)
        self._attach_within(progress, node, length)
        if state:
            own = self.tree.attach(progress.chain, progress.tokens(), length, node, progress.slot, Origin.REQUEST_END)
            progress.slot = 0
            for other in progress.made if self.tree.answers_come_back else [own]:
                self.tree.supersede(other, readers=0)

    def _attach_within(self, progress: Progress, node: Node, length: int) -> None:
        """Exports whose last tokens are in the request's last page."""
        within, progress.exports = progress.exports, []
        for export in within:
            self._exporting -= 1
            if node.depth * self.geometry.page_size < export.length <= length:
                tokens = progress.tokens()
                made = self.tree.attach(progress.chain, tokens, export.length, node, export.slot, export.origin)
                progress.made.append(made)
            else:
                self.slots.release([export.slot])

    def _room_for_own_state(self, progress: Progress) -> bool:
        if self.tree.answers_come_back:
            for checkpoint in progress.made:
                self.tree.supersede(checkpoint, readers=0)
        return self._room_for_checkpoint()

    def _insert_partial(self, progress: Progress, length: int, rest: int) -> None:
        progress.node, parent = None, self.tree.node_before(progress.chain, progress.inserted)
        if parent is not None and rest < self.geometry.page_size:
            self._insert_pages(progress, parent, [progress.chain.at(progress.tokens(), length)], rest)
