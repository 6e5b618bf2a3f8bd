"""What may follow the convolution."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu


def activate(x: Tensor, activation: str) -> Tensor:
    """silu(x) or x. Raises ValueError for another name."""
    if activation == "silu":
        return silu(x)
    if activation == "none":
        return x
    raise ValueError(f"causal_conv: activation {activation!r} is unknown; legal values: 'silu', 'none'")
