"""What stands between the projections of latent attention and the attention itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from firstlight.ops.meta import concatenate
from firstlight.ops.op import Op
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.rope import rope
from firstlight.ops.write_latent import write_latent


def body(
    parts: Any,
    q: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    angles: Tensor | None,
    latent_pages: Tensor,
    slot: Tensor,
    *,
    heads: int,
    nope: int,
    eps: float,
) -> Tensor:
    """Normalises the new tokens' latents, turns the rotary dimensions of queries and keys, and writes latents | keys.

    q [T, heads (N + R)], a head's N = nope plain dimensions first; kv [T, L + R], the latent first; kv_norm [L]; angles
    [T, R] as in `rope`, pairs interleaved, or None where nothing turns; latent_pages, slot: as in `write_latent`.
    Returns q [T, heads, N + R], its last R dimensions turned. Norm and rotation round as in `rms_norm` and `rope`.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; transformers `DeepseekV3Attention`.
    """
    width = kv_norm.shape[0]
    q = q.unflatten(-1, (heads, -1))
    key = kv[:, width:].unsqueeze(1)
    if angles is not None:
        q = concatenate((q[..., :nope], parts.rope(q[..., nope:], angles, interleaved=True)), dim=-1)
        key = parts.rope(key, angles, interleaved=True)
    latent = parts.rms_norm(kv[:, :width], kv_norm, eps=eps)
    parts.write_latent(latent, key.squeeze(1), latent_pages, slot)
    return q


def abstract(
    q: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    angles: Tensor | None,
    latent_pages: Tensor,
    slot: Tensor,
    *,
    heads: int,
    nope: int,
    eps: float,
) -> Tensor:
    """[T, heads, N + R] in q.dtype."""
    return q.new_empty((q.shape[0], heads, q.shape[1] // heads))


latent_prologue = Op(
    "latent_prologue",
    body,
    abstract=abstract,
    parts=(rms_norm, rope, write_latent),
    mutates={"latent_pages": "slot"},
)
