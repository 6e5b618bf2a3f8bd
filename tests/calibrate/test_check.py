"""What counts as the reference's answer."""

from __future__ import annotations

import pytest
import torch

from firstlight.calibrate.check import disagreement

F32, BF16 = torch.float32, torch.bfloat16


def test_equal_answers_agree():
    x = torch.randn(8, 16)
    assert disagreement("linear", [x.clone()], [x], F32, packed=False) is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 30.0])
def test_one_bad_token_is_found(wrong):
    expected = torch.randn(64, 16)
    actual = expected.clone()
    actual[17, 3] = wrong
    assert disagreement("linear", [actual], [expected], BF16, packed=False) is not None


def test_rounding_is_allowed_by_precision():
    expected = torch.randn(64, 256)
    actual = expected.bfloat16().float()
    assert disagreement("linear", [actual], [expected], BF16, packed=False) is None
    assert "allowed: 0.001" in str(disagreement("linear", [actual], [expected], F32, packed=False))


def test_nan_is_right_where_the_reference_has_it():
    expected = torch.randn(4, 8)
    expected[2] = float("nan")
    assert disagreement("linear", [expected.clone()], [expected], F32, packed=False) is None
    actual = expected.clone()
    actual[1] += 1
    assert disagreement("linear", [actual], [expected], F32, packed=False) is not None
    actual[1, 0] = float("nan")
    assert "NaN" in str(disagreement("linear", [actual], [expected], F32, packed=False))


def test_shapes_and_dtypes_must_agree():
    x = torch.randn(4, 8)
    assert "gives (4, 8) in float32" in str(disagreement("linear", [x], [x[:2]], F32, packed=False))
    assert "bfloat16" in str(disagreement("linear", [x.bfloat16()], [x], F32, packed=False))
    assert "gives 1 tensors" in str(disagreement("route", [x], [x, x], F32, packed=False))


def test_another_choice_of_experts_is_no_fault_of_few_tokens():
    expected = torch.randn(100, 32)
    actual = expected.clone()
    actual[3] += 0.5 * torch.randn(32)
    assert disagreement("moe", [actual], [expected], BF16, packed=False) is None
    assert disagreement("linear", [actual], [expected], BF16, packed=False) is not None
    actual[:20] += 0.5 * torch.randn(20, 32)
    assert disagreement("moe", [actual], [expected], BF16, packed=False) is not None


def test_integers_may_differ_in_few_tokens():
    expected = torch.arange(100)
    actual = expected.clone()
    actual[:5] += 1
    assert disagreement("sample", [actual], [expected], F32, packed=False) is None
    actual[:6] += 1
    assert "6 of 100" in str(disagreement("sample", [actual], [expected], F32, packed=False))
    assert disagreement("sample", [torch.tensor([1])], [torch.tensor([2])], F32, packed=False) is not None
