"""Descriptions of GPUs: complete, and consistent with each other."""

from __future__ import annotations

import pytest

from firstlight.hardware import GPUS


@pytest.mark.parametrize("name", GPUS)
def test_descriptions_are_complete(name):
    gpu = GPUS[name]
    assert gpu.source
    assert gpu.dollars_per_hour > 0
    assert gpu.memory > 50e9
    assert 2e12 < gpu.bandwidth < 10e12
    assert gpu.peak["float8_e4m3fn"] == pytest.approx(2 * gpu.peak["bfloat16"], rel=0.01)
    assert gpu.links[0].bandwidth > gpu.links[-1].bandwidth
    assert gpu.links[0].reach >= 8
    assert gpu.kind == ("hip" if gpu.architecture.startswith("gfx") else "cuda")


def test_names_differ():
    assert len({gpu.name for gpu in GPUS.values()}) == len(GPUS)
