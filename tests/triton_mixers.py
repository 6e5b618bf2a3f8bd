"""Inputs of `gated_delta` for tests of its Triton providers, and the comparison with its float64 reference."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from ops.delta_inputs import export_rows, poisoned, starts, worst_row_error
from torch import Tensor

from firstlight.ops.gated_delta import gated_delta


def gated_delta_inputs(
    counts: list[int],
    state_in: list[int],
    state_out: list[int],
    *,
    exports: tuple[tuple[int, int, int], ...] = (),
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 32,
    value_dim: int = 16,
    width: int = 4,
    slots: int = 0,
    padding: int = 2,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs): views into one projection, NaN in padding tokens, in slot 0 and in slots that nobody reads."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    tokens = sum(counts) + padding
    channels, values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    projected = normal(tokens, channels + values).to(dtype)
    gates = normal(tokens, 2 * value_heads).to(dtype)
    projected[sum(counts) :], gates[sum(counts) :] = float("nan"), float("nan")
    slots = slots or 1 + max([0, *state_in, *state_out, *(slot for _, _, slot in exports)])
    conv_pool = poisoned(slots, channels, width - 1, dtype=dtype).to(device)
    state_pool = poisoned(slots, value_heads, value_dim, key_dim, dtype=state_dtype).to(device)
    for slot in set(state_in) - {0}:
        conv_pool[slot] = normal(channels, width - 1).to(dtype)
        state_pool[slot] = (normal(value_heads, value_dim, key_dim) * 0.3).to(state_dtype)
    indices = [starts(counts), torch.tensor(state_in).int(), torch.tensor(state_out).int(), export_rows(*exports)]
    args = (
        projected[:, :channels],
        projected[:, channels:],
        gates[:, value_heads:],
        gates[:, :value_heads],
        (normal(channels, width) * 0.5).to(dtype),
        normal(value_heads),
        normal(value_heads),
        (1 + 0.2 * normal(value_dim)).to(dtype),
        conv_pool,
        state_pool,
        *(index.to(device) for index in indices),
    )
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    return args, {**sizes, "eps": 1e-6, "max_query": max(counts)}


STATE_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 2**-8}
"""What a state's dtype adds to a provider's own error: a rounding, and for exports from inside a chunk one more at its start."""


def errors(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, exact: bool = True) -> dict[str, float]:
    """Worst relative errors of the output, the windows and the states; NaN must be where the reference has it.

    exact: compare with the reference in float64 on the same inputs, otherwise in their dtype. Either way states in bfloat16 are
    compared with states that aren't rounded when the step ends.
    """
    copies = tuple(x.clone() if i in (8, 9) else x for i, x in enumerate(args))
    expected_args = [x.clone() if i in (8, 9) else x for i, x in enumerate(args)]
    if exact:
        expected_args = [x.double() if x.is_floating_point() else x for x in expected_args]
    else:
        expected_args[9] = expected_args[9].float()
    expected = gated_delta.reference(*expected_args, **kwargs)
    actual = run(*copies, **kwargs)
    bound = inspect.signature(gated_delta.reference).bind(*args, **kwargs).arguments
    real = int(bound["query_start"][-1])
    found = {"out": worst_row_error(actual[:real], expected[:real])}
    for name, index in (("windows", 8), ("states", 9)):
        ours, theirs = copies[index][1:], expected_args[index][1:]
        assert torch.equal(ours.isnan(), theirs.isnan()), f"{name}: NaN elsewhere than in the reference's"
        if len(ours):
            found[name] = worst_row_error(ours.nan_to_num(0), theirs.nan_to_num(0))
    return found
