"""Checks of the Triton providers round a step against their references, shared by the interpreter's and the GPU's tests."""

from __future__ import annotations

from typing import Any

import torch
from ops.examples_d import advance_example, step_example

from firstlight.ops.advance_rows import advance_rows
from firstlight.ops.rope_angles import rope_angles
from firstlight.ops.step_inputs import step_inputs


def check_step_inputs(device: str, step: tuple[Any, ...]) -> None:
    args, kwargs = step_example(*step, device=device)
    want = step_inputs(*args, **kwargs)
    got = step_inputs.providers["triton_fused"].run(*args, **kwargs)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def check_advance(device: str) -> None:
    want, _ = advance_example(device)
    advance_rows(*want)
    got, _ = advance_example(device)
    advance_rows.providers["triton_fused"].run(*got)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def check_angles(device: str, sections: tuple[int, int, int] | None) -> None:
    """Positions up to a quarter of a million: a fast cosine would be off by whole turns there."""
    shape = (3, 37) if sections else (37,)
    positions = torch.randint(0, 262_144, shape, generator=torch.Generator().manual_seed(1)).to(device)
    frequencies = (1.0 / 10_000_000 ** (torch.arange(0, 64, 2) / 64)).to(device)
    want = rope_angles(positions, frequencies, sections=sections, factor=1.5)
    got = rope_angles.providers["triton_fused"].run(positions, frequencies, sections=sections, factor=1.5)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
