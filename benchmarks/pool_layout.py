"""What block-major cache pools cost on a GPU: the same kernels over a pool whose pages and slots hold all layers, and over one
that holds a layer after the other. Pools of more than 32 GiB, requests scattered over all of it.

    PYTHONPATH=src:tests python benchmarks/pool_layout.py [--gib 36]

Shapes are those of Qwen3.5-35B-A3B: 10 layers of attention (2 KV heads of 256), 30 of Gated DeltaNet (32 x 128 x 128).
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from triton_mixers import gated_delta_inputs

from firstlight.calibrate.timing import seconds_of
from firstlight.ops.attention import triton_paged
from firstlight.ops.gated_delta import triton_decode

DEVICE = torch.device("cuda")
ATTENTION_LAYERS, DELTA_LAYERS = 10, 30
SIZES = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}


def attention(nbytes: int, page: int, block_major: bool, batches: tuple[int, ...], context: int = 4096) -> None:
    """Paged decode over every layer in turn."""
    kv_heads, dim = 2, 256
    each = ATTENTION_LAYERS * 2 * page * kv_heads * dim * 2
    pages = nbytes // each
    shape = (pages, ATTENTION_LAYERS, 2) if block_major else (ATTENTION_LAYERS, 2, pages)
    pool = torch.empty((*shape, page, kv_heads, dim), dtype=torch.bfloat16, device=DEVICE).normal_()
    if not block_major:
        pool = pool.permute(2, 0, 1, 3, 4, 5)
    columns = context // page
    scattered = 1 + torch.randperm(pages - 1, device=DEVICE)
    for batch in batches:
        table = scattered[: batch * columns].int().view(batch, columns)
        row, start = torch.arange(batch, device=DEVICE).int(), torch.arange(batch + 1, device=DEVICE).int()
        length = torch.full((batch,), context, device=DEVICE).int()
        q = torch.randn(batch, 16, dim, device=DEVICE, dtype=torch.bfloat16)
        calls = [
            partial(
                triton_paged.run, q, pool[:, i, 0], pool[:, i, 1], table, row, start, length,
                scale=dim**-0.5, max_query=1, max_context=context,
            )
            for i in range(ATTENTION_LAYERS)
        ]  # fmt: skip
        for call in calls:
            call()
        seconds = seconds_of(calls, DEVICE)
        moved = batch * context * 2 * kv_heads * dim * 2
        report(f"attention decode, B={batch}, pages of {page}", block_major, pool.numel() * 2, seconds, moved)


def delta(nbytes: int, block_major: bool, batches: tuple[int, ...]) -> None:
    """Gated DeltaNet decode over every layer in turn."""
    channels, heads = 8192, 32
    state, window = heads * 128 * 128, channels * 3
    slots = nbytes // (DELTA_LAYERS * (state * 4 + window * 2))
    shape = (slots, DELTA_LAYERS) if block_major else (DELTA_LAYERS, slots)
    states = torch.empty((*shape, heads, 128, 128), device=DEVICE).normal_().mul_(0.3)
    windows = torch.empty((*shape, channels, 3), device=DEVICE, dtype=torch.bfloat16).normal_()
    if not block_major:
        states, windows = states.transpose(0, 1), windows.transpose(0, 1)
    scattered = (1 + torch.randperm(slots - 1)).int()
    for batch in batches:
        ids = list(range(1, batch + 1))
        args, kwargs = gated_delta_inputs(
            [1] * batch, ids, ids, dtype=torch.bfloat16, device="cuda", padding=0, **SIZES
        )
        place = scattered[:batch].to(DEVICE)
        calls = [
            partial(
                triton_decode.run, *args[:8], windows[:, i], states[:, i], args[10], place, place, args[13], **kwargs
            )
            for i in range(DELTA_LAYERS)
        ]
        for call in calls:
            call()
        seconds = seconds_of(calls, DEVICE)
        report(f"gated_delta decode, B={batch}", block_major, states.numel() * 4, seconds, 2 * batch * state * 4)


def report(name: str, block_major: bool, nbytes: int, seconds: float, moved: float) -> None:
    """A line for a kernel over a pool."""
    layout = "block-major" if block_major else "layer-major"
    print(
        f"{name:40s} {layout} {nbytes / 2**30:5.1f} GiB {seconds * 1e6:9.2f} us {moved / seconds / 1e12:5.2f} TB/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=36, help="size of each pool")
    nbytes = int(parser.parse_args().gib * 2**30)
    with torch.inference_mode():
        for block_major in (True, False):
            for page in (16, 64):
                attention(nbytes, page, block_major, (1, 32, 128))
                torch.cuda.empty_cache()
            delta(nbytes, block_major, (1, 32, 128))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
