"""route against the routers of the model files, and its own rules for ties, groups and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from firstlight.ops.route import route


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_is_qwen3_moe(renormalise: bool, dtype: torch.dtype) -> None:
    config = Qwen3MoeConfig(hidden_size=32, num_experts=24, num_experts_per_tok=5, norm_topk_prob=renormalise)
    router = Qwen3MoeTopKRouter(config)
    router.weight.data = normal(24, 32).to(dtype)
    logits, scores, experts = router(normal(50, 32, seed=1).to(dtype))
    weights, chosen = route(logits, top_k=5, renormalise=renormalise)
    # In bfloat16 logits tie; which of the equals is chosen is ours to say, the weights are the same.
    torch.testing.assert_close(weights, scores)
    if dtype == torch.float32:
        assert torch.equal(chosen, experts.int())


@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 5), (24, 7)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_is_deepseek_v3(groups: tuple[int, int], renormalise: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=32,
        n_routed_experts=24,
        num_experts_per_tok=5,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    options: dict[str, Any] = {"top_k": 5, "scoring": "sigmoid", "renormalise": renormalise, "scale": 2.5}
    options |= {"groups": groups[0], "top_groups": groups[1]}
    logits, bias = normal(50, 24), normal(24, seed=2) * 0.3
    weights, chosen = route(logits, bias=bias, **options)
    if groups[0] == 24:  # The model file wants two experts in a group; with one, a group is its expert.
        kept = (logits.sigmoid() + bias).topk(7).indices
        assert (chosen.unsqueeze(-1) == kept.unsqueeze(1)).any(-1).all()
        return
    router = DeepseekV3TopkRouter(config)
    router.weight.data, router.e_score_correction_bias.data = torch.eye(24), bias
    router.hidden_dim = 24
    _, scores, experts = router(logits)
    order = scores.gather(1, experts.argsort()), chosen.argsort(1)
    assert torch.equal(chosen.gather(1, order[1]), experts.sort(1).values.int())
    torch.testing.assert_close(weights.gather(1, order[1]), scores.gather(1, experts.argsort(1)))


def test_bias_steers_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, chosen = route(
        logits, top_k=2, scoring="sigmoid", renormalise=False, bias=torch.tensor([0.0, 0.0, 0.0, 5.0])
    )
    assert chosen.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [3, 0]])


def test_the_lower_index_wins_a_tie() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0, 1.0]]).repeat(3, 1)
    assert route(logits, top_k=3, renormalise=True)[1].tolist() == [[1, 2, 3]] * 3
    grouped = route(torch.zeros(1, 8), top_k=4, renormalise=True, groups=4, top_groups=2)[1]
    assert grouped.tolist() == [[0, 1, 2, 3]]


def test_padding_is_routed_to_none_and_disturbs_nobody() -> None:
    logits = normal(6, 16)
    expected = route(logits[:4], top_k=3, renormalise=True)
    logits[4:] = float("nan")
    weights, chosen = route(logits, top_k=3, renormalise=True, live=torch.tensor([4], dtype=torch.int32))
    torch.testing.assert_close((weights[:4], chosen[:4]), expected, rtol=0, atol=0)
    assert (chosen[4:] == -1).all()
    assert (weights[4:] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3, "scoring": "relu"}, "'relu' is unknown; legal values: 'softmax', 'sigmoid'"),
        ({"top_k": 13}, "top_k=13 must be between 1 and the 12"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 3, "groups": 5}, "12 experts in 5 groups"),
        ({"top_k": 3, "groups": 4, "top_groups": 5}, "5 of them kept"),
        ({"top_k": 4, "groups": 4, "top_groups": 1}, "the 3 experts to choose from"),
    ],
)
def test_impossible_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route(normal(2, 12), renormalise=True, **options)
