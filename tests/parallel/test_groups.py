"""Collectives under the names that torch has for them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from firstlight.parallel.groups import gather_into

NAMES = ("all_gather_single", "all_gather_into_tensor")


@pytest.mark.parametrize("name", NAMES)
def test_gathering_finds_the_name_that_this_torch_has(name, monkeypatch):
    for other in NAMES:
        monkeypatch.delattr(dist, other, raising=False)
    monkeypatch.setattr(dist, name, lambda whole, part, group: whole.copy_(torch.cat([part, part + 1])), raising=False)
    whole = torch.zeros(4)
    gather_into(whole, torch.tensor([1.0, 2.0]), group=None)
    assert whole.tolist() == [1, 2, 2, 3]
