"""What the adapter does with a batch of SGLang's, without an engine."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from reference import tiny_config

from firstlight.plugin.core import HostBounds, HostedModel
from firstlight.step import SlotTable

REQUESTS, CONTEXT, SLOTS = 4, 256, 9


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An adapter whose tensors, and SGLang's, are on the meta device: whoever looks into one raises."""
    from firstlight.plugin.sglang import adapter

    bounds = HostBounds(tokens=64, requests=REQUESTS, context=CONTEXT, page_size=1)
    hosted = HostedModel(tiny_config("qwen3_5_moe_text"), dtype=torch.float32, device="cpu", bounds=bounds)
    for name in ("_zeros", "_no_rows"):
        setattr(hosted, name, getattr(hosted, name).to("meta"))
    rows = torch.arange(REQUESTS + 1, dtype=torch.int32)
    exports = torch.stack([rows[:-1], torch.ones_like(rows[:-1]), torch.zeros_like(rows[:-1])], 1)
    requests = SimpleNamespace(
        req_to_token=empty(REQUESTS + 1, CONTEXT, dtype=torch.int32),
        req_index_to_mamba_index_mapping=empty(REQUESTS + 1, dtype=torch.int32),
    )
    cache = object()
    made = SimpleNamespace(
        hosted=hosted,
        bounds=bounds,
        _pools=(requests, cache),
        _has_state=True,
        _starts=rows.to("meta"),
        _exports=exports.to("meta"),
    )
    made._slots = MethodType(adapter.HostedCausalModel._slots, made)
    made._step = MethodType(adapter.HostedCausalModel._step, made)
    backend = SimpleNamespace(req_to_token_pool=requests, token_to_kv_pool=cache)
    monkeypatch.setattr(adapter, "get_attn_backend", lambda: backend)
    monkeypatch.setattr(adapter, "get_server_args", lambda: SimpleNamespace(mamba_cache_chunk_size=64))
    return made


def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def batch(mode: str, requests: int, tokens: int, tracked: bool) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode[mode],
        req_pool_indices=empty(requests),
        seq_lens=empty(requests),
        seq_lens_cpu=torch.full((requests,), 20),
        out_cache_loc=empty(tokens),
        extend_start_loc=empty(requests, dtype=torch.int32),
        extend_seq_lens=empty(requests, dtype=torch.int32),
        extend_prefix_lens=empty(requests, dtype=torch.int32),
        extend_seq_lens_cpu=[tokens - requests + 1] + [1] * (requests - 1),
        mamba_track_mask=empty(requests, dtype=torch.bool) if tracked else None,
        mamba_track_indices=empty(requests),
        mamba_track_seqlens=empty(requests, dtype=torch.int32),
    )


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize(("mode", "tokens"), [("DECODE", 3), ("EXTEND", 30)])
def test_a_step_is_made_without_looking_into_the_device(model: Any, mode: str, tokens: int, tracked: bool) -> None:
    """So nothing waits for it, and a decode step can be captured."""
    step = model._step(empty(tokens), empty(tokens), batch(mode, 3, tokens, tracked))
    states = step.tables["state"]
    assert isinstance(states, SlotTable)
    assert states.exports.shape[0] == (3 if tracked else 0)
    assert (step.bucket.query == 1) == (mode == "DECODE")
    parts = [(part.kind, part.requests.stop) for part in step.parts]
    assert parts == [("decode" if mode == "DECODE" else "prefill", 3)]


def test_a_captured_step_keeps_its_addresses(model: Any) -> None:
    """What isn't SGLang's own memory is made in the step, and captured with it, or always the same."""
    first, second = (model._step(empty(2), empty(2), batch("DECODE", 2, 2, False)) for _ in range(2))
    assert first.query_start._base is second.query_start._base is model._starts
    assert first.log_length._base is second.log_length._base is model.hosted._zeros
