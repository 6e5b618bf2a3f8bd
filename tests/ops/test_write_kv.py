import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.write_kv import write_kv


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_writes_only_the_named_rows(size: int, dtype: torch.dtype) -> None:
    k, v = normal(3, 2, 5), normal(3, 2, 5, seed=1)
    k_pages = normal(4, size, 2, 5, seed=2)
    v_pages = k_pages.clone()
    before = k_pages.clone()
    slots = [size, 3 * size, 4 * size - 1] if size > 1 else [1, 2, 3]
    write_kv(k, v, k_pages, v_pages, torch.tensor(slots, dtype=dtype))
    for pages, rows in ((k_pages, k), (v_pages, v)):
        expected = before.clone().flatten(0, 1)
        expected[slots] = rows
        assert torch.equal(pages.flatten(0, 1), expected)


def test_null_slots_reach_page_0_alone() -> None:
    pools = torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 5)
    write_kv(torch.full((3, 2, 5), torch.nan), torch.full((3, 2, 5), torch.nan), *pools, torch.tensor([0, 0, -1]))
    for pool in pools:
        assert torch.equal(pool[1:], torch.zeros(2, 4, 2, 5))


def test_float8_pages_hold_what_they_can() -> None:
    """Beyond the largest number is the largest number; NaN shows."""
    arena = torch.zeros(3, 2, 2, 4, 1, 5, dtype=torch.float8_e4m3fn)  # [pages, layers, k or v, page size, KV, D]
    k = torch.tensor([[[0.3, -500.0, 1e30, -torch.inf, torch.nan]]])
    for dtype in (torch.float32, torch.bfloat16):
        write_kv(k.to(dtype), -k.to(dtype), arena[:, 1, 0], arena[:, 1, 1], torch.tensor([9]))
        stored = torch.tensor([0.3125, -448.0, 448.0, -448.0, torch.nan])
        assert torch.equal(arena[2, 1, 0, 1, 0].float().nan_to_num(7), stored.nan_to_num(7))
        assert torch.equal(arena[2, 1, 1, 1, 0].float().nan_to_num(7), (-stored).nan_to_num(7))
        arena[2, 1, :, 1] = 0
        assert not arena.float().any()


def test_block_major_pools_and_other_dtypes() -> None:
    arena = torch.zeros(3, 2, 2, 4, 2, 5, dtype=torch.bfloat16)  # [pages, layers, k or v, page size, KV, D]
    k, v = normal(1, 2, 5), normal(1, 2, 5, seed=1)
    write_kv(k, v, arena[:, 1, 0], arena[:, 1, 1], torch.tensor([9]))
    assert torch.equal(arena[2, 1, 0, 1], k[0].bfloat16())
    assert torch.equal(arena[2, 1, 1, 1], v[0].bfloat16())
    arena[2, 1, :, 1] = 0
    assert not arena.any()
