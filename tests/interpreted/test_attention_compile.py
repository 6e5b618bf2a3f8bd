"""The kernels of attention compile for NVIDIA and AMD, fit their shared memory, and multiply on the matrix units."""

from __future__ import annotations

import pytest
from interpreted.own_process import printed

from firstlight.hardware.detect import gluon_is_known


@pytest.mark.parametrize(
    ("backend", "architecture", "shared_kib"), [("cuda", "90", 227), ("hip", "gfx942", 64), ("hip", "gfx950", 160)]
)
def test_compiles(backend: str, architecture: str, shared_kib: int) -> None:
    kernels = {line["kernel"]: line for line in printed("compile_attention.py", backend, architecture)}
    assert len(kernels) == {"90": 14 if gluon_is_known() else 11, "gfx942": 7, "gfx950": 11}[architecture]
    for name, kernel in kernels.items():
        assert kernel["shared"] <= shared_kib * 1024, kernel
        if name.startswith("prefill") and "float32" not in name:
            assert kernel["products"] == ["bf16"], kernel
        if name.startswith("hopper"):
            assert kernel["products"] == ["f16" if name.endswith("128") else "bf16"], kernel
            assert kernel["transfers"] == ["4d"], kernel
            assert kernel["spilled"] == 0, kernel
