"""Norms and gates compile for NVIDIA and AMD, plain, packed and both."""

from __future__ import annotations

import pytest
from interpreted.own_process import printed


@pytest.mark.parametrize(("backend", "architecture"), [("cuda", "90"), ("hip", "gfx950")])
def test_compiles(backend: str, architecture: str) -> None:
    kernels = printed("compile_rows.py", backend, architecture)
    assert len(kernels) == 9
    for kernel in kernels:
        assert kernel["shared"] <= 16 << 10, kernel
        early = backend == "cuda" and "norm" in kernel["kernel"]
        above, below = kernel["early"]
        assert (above > 0) == early, f"{kernel['kernel']}: {above} loads before the wait"
        assert not early or below > 0, f"{kernel['kernel']}: all it reads is read before the wait"
        assert kernel["float8"] == (not kernel["kernel"].endswith("plain")), kernel
