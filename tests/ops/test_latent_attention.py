"""Latent attention against plain attention over widened keys and values, and what its cost says of the two ways."""

from __future__ import annotations

import pytest
import torch
from ops.examples_c import HEADS, LATENT, NOPE, TURNED, VALUE, attention_example, latent_batch

from firstlight.ops.attention import attention
from firstlight.ops.latent_attention import latent_attention
from firstlight.ops.op import Shape


def test_it_is_attention_over_widened_keys_and_values():
    (*batch, weight), kwargs = attention_example(False, False, True)()
    q, latent_pages, pages, row, query_start, length = batch
    widened = torch.einsum("hwl,psl->pshw", weight.view(HEADS, NOPE + VALUE, LATENT), latent_pages[:, :, 0, :LATENT])
    turned = latent_pages[..., LATENT:].expand(-1, -1, HEADS, -1)
    keys = torch.cat((widened[..., :NOPE], turned), dim=-1)
    values = torch.nn.functional.pad(
        widened[..., NOPE:], (0, NOPE + TURNED - VALUE)
    )  # attention wants one size for both
    want = attention(q, keys, values, pages, row, query_start, length, scale=0.3, max_query=3, max_context=9)
    got = latent_attention(*batch, weight, **kwargs)
    torch.testing.assert_close(got, want[..., :VALUE])


def test_only_selected_places_are_seen():
    (*batch, weight), kwargs = attention_example(False, False, True)()
    everything = torch.arange(9, dtype=torch.int32).expand(6, -1)
    want = latent_attention(*batch, weight, **kwargs)
    torch.testing.assert_close(latent_attention(*batch, weight, **kwargs, selected=everything), want)
    own = torch.tensor([[4], [6], [7], [8], [0], [1]], dtype=torch.int32)  # each token sees itself alone: its own value
    got = latent_attention(*batch, weight, **kwargs, selected=own)
    latent = latent_batch([1, 3, 2], [5, 9, 2])
    page = latent["pages"][latent["row"][1], 8 // 4]
    c = latent["latent_pages"][page, 0, 0, :LATENT]
    torch.testing.assert_close(got[3], torch.einsum("hvl,l->hv", weight.view(HEADS, -1, LATENT)[:, NOPE:], c))


@pytest.mark.parametrize("context", [64, 4096])
def test_absorbed_costs_less_in_decode_and_widened_in_prefill(context):
    args = [torch.empty_like(tensor, device="meta") for tensor in latent_batch([1], [8]).values()]
    args[0] = torch.empty(1, 128, 192, device="meta")
    args[1] = torch.empty(4, 16, 1, 576, device="meta")
    weight = torch.empty(128 * 256, 512, device="meta")
    fixed = {"nope": 128, "value_dim": 128, "scale": 1.0, "max_query": 1, "max_context": context}

    def flops(shape, absorbed):
        return sum(latent_attention.cost(shape, *args, weight, absorbed=absorbed, **fixed).flops.values())

    decode = Shape(1, 1, context, context)
    prefill = Shape(context, 1, context, context * (context + 1) / 2)
    assert flops(decode, True) < flops(decode, False)
    if context > 1000:
        assert flops(prefill, False) < flops(prefill, True)
