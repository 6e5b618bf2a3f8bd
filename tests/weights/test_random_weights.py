"""Random weights are those of their seed and name, and of nothing else."""

from __future__ import annotations

import torch

from firstlight.config import LARGEST_SEED
from firstlight.weights.random_weights import RandomTensor


def drawn(name: str, seed: int) -> tuple[float, ...]:
    return tuple(RandomTensor(name, (8,), torch.float32, "linear", seed, "cpu").load().tolist())


def test_every_seed_and_name_has_weights_of_its_own():
    keys = [(name, seed) for name in ("a.weight", "b.weight") for seed in (0, 1, 2, LARGEST_SEED - 1, LARGEST_SEED)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert [drawn(*key) for key in keys] == [drawn(*key) for key in keys]
