"""The parts that the scheduler is made of: accounts, arena, keys, eviction, tree."""

from __future__ import annotations

import numpy as np
import pytest

from firstlight.scheduling.accounts import Account, IntegrityError
from firstlight.scheduling.arena import CacheGeometry, split_arena
from firstlight.scheduling.eviction import EvictionQueue
from firstlight.scheduling.fairness import OfflineShare
from firstlight.scheduling.metrics import Metrics
from firstlight.scheduling.prefix_keys import KeyChain
from firstlight.scheduling.prefix_nodes import Checkpoint, Node, Origin
from firstlight.scheduling.prefix_tree import PrefixTree
from firstlight.scheduling.request import CacheIdentity, Media, Request
from firstlight.scheduling.sampling import SamplingParams
from firstlight.scheduling.work import Work

GIB = 1 << 30


def tokens(*given: int) -> np.ndarray:
    return np.asarray(given, np.int32)


def test_account_never_gives_index_0_and_counts_references():
    account = Account("pages", 4)
    taken = account.allocate(4)
    assert sorted(taken) == [1, 2, 3, 4]
    account.share(taken[:2])
    account.release(taken)
    assert account.free == 2
    account.release(taken[:2])
    assert account.free == 4
    account.check_integrity(idle_only=True)


def test_account_tells_idle_from_used():
    account = Account("pages", 3)
    first, second = account.allocate(2)
    account.keep([first, second])
    assert account.idle == 0
    assert account.would_free([first]) == 1
    account.release([first])
    assert account.idle == 1
    account.share([first])
    assert account.idle == 0
    account.release([first])
    account.forget(first)
    assert (account.free, account.idle) == (2, 0)
    with pytest.raises(IntegrityError, match=r"nothing runs, yet \[2\] are held"):
        account.check_integrity(idle_only=True)


def test_account_notices_abuse():
    account = Account("slots", 2)
    with pytest.raises(IntegrityError, match="3 slots asked for, 2 of 2 free"):
        account.allocate(3)
    (index,) = account.allocate(1)
    account.release([index])
    with pytest.raises(IntegrityError, match="who doesn't hold them"):
        account.release([index])


def test_arena_of_a_dense_model_is_all_pages():
    geometry = split_arena(GIB, page_size=16, page_bytes=1 << 20, max_running=256)
    assert (geometry.pages, geometry.slots, geometry.has_state) == (1023, 0, False)


def test_arena_of_a_hybrid_keeps_to_its_budget():
    page, slot = 16 * 20_480, 64 << 20
    geometry = split_arena(60 * GIB, page_size=16, page_bytes=page, slot_bytes=slot, max_running=128)
    live = geometry.slots - geometry.checkpoint_slots
    assert live == 128
    assert geometry.checkpoint_slots == 30 * GIB // slot
    used = (geometry.slots + 1) * slot + (geometry.pages + 1) * page
    assert 60 * GIB - page < used <= 60 * GIB
    small = split_arena(60 * GIB, page_size=16, page_bytes=page, slot_bytes=slot, max_running=128, checkpoint_bytes=GIB)
    assert small.checkpoint_slots == 16
    none = split_arena(60 * GIB, page_size=16, page_bytes=page, slot_bytes=slot, max_running=128, checkpoint_bytes=0)
    assert (none.slots, none.checkpoint_slots) == (128, 0)
    assert none.pages * page > 50 * GIB


def test_arena_with_little_memory_runs_fewer_and_with_too_little_says_so():
    geometry = split_arena(GIB, page_size=16, page_bytes=1 << 18, slot_bytes=20 << 20, max_running=256)
    assert 1 <= geometry.slots - geometry.checkpoint_slots < 256
    assert geometry.pages * (1 << 18) >= GIB // 5
    with pytest.raises(ValueError, match="a state slot takes"):
        split_arena(30 << 20, page_size=16, page_bytes=1 << 18, slot_bytes=20 << 20, max_running=256)
    with pytest.raises(ValueError, match="at least 2 pages"):
        split_arena(1000, page_size=16, page_bytes=600, max_running=1)


def test_pages_that_take_no_memory_are_enough_for_every_slot():
    """A hybrid model cut to its first layers keeps states alone."""
    geometry = split_arena(
        1 << 20, page_size=16, page_bytes=0, slot_bytes=1 << 14, max_running=8, max_context=100, checkpoint_bytes=0
    )
    assert (geometry.slots, geometry.pages) == (8, 8 * 7)
    with pytest.raises(ValueError, match="a state slot takes 16,384"):
        split_arena(1 << 14, page_size=16, page_bytes=0, slot_bytes=1 << 14, max_running=8, max_context=100)


@pytest.mark.parametrize("pair", [0.0, 1e-4, 0.3])
@pytest.mark.parametrize("start", [0, 1000, 500_000])
def test_work_that_fits_is_all_that_does(pair, start):
    """Sizes are 2^n or 1.5 * 2^n, at least 64; the next one would be too much."""
    geometry = CacheGeometry(page_size=16, pages=400, token_flops=2.0, pair_flops=pair)
    work = Work(geometry, 8192)
    assert work.fitting(start, 10**6) == 10**6  # nobody waits
    work.begin(bounded=True)

    def cost(count: int, start: int = start) -> float:
        return count * (2 + pair * (start + count / 2))

    whole, count = cost(8192, 0), work.fitting(start, 10**6)
    assert count == 64 or cost(count) <= whole * (1 + 1e-9)
    assert cost(2 * count) > whole
    assert work.fitting(start, 50) == 50
    work.take(start, count)
    assert work.is_done == (cost(count) >= whole)
    work.begin(bounded=False)
    assert not work.is_done


def test_keys_depend_on_everything_before_and_on_nothing_after():
    one, other = KeyChain(CacheIdentity(), 2), KeyChain(CacheIdentity(), 2)
    one.extend(tokens(1, 2, 3, 4, 5))
    other.extend(tokens(1, 2, 9, 4, 7, 8))
    assert one.keys[0] == other.keys[0]
    assert one.keys[1] != other.keys[1]
    assert one.at(tokens(1, 2, 3, 4, 5), 5) == one.at(tokens(1, 2, 3, 4, 5, 6), 5)
    assert one.at(tokens(1, 2, 3, 4), 4) == one.keys[1]


def test_keys_tell_tenants_adapters_and_images_apart():
    prompt = tokens(7, 7, 7, 7)

    def keys(identity: CacheIdentity) -> list[bytes]:
        chain = KeyChain(identity, 2)
        chain.extend(prompt)
        return chain.keys

    plain = keys(CacheIdentity())
    assert keys(CacheIdentity(tenant="a"))[0] != plain[0]
    assert keys(CacheIdentity(adapter=1))[0] != plain[0]
    cat, dog = (keys(CacheIdentity(media=(Media(2, 2, name),))) for name in (b"cat", b"dog"))
    assert cat[0] == dog[0] == plain[0]
    assert len({cat[1], dog[1], plain[1]}) == 3


def test_a_request_takes_int32_only():
    with pytest.raises(TypeError, match="int64"):
        Request("r", np.asarray([1, 2]), SamplingParams())


def test_eviction_is_by_recency_when_values_are_equal_and_by_value_when_not():
    root = Node(b"", None, -1, 0, 1)
    nodes = [Node(bytes([index]), root, 0, index + 1, 1) for index in range(3)]
    queue = EvictionQueue(lambda node: True)
    for node, value in zip(nodes, (1.0, 1.0, 5.0), strict=True):
        queue.use(node, value)
        queue.offer(node)
    assert queue.take(below=1.0) is None
    assert queue.take() is nodes[0]
    queue.use(nodes[1], 1.0)  # used again, after the clock has moved
    queue.offer(nodes[1])
    late = Node(b"late", root, 0, 9, 1)
    queue.use(late, 0.5)
    queue.offer(late)
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [late, nodes[1], nodes[2], None]


def test_eviction_queue_does_not_grow_with_use():
    queue = EvictionQueue(lambda node: True)
    node = Node(b"", None, -1, 0, 1)
    for _ in range(10_000):
        queue.offer(node)
    assert len(queue._heap) < 3000


class Tree:
    """A prefix tree with its accounts, and requests reduced to what they leave behind."""

    def __init__(self, slots: int = 0) -> None:
        self.geometry = CacheGeometry(4, 20, slots, max(slots - 1, 0))
        self.pages, self.slots = Account("pages", 20), Account("slots", slots)
        self.metrics = Metrics()
        self.tree = PrefixTree(self.geometry, self.pages, self.slots, self.metrics)

    def leave(self, prompt: np.ndarray, checkpoint_at: int = 0, origin: Origin = Origin.REQUEST_END) -> list[int]:
        """Puts a prompt's pages into the tree, the last one partly filled; returns the pages."""
        chain = KeyChain(CacheIdentity(), 4)
        chain.extend(prompt)
        pages = self.pages.allocate(-(-len(prompt) // 4))
        parent = self.tree.node_before(chain, 0)
        nodes = self.tree.insert(parent, chain.keys, pages[: len(chain.keys)], 4) if chain.keys else [parent]
        if len(prompt) % 4:
            key = chain.at(prompt, len(prompt))
            nodes += self.tree.insert(nodes[-1], [key], pages[-1:], len(prompt) % 4)
        if checkpoint_at:
            node = [node for node in nodes if node.depth == (checkpoint_at - 1) // 4][-1]
            slot = self.slots.allocate(1)[0] if self.geometry.has_state else 0
            self.tree.attach(chain, prompt, checkpoint_at, node, slot, origin)
        self.pages.release(pages)
        self.tree.offer(nodes[-1])
        self.tree.check_integrity()
        return pages

    def match(self, prompt: np.ndarray):
        chain = KeyChain(CacheIdentity(), 4)
        chain.extend(prompt)
        return self.tree.match(chain, prompt, len(prompt) - 1)


def test_dense_match_shares_full_pages_and_copies_the_last():
    tree = Tree()
    pages = tree.leave(np.arange(10, dtype=np.int32), checkpoint_at=10)
    hit = tree.match(np.arange(12, dtype=np.int32))
    assert (hit.length, hit.pages, hit.source.page) == (10, pages[:2], pages[2])
    hit = tree.match(np.arange(8, dtype=np.int32))  # the last token must be run
    assert (hit.length, hit.pages, hit.source) == (4, pages[:1], None)
    assert tree.match(tokens(9, 9, 9, 9, 9)).length == 0


def test_hybrid_match_needs_a_checkpoint_and_reports_what_it_lacks():
    tree = Tree(slots=4)
    pages = tree.leave(np.arange(16, dtype=np.int32), checkpoint_at=6)
    hit = tree.match(np.arange(15, dtype=np.int32))
    assert (hit.length, hit.pages, hit.source.page, hit.matched) == (6, pages[:1], pages[1], 12)
    assert hit.checkpoint.slot == 1
    missed = tree.match(np.asarray([0, 1, 2, 3, 4, 9, 9, 9, 9], np.int32))
    assert (missed.length, missed.matched) == (0, 4)


def test_a_checkpoint_goes_with_its_page_and_a_page_without_its_checkpoint_stays():
    tree = Tree(slots=4)
    tree.leave(np.arange(8, dtype=np.int32), checkpoint_at=8)
    assert tree.tree.evict_slot()
    assert (tree.slots.free, tree.pages.free) == (4, 18)
    assert not tree.tree.evict_slot()
    tree.leave(np.arange(100, 106, dtype=np.int32), checkpoint_at=6)
    assert tree.tree.evict_slot()
    assert tree.pages.free == 17  # a partly filled page is of no use without a checkpoint
    tree.leave(np.arange(200, 208, dtype=np.int32), checkpoint_at=8)
    tree.tree.clear()
    assert (tree.slots.free, tree.pages.free) == (4, 20)


def test_eviction_takes_leaves_first_and_the_pinned_never():
    tree = Tree()
    pages = tree.leave(np.arange(16, dtype=np.int32))
    hit = tree.match(np.arange(9, dtype=np.int32))
    tree.tree.pin(hit)
    assert not tree.tree.evict_pages(20)
    assert tree.pages.free == 18
    assert tree.match(np.arange(16, dtype=np.int32)).pages == pages[:2]


def test_superseded_checkpoints_go_first_unless_they_mark_a_branch():
    tree = Tree(slots=4)
    for start, origin in ((0, Origin.REQUEST_END), (100, Origin.BRANCH), (200, Origin.REQUEST_END)):
        tree.leave(np.arange(start, start + 8, dtype=np.int32), 8, origin)
    checkpoints: list[Checkpoint] = list(tree.tree._checkpoints.values())
    tree.tree.supersede(checkpoints[1], readers=0)
    tree.tree.supersede(checkpoints[2], readers=0)
    assert tree.tree.evict_slot()
    assert list(tree.tree._checkpoints.values()) == checkpoints[:2]
    assert tree.tree.evict_slot()
    assert list(tree.tree._checkpoints.values()) == checkpoints[1:2]


def test_offline_share_is_a_token_bucket():
    share = OfflineShare(0.1, 100)
    for _ in range(10):
        share.settle(online_tokens=50, offline_tokens=0)
    assert share.tokens_ahead == 50
    assert share.overdue
    share.settle(0, 50)
    assert share.tokens_ahead == 5
    assert not share.overdue
    share.settle(0, 1000)
    assert share.credit == -100
    assert share.overspent
