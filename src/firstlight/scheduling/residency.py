"""How a request takes rows, pages and slots, and how it gives them back.

    free ──admit, grow──▶ the request's ──retire──▶ free, or the prefix tree's ──evict──▶ free
                            ▲                                 │
                            └──────────── hit ────────────────┘

A request that leaves the batch while plans with it are in flight *drains*: its tokens aren't known yet, so it keeps what
those plans still write to until the last of them has committed. Only an online request that must be in the next plan
does not wait for that: it takes over what draining offline work holds (`strip`), which is safe since plans are executed
in order, and costs that work the state it had reached.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.scheduling.accounts import Account
from firstlight.scheduling.arena import CacheGeometry
from firstlight.scheduling.metrics import Metrics
from firstlight.scheduling.prefix_nodes import NO_HIT, Hit
from firstlight.scheduling.prefix_tree import PrefixTree
from firstlight.scheduling.progress import NEVER, Phase, Progress
from firstlight.scheduling.publishing import Publisher
from firstlight.scheduling.rows import RowTable


class Residency:
    """The accounts, the tree, and the ways between them.

    caching: whether the tree is used at all.
    draining: requests out of the batch with plans in flight. oldest_in_flight: number of the oldest plan that has not
    committed. retired: called with each request that has given everything back.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        rows: RowTable,
        caching: bool,
        metrics: Metrics,
        retired: Callable[[Progress], None],
    ) -> None:
        self.geometry = geometry
        self.rows = rows
        self.caching = caching
        self.metrics = metrics
        self.pages = Account("pages", geometry.pages)
        self.slots = Account("slots", geometry.slots)
        self.tree = PrefixTree(geometry, self.pages, self.slots, metrics)
        self.publisher = Publisher(geometry, self.pages, self.slots, self.tree, caching)
        self.draining: list[Progress] = []
        self.oldest_in_flight = NEVER
        self._retired = retired

    # Taking

    def look_up(self, progress: Progress) -> Hit:
        """What a waiting request could take over now; at least one token is left to run."""
        if not self.caching:
            return NO_HIT
        tokens = progress.tokens()
        progress.chain.extend(tokens)
        return self.tree.match(progress.chain, tokens, len(tokens) - 1)

    def admit(self, progress: Progress, hit: Hit, victims: list[Progress], preempt: Callable[[Progress], None]) -> bool:
        """Gives a waiting request its row, slot and pages, if need be by calling `preempt` on some of `victims`, first
        ones first; False, with nobody preempted, if it doesn't fit even so."""
        needed = -(-progress.known // self.geometry.page_size)
        alone = self.rows.account.free == self.rows.account.total
        if not (alone or victims or self.room_for(needed - len(hit.pages))):
            return False
        self._pin(hit)
        if not self._make_room(needed - len(hit.pages), victims, preempt):
            self._unpin(hit)
            # What a hit copies from or reads takes one page and one slot more than starting afresh.
            if not (hit.length and (alone or victims) and self._make_room(needed, victims, preempt)):
                return False
            hit = NO_HIT
        self.tree.evict_pages(needed - len(hit.pages))
        fresh = self.pages.allocate(needed - len(hit.pages))
        self.rows.join(progress)
        progress.slot = self._take_slot()
        progress.pages = hit.pages + fresh
        progress.hit, progress.source_pinned = hit, hit is not NO_HIT
        progress.node, progress.inserted = hit.node, len(hit.pages)
        progress.target = progress.known
        progress.computed = progress.planned = hit.length
        progress.phase = Phase.PREFILL
        progress.preempted = False
        progress.last_plan = -1
        progress.joined_with = len(progress.output)
        self.rows.capacity[progress.row] = needed * self.geometry.page_size
        self.tree.count_reader(hit)
        self.publisher.expect(progress)
        return True

    def room_for(self, pages: int) -> bool:
        """Whether so many pages can be had without preempting anybody."""
        return self.pages.free + self.pages.idle >= pages

    def grow(self, growing: list[tuple[Progress, int]]) -> None:
        """Gives each of these requests so many new pages, at the end of its own; there must be room for all."""
        total = sum(count for _, count in growing)
        self.tree.evict_pages(total)
        fresh = self.pages.allocate(total)
        for progress, count in growing:
            progress.pages += fresh[:count]
            del fresh[:count]
            self.rows.capacity[progress.row] += count * self.geometry.page_size

    def _take_slot(self) -> int:
        if not self.geometry.has_state:
            return 0
        if not self.slots.free:
            self.tree.evict_slot()
        return self.slots.allocate(1)[0]

    def _short(self, pages: int) -> tuple[bool, bool]:
        """Whether rows or slots are wanting for one more request, and whether pages are."""
        slots = self.geometry.has_state and self.slots.free + self.slots.idle < 1
        return self.rows.account.free < 1 or slots, not self.room_for(pages)

    def _make_room(self, pages: int, victims: list[Progress], preempt: Callable[[Progress], None]) -> bool:
        if not any(self._short(pages)):
            return True
        drained = [other for other in self.draining if not other.online and other.row]
        if not victims or not self._would_fit(pages, victims + drained):
            return False
        for victim in victims:
            preempt(victim)
            if self._short(pages)[0] and victim.row:
                self.strip(victim)
            if not any(self._short(pages)):
                return True
        for other in [other for other in self.draining if not other.online and other.row]:
            self.strip(other)
            if not any(self._short(pages)):
                return True
        return not any(self._short(pages))

    def _would_fit(self, pages: int, givers: list[Progress]) -> bool:
        held = [page for giver in givers for page in self._held_pages(giver)]
        return self.pages.free + self.pages.idle + self.pages.would_free(held) >= pages

    def _held_pages(self, progress: Progress) -> list[int]:
        source = progress.hit.source if progress.source_pinned else None
        return progress.pages[progress.first_page :] + progress.shadows + ([source.page] if source else [])

    def _pin(self, hit: Hit) -> None:
        if hit is not NO_HIT:
            self.tree.pin(hit)

    def _unpin(self, hit: Hit) -> None:
        if hit is not NO_HIT:
            self.tree.unpin_source(hit)
            self.pages.release(hit.pages)
            self.tree.offer(hit.node)

    # Giving back

    def preempt(self, progress: Progress) -> None:
        """Takes a running request out of the batch; it goes back to waiting once it is retired."""
        progress.preempted = True
        self.metrics.preemptions += 1
        self.leave(progress)
        if progress.draining:
            self.unpin_source(progress)
            self.publisher.expect_no_more(progress)
            self.insert(progress)

    def insert(self, progress: Progress) -> None:
        """More of the request is computed: it goes to the tree."""
        if progress.row:
            self.publisher.insert(progress)
            if progress.draining and progress.preempted:
                self._release_early(progress)

    def _release_early(self, progress: Progress) -> None:
        """A preempted request keeps no hold on what is in the tree, so that others can have it before it is retired."""
        self.pages.release(progress.pages[progress.first_page : progress.inserted] + progress.shadows)
        progress.first_page, progress.shadows = max(progress.first_page, progress.inserted), []
        self.tree.offer(progress.node)

    def leave(self, progress: Progress) -> None:
        """The request is in no further plan: it drains, or is retired if no plan with it is in flight."""
        self.rows.stop_decoding(progress)
        if progress.last_plan >= self.oldest_in_flight:
            progress.draining = True
            self.draining.append(progress)
        else:
            self.retire(progress)

    def unpin_source(self, progress: Progress) -> None:
        """Gives back what the hit only copied or read: its first plan has committed, or no other will follow."""
        if progress.source_pinned:
            progress.source_pinned = False
            self.tree.unpin_source(progress.hit)

    def strip(self, progress: Progress) -> None:
        """Takes everything from a draining request at once. Its tokens in flight still count."""
        self._free(progress)

    def retire(self, progress: Progress) -> None:
        """Every plan with this request has committed: its pages and state go to the tree, the rest is free."""
        progress.draining = False
        if progress.row:
            if self.caching:
                self.publisher.insert(progress)
                self.publisher.hand_over(progress)
            self._free(progress)
        progress.hit, progress.node, progress.wishes, progress.made = NO_HIT, None, {}, []
        progress.computed = progress.planned = progress.inserted = 0
        self._retired(progress)

    def retire_drained(self, committed: int) -> None:
        """Retires the draining requests whose last plan has committed now."""
        if self.draining:
            done = [progress for progress in self.draining if progress.last_plan <= committed]
            self.draining = [progress for progress in self.draining if progress.last_plan > committed]
            for progress in done:
                self.retire(progress)

    def _free(self, progress: Progress) -> None:
        self.unpin_source(progress)
        self.publisher.expect_no_more(progress)
        self.publisher.drop_exports(progress)
        self.slots.release([progress.slot] if progress.slot else [])
        self.pages.release(progress.pages[progress.first_page :] + progress.shadows)
        self.tree.offer(progress.node)
        progress.pages, progress.shadows, progress.slot, progress.first_page = [], [], 0, 0
        self.rows.free(progress)
