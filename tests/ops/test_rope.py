import pytest
import torch
from ops.examples_a import normal
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

from firstlight.ops.rope import rope
from firstlight.ops.rope_angles import rope_angles


def joined(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """transformers' doubled cos and sin [1, T, 2 F] as angles [T, 2 F]."""
    return torch.cat((cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]), dim=-1)


@pytest.mark.parametrize("positions", [torch.tensor([0, 1, 77, 131071]), torch.tensor([5], dtype=torch.int32)])
def test_angles_equal_llamas(positions: torch.Tensor) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    )
    reference = LlamaRotaryEmbedding(config)
    expected = joined(*reference(torch.empty(0), positions[None]))
    out = rope_angles(positions, reference.inv_freq, factor=reference.attention_scaling)
    assert reference.attention_scaling != 1
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sections", [(11, 11, 10), (3, 3, 2), (4, 3, 1), (5, 1, 2)])
def test_three_rows_of_positions_equal_qwens(sections: tuple[int, int, int]) -> None:
    parameters = {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": list(sections),
    }
    config = Qwen3_5TextConfig(head_dim=8 * sum(sections), rope_parameters=parameters)
    reference = Qwen3_5TextRotaryEmbedding(config)
    positions = torch.tensor([[0, 7, 7, 7, 30], [0, 7, 8, 9, 30], [0, 9, 8, 7, 30]])
    expected = joined(*reference(torch.empty(0), positions[:, None]))
    out = rope_angles(positions, reference.inv_freq, sections=sections)
    assert out.shape == (5, 2 * sum(sections))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_equal_rows_are_plain_positions() -> None:
    inv_freq, positions = normal(8).abs(), torch.tensor([3, 1, 4])
    three = rope_angles(positions.expand(3, 3), inv_freq, sections=(3, 3, 2))
    assert torch.equal(three, rope_angles(positions, inv_freq))
    assert torch.equal(three, rope_angles(positions, inv_freq, sections=(3, 3, 2)))


def test_three_rows_without_sections_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positions of shape \(3, 5\) need sections="):
        rope_angles(torch.zeros(3, 5), torch.ones(4))


@pytest.mark.parametrize("turned", [4, 16])
def test_rope_equals_transformers(turned: int) -> None:
    q, k = normal(5, 3, 16), normal(5, 1, 16)
    angles = rope_angles(torch.arange(5) * 9, normal(turned // 2).abs())
    cos, sin = angles.chunk(2, -1)
    doubled = (torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])
    expected = apply_rotary_pos_emb(q[None], k[None], *doubled, unsqueeze_dim=2)
    for x, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rope(x, angles), wanted[0], rtol=1e-6, atol=1e-6)


def test_interleaved_turns_neighbours() -> None:
    """transformers sorts the pairs into halves before turning them; ours leaves them where they are."""
    q, k = normal(5, 3, 16), normal(5, 1, 16)
    angles = rope_angles(torch.arange(5) * 9, normal(8).abs())
    cos, sin = angles.chunk(2, -1)
    doubled = (torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])
    expected, _ = apply_rotary_pos_emb_interleave(q[None], k[None], *doubled, unsqueeze_dim=2)
    out = rope(q, angles, interleaved=True)
    torch.testing.assert_close(torch.cat((out[..., 0::2], out[..., 1::2]), -1), expected[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_low_precision_is_rounded_once(dtype: torch.dtype, rtol: float, interleaved: bool) -> None:
    x, angles = normal(5, 3, 16, dtype=dtype), rope_angles(torch.arange(5), normal(6).abs())
    expected = rope(x.double(), angles.double(), interleaved=interleaved)
    out = rope(x, angles, interleaved=interleaved)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=1e-6)
    assert torch.equal(out[..., 12:], x[..., 12:])


def test_strided_heads_and_rotation_keeps_length() -> None:
    x = normal(5, 7, 32)[:, ::2, 16:]
    angles = rope_angles(torch.arange(5) * 1000, normal(8).abs())
    out = rope(x, angles)
    assert torch.equal(out, rope(x.contiguous(), angles))
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


def test_too_many_angles_are_refused() -> None:
    with pytest.raises(ValueError, match="turn 20 dimensions, but heads have 16"):
        rope(normal(5, 3, 16), normal(5, 20))
