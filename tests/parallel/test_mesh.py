"""Meshes are data: every rank of any size can be described here."""

from __future__ import annotations

import pytest

from firstlight.parallel import Group, Mesh, share


def test_rank_77_of_128():
    mesh = Mesh.of(77, pp=2, dp=4, cp=2, tp=8)
    assert (mesh.pp.index, mesh.dp.index, mesh.cp.index, mesh.tp.index) == (1, 0, 1, 5)
    assert mesh.size == 128


def test_ranks_are_all_different():
    places = {
        (m.pp.index, m.dp.index, m.cp.index, m.tp.index) for m in (Mesh.of(r, pp=2, dp=3, tp=4) for r in range(24))
    }
    assert len(places) == 24


def test_experts_lie_over_the_other_axes():
    assert [Mesh.of(rank, dp=2, tp=2, ep=4).ep.index for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="ep 3 must divide"):
        Mesh.of(0, tp=4, ep=3)


def test_a_rank_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match="rank 4 is not in a mesh of 4 ranks"):
        Mesh.of(4, tp=4)


def test_shares_split_units_or_replicate_them():
    assert [share(8, 2, Group("tp", 4, i), "heads").start for i in range(4)] == [0, 2, 4, 6]
    held = [share(4, 2, Group("tp", 4, i), "KV heads", replicate=True) for i in range(4)]
    assert [(part.start, part.stop, part.copies) for part in held] == [(0, 2, 2), (0, 2, 2), (2, 4, 2), (2, 4, 2)]
    with pytest.raises(
        ValueError, match=r"heads: 3 units of 2 can't be split evenly over 2 tp ranks; legal sizes: \[1, 3\]"
    ):
        share(6, 2, Group("tp", 2, 0), "heads")
    with pytest.raises(ValueError, match="7 elements are not a multiple of 2"):
        share(7, 2, Group("tp", 1, 0), "heads")
