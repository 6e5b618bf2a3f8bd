"""Collectives over two real processes."""

from pathlib import Path

import pytest
import torch
from ops.examples_a import ALONE, normal
from torch import distributed

from firstlight.ops.all_gather import all_gather
from firstlight.ops.all_reduce import all_reduce
from firstlight.ops.op import NO_COST, Shape
from firstlight.parallel import Group

NO_STEP = Shape(0, 0, 0, 0)


def test_a_group_of_one_returns_its_argument() -> None:
    x = normal(3, 5)
    assert all_reduce(x, ALONE) is x
    assert all_gather(x, ALONE, dim=0) is x
    assert all_reduce.cost(NO_STEP, x, ALONE) == all_gather.cost(NO_STEP, x, ALONE, dim=0) == NO_COST


def test_a_described_group_cannot_run() -> None:
    group = Group("tp", 4, 1)
    with pytest.raises(ValueError, match="all_reduce over 4 tp ranks: no process group"):
        all_reduce(normal(3), group)
    with pytest.raises(ValueError, match="all_gather over 4 tp ranks: no process group"):
        all_gather(normal(3), group, dim=0)


def test_shapes_and_bytes_of_many_ranks() -> None:
    x = torch.empty(6, 10, device="meta")
    group = Group("tp", 4, 1)
    assert all_gather.abstract(x, group, dim=-1).shape == (6, 40)
    assert all_gather.cost(NO_STEP, x, group, dim=-1).sent == 240 * 3
    assert all_reduce.abstract(x, group).shape == (6, 10)
    assert all_reduce.cost(NO_STEP, x, group).sent == 2 * 240 * 3 / 4


def run_rank(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    group = Group("tp", 2, rank, distributed.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16):
        parts = [normal(3, 8, dtype=dtype, seed=part)[:, ::2] for part in range(2)]
        before = parts[rank].clone()
        assert torch.equal(all_reduce(parts[rank], group), parts[0] + parts[1])
        for dim in (0, 1, -1):
            assert torch.equal(all_gather(parts[rank], group, dim=dim), torch.cat(parts, dim=dim))
        assert torch.equal(parts[rank], before)
    distributed.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, args=(f"file://{tmp_path}/meeting",), nprocs=2)
