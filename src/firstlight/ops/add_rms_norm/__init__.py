"""What stands between two layers: sum over ranks, residual connection, norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from firstlight.ops.add import add
from firstlight.ops.add_rms_norm import triton_fused
from firstlight.ops.all_reduce import all_reduce
from firstlight.ops.op import Op
from firstlight.ops.rms_norm import rms_norm
from firstlight.parallel import Group
from firstlight.quant import Emission, Weight, empty_result


def body(
    parts: Any,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    zero_centred: bool = False,
    group: Group | None = None,
    emit: Emission | None = None,
) -> tuple[Weight, Tensor]:
    """new_residual = all_reduce(x) + residual; normed = rms_norm(new_residual).

    x [T, D]: what a layer computed, partial if `group` has several ranks; residual [T, D]; weight [D]; see `rms_norm` for
    eps and zero_centred. Returns (normed, new_residual), both [T, D] in x.dtype; with `emit`, normed as rms_norm gives it then. new_residual is
    rounded before the norm reads it. Neither input is written. Tolerance: that of rms_norm.
    """
    if group is not None and group.size > 1:
        x = parts.all_reduce(x, group)
    new_residual = parts.add(x, residual)
    asked = {} if emit is None else {"emit": emit}
    return parts.rms_norm(new_residual, weight, eps=eps, zero_centred=zero_centred, **asked), new_residual


def abstract(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    zero_centred: bool = False,
    group: Group | None = None,
    emit: Emission | None = None,
) -> tuple[Weight, Tensor]:
    return empty_result(x, x.shape, emit), x.new_empty(x.shape)


add_rms_norm = Op("add_rms_norm", body, abstract=abstract, parts=(all_reduce, add, rms_norm))
add_rms_norm.provide("triton_fused", triton_fused.run, when=triton_fused.when, rank=2, emits=True)
