"""The kernels of Gated DeltaNet compile for NVIDIA and AMD, fit their shared memory, and multiply on the matrix units. Before the
wait they read weights, and what was written before the step."""

from __future__ import annotations

import pytest
from interpreted.own_process import printed

PRODUCTS = {"matrices": ["bf16", "f16"], "transitions": ["bf16"], "states": ["bf16"]}


@pytest.mark.parametrize(
    ("backend", "architecture", "shared_kib"), [("cuda", "90", 227), ("hip", "gfx942", 64), ("hip", "gfx950", 160)]
)
def test_compiles(backend: str, architecture: str, shared_kib: int) -> None:
    kernels = {line["kernel"]: line for line in printed("compile_gated_delta.py", backend, architecture, timeout=250)}
    assert len(kernels) == 18
    for name, kernel in kernels.items():
        assert kernel["shared"] <= shared_kib * 1024, kernel
        base = name.removesuffix(" of bfloat16")
        early = backend == "cuda" and base.startswith(("norm", "decode"))
        above, below = kernel["early"]
        assert (above > 0) == early, f"{name}: {above} loads before the wait"
        assert not early or below > 0, f"{name}: all it reads is read before the wait"
        assert base == "fold" or kernel["products"] == PRODUCTS.get(base, []), kernel
