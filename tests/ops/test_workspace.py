"""Providers that look at data take no more scratch memory than they declare.

The others are tried at real models' sizes in `tests/interpreted/test_workspace.py`.
"""

from __future__ import annotations

import pytest
import torch

from firstlight.hardware import CPU_GENERIC
from firstlight.models.activations import _LiveBytes
from firstlight.ops.op import REGISTRY, Call
from firstlight.step import Bucket

SLACK = 1 << 16
"""Bytes: index lists, rounding to whole allocations."""


def scratch(op, provider, *args, **kwargs):
    """(bytes taken beyond the result, bytes declared)."""
    found = REGISTRY[op].providers[provider]
    live = _LiveBytes()
    with torch.inference_mode(), live:
        result = found.run(*args, **kwargs)
    return live.peak - result.untyped_storage().nbytes(), found.workspace(Call(args, kwargs, Bucket(), CPU_GENERIC))


def paged(requests, query, context, page=16, heads=8, kv_heads=2, dim=64):
    columns = context // page
    pool = torch.randn(requests * columns + 1, 2, page, kv_heads, dim)
    table = 1 + torch.arange(requests * columns).int().view(requests, columns)
    start = torch.arange(requests + 1).int() * query
    q = torch.randn(requests * query, heads, dim)
    rest = (table, torch.arange(requests).int(), start, torch.full((requests,), context).int())
    return (q, pool[:, 0], pool[:, 1], *rest), {"scale": dim**-0.5, "max_query": query, "max_context": context}


@pytest.mark.parametrize(
    ("requests", "query", "context"), [(1, 1, 4096), (16, 1, 512), (4, 8, 512), (3, 256, 512), (1, 512, 512)]
)
def test_attention_over_gathered_pages(requests, query, context):
    args, kwargs = paged(requests, query, context)
    used, declared = scratch("attention", "torch_sdpa", *args, **kwargs)
    assert used <= declared + SLACK
    assert declared < 4 * used


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 0.9), (0, 0.999)])
def test_sampling(greedy, top_k, top_p):
    rows = 4
    number = torch.arange(rows)
    settings = (torch.full((rows,), 1.0), torch.full((rows,), top_k), torch.full((rows,), top_p), number, number)
    used, declared = scratch("sample", "torch_cpu", torch.randn(rows, 60_000), *settings, greedy=greedy)
    assert used <= declared + SLACK


def test_segments():
    q, k, v = (torch.randn(1024, 4, 64) for _ in "qkv")
    start = torch.tensor([0, 100, 600, 1024])
    used, declared = scratch("segment_attention", "torch_sdpa", q, k, v, start, scale=0.1, max_segment=500)
    assert used <= declared + SLACK
