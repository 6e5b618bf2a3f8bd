"""Pools: a page or slot is one run of memory; views don't overlap; copies and poison touch what they name."""

from __future__ import annotations

import pytest
import torch

from firstlight.cache import CachePool, PagedSpec, SlotSpec, page_bytes, slot_bytes

SPECS = {
    "a": PagedSpec(2, 8, torch.bfloat16),
    "b": SlotSpec({"conv": ((6, 3), torch.bfloat16), "state": ((2, 4, 5), torch.float32)}),
    "c": PagedSpec(2, 8, torch.bfloat16),
    "d": SlotSpec({"conv": ((6, 3), torch.bfloat16), "state": ((2, 4, 5), torch.float32)}),
}


def pool(page_size=3):
    return CachePool(SPECS, pages=5, slots=4, page_size=page_size, device="cpu")


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_views_are_disjoint_and_cover_a_page(page_size):
    made = pool(page_size)
    values = 1
    for path in ("a", "c"):
        for name in "kv":
            view = made.views[path][name]
            assert view.shape == (5, page_size, 2, 8)
            view[2] = values
            values += 1
    assert [made.views[p][n][2].unique().tolist() for p in ("a", "c") for n in "kv"] == [[1.0], [2.0], [3.0], [4.0]]
    assert made.page_bytes == page_bytes(SPECS.values(), page_size) == 4 * page_size * 2 * 8 * 2
    assert (made.page_memory[1] == 0).all()
    assert (made.page_memory[3] == 0).all()


def test_slots_are_aligned_and_disjoint():
    made = pool()
    for i, (path, name) in enumerate((p, n) for p in ("b", "d") for n in ("conv", "state")):
        view = made.views[path][name]
        assert view.data_ptr() % 64 == made.slot_memory.data_ptr() % 64
        view[3] = i + 1
    assert made.views["b"]["conv"][3].unique().tolist() == [1.0]
    assert made.views["d"]["state"][3].unique().tolist() == [4.0]
    assert made.slot_bytes == slot_bytes(SPECS.values())


def test_copies_read_before_they_write():
    made = pool()
    for page in range(5):
        made.page_memory[page] = page
    made.copy_pages(torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert made.page_memory[:, 0].tolist() == [0, 2, 1, 3, 4]
    made.copy_slots(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))


def test_poison_is_nan_in_every_dtype():
    made = pool()
    made.poison(pages=[1], slots=[2])
    assert made.views["a"]["k"][1].isnan().all()
    assert made.views["b"]["state"][2].isnan().all()
    assert not made.views["a"]["k"][2].isnan().any()


def test_layers_of_one_pool_must_agree():
    with pytest.raises(ValueError, match="must have the same KV shape and dtype"):
        CachePool({**SPECS, "e": PagedSpec(4, 8, torch.bfloat16)}, pages=2, slots=2, page_size=4, device="cpu")
