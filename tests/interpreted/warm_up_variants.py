"""Which variants of kernels a hosted model's trial steps leave to be compiled when steps of a host come; nothing is compiled here.

    python warm_up_variants.py vllm | sglang KV_HEADS

Prints a line of JSON a step: {"step": name, "new": {kernel: how many variants of it no trial step launched}}.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import JITFunction

from firstlight.cache import PagedSpec
from firstlight.hardware import H200
from firstlight.ops import triton_launch
from firstlight.ops.attention import triton_paged
from firstlight.plugin import core
from firstlight.plugin.core import HostBounds, HostedModel
from firstlight.step import PageTable, SlotTable

CONFIG = Path(__file__).parents[1] / "tiny_configs" / "qwen3_5_moe_text.json"
SIZES = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "vocab_size": 64, "head_dim": 128,
    "num_attention_heads": 16, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8,
}  # fmt: skip
"""Of heads that the kernels for Hopper take."""

launched: set[Any] = set()


def kind(value: Any, parameter: Any) -> Any:
    """What Triton tells variants apart by, of one argument."""
    if parameter.is_constexpr:
        return repr(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
    if type(value) is int and not parameter.do_not_specialize:
        return 1 if value == 1 else value % 16 == 0
    return type(value).__name__


class Recorder:
    """In the place of a kernel's launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __call__(self, *values: Any, **named: Any) -> None:
        given = dict(zip(self.kernel.arg_names, values, strict=False)) | named
        arguments = [kind(given.pop(parameter.name, None), parameter) for parameter in self.kernel.params]
        launched.add((self.kernel.__name__, *arguments, *sorted(given.items())))


def record(kernel: Any, grid: Any) -> Recorder:
    """`kernel[grid]`."""
    return Recorder(kernel)


@dataclass(frozen=True)
class Host:
    """How a host's tables look. columns: of its table of pages. decode: whether decode rows beside prompts come as such."""

    page_size: int
    columns: int
    index: torch.dtype
    decode: bool
    exports: bool


HOSTS = {
    "vllm": Host(64, 514, torch.int32, decode=True, exports=False),
    "sglang": Host(1, 32772, torch.int64, decode=False, exports=True),
}
STEPS = {
    "a prompt": (0, [1000]),
    "a prompt of an odd length": (0, [1001]),
    "a prompt as long as a step": (0, [2048]),
    "five prompts": (0, [300, 200, 100, 77, 55]),
    "sixteen prompts": (0, [48] * 16),
    "decode rows and prompts": (2, [300, 200, 100]),
    "aligned decode rows and prompts": (4, [300, 200, 101]),
    "ten decode rows and a prompt": (10, [300]),
    "many decode rows and a prompt": (150, [700]),
    "100 prompts": (0, [18] * 100),
    "200 prompts": (0, [9] * 200),
    "a short prompt": (0, [5]),
    "the end of a prompt": (0, [27]),
    "a decode row": (1, []),
    "decode rows": (37, []),
}


CONTEXTS = (1, 300, 1500, 5000, 32768)
"""Bounds of a step's contexts, where its prompts aren't longer."""


def run(model: HostedModel, host: Host, decode: int, prompts: list[int], context: int) -> None:
    """A step as the host's adapter makes it."""
    counts = [1] * decode + prompts
    start = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    rows, tokens = len(counts), sum(counts)
    table = torch.zeros((rows + 1, host.columns), dtype=torch.int32)
    pages = PageTable(table, torch.arange(rows).to(host.index), torch.zeros(tokens, dtype=torch.int64), host.page_size)
    slot, exports = (
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros((rows if host.exports else 0, 3), dtype=torch.int32),
    )
    ids = torch.arange(tokens) % model.vocab_size
    step = model.step(
        ids=ids,
        positions=ids,
        query_start=start,
        length=torch.tensor(counts).to(host.index),
        tables={
            spec.group: pages if isinstance(spec, PagedSpec) else SlotTable(slot, slot.clone(), exports)
            for spec in model.caches().values()
        },
        live=start[-1:],
        decode_requests=decode if host.decode or not prompts else 0,
        max_query=max(counts),
        max_context=max([*counts, context]) if prompts else model.bounds.context,
    )
    model.logits(model.hidden(step)[:rows])


@torch.no_grad()
def main() -> None:
    host, kv_heads = HOSTS[sys.argv[1]], int(sys.argv[2])
    for kernels in (triton_launch.Kernel, JITFunction, GluonJITFunction):
        kernels.__getitem__ = record  # type: ignore[method-assign]
    triton_paged.multiprocessors = lambda device: 132  # type: ignore[assignment]
    core.detect = lambda device: replace(H200, features=H200.features | {"triton", "gluon"})
    config = json.loads(CONFIG.read_text()) | SIZES | {"num_key_value_heads": kv_heads}
    config["rope_parameters"]["mrope_section"] = [6, 6, 4]
    bounds = HostBounds(
        tokens=2048, requests=256, context=32768, page_size=host.page_size, exports=host.exports, index_dtype=host.index
    )
    model = HostedModel(config, dtype=torch.bfloat16, device="cpu", bounds=bounds)
    model.load_random()
    model.warm_up()
    for name, (decode, prompts) in STEPS.items():
        before = set(launched)
        for context in CONTEXTS:
            run(model, host, decode, prompts, context)
        print(json.dumps({"step": name, "new": Counter(variant[0] for variant in launched - before)}), flush=True)


if __name__ == "__main__":
    main()
