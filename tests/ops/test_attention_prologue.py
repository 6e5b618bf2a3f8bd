import pytest
import torch
from ops.examples_a import normal

from firstlight.ops.attention_prologue import attention_prologue
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.rope import rope

HEADS, KV_HEADS, DIM = 4, 2, 6


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_equals_the_steps_one_by_one(gated: bool, normed: bool) -> None:
    tokens = 5
    q, gate = normal(tokens, HEADS, DIM), normal(tokens, HEADS, DIM, seed=1)
    k, v = normal(tokens, KV_HEADS, DIM, seed=2), normal(tokens, KV_HEADS, DIM, seed=3)
    first = torch.cat((q, gate), dim=-1) if gated else q
    qkv = torch.cat((first.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
    norms = (normal(DIM), normal(DIM, seed=1)) if normed else (None, None)
    angles = normal(tokens, 4)
    pages = torch.zeros(3, 4, KV_HEADS, DIM), torch.zeros(3, 4, KV_HEADS, DIM)
    slot = torch.tensor([4, 5, 6, 7, 8])
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    out, out_gate = attention_prologue(
        qkv, *norms, angles, *pages, slot, **sizes, gated=gated, eps=1e-3, zero_centred=True
    )

    def expected(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return rope(x if norm is None else rms_norm(x, norm, eps=1e-3, zero_centred=True), angles)

    assert torch.equal(out, expected(q, norms[0]))
    assert torch.equal(pages[0].flatten(0, 1)[4:9], expected(k, norms[1]))
    assert torch.equal(pages[1].flatten(0, 1)[4:9], v)
    if gated:
        assert torch.equal(out_gate, gate.flatten(1))
    else:
        assert out_gate is None


def test_float8_pages_get_the_same_rows_rounded() -> None:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    qkv, norm, angles, slot = normal(5, 48) * 300, normal(DIM), normal(5, 4), torch.tensor([4, 11, 6, 7, 8])
    exact = torch.zeros(3, 4, KV_HEADS, DIM), torch.zeros(3, 4, KV_HEADS, DIM)
    float8 = [pool.to(torch.float8_e4m3fn) for pool in exact]
    expected, _ = attention_prologue(qkv, norm, norm, angles, *exact, slot, **sizes)
    q, _ = attention_prologue(qkv, norm, norm, angles, *float8, slot, **sizes)
    assert torch.equal(q, expected)
    assert exact[1].abs().max() > 448
    for ours, theirs in zip(float8, exact, strict=True):
        assert torch.equal(ours.float(), theirs.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_wrong_width_is_refused() -> None:
    pages = torch.zeros(3, 4, KV_HEADS, DIM)
    with pytest.raises(ValueError, match=r"qkv has 40 columns, but q \| k \| v take 24 \+ 12 \+ 12"):
        attention_prologue(
            normal(1, 40), None, None, normal(1, 4), pages, pages, torch.tensor([4]), heads=4, kv_heads=2, head_dim=6
        )
