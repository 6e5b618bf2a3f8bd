"""Example inputs of the ops round a step: what it reads of the table of requests, and what it leaves there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def request_table(rows: int = 7, columns: int = 6, page_size: int = 4, device: str = "cpu") -> dict[str, torch.Tensor]:
    """A table whose row 0 belongs to nobody; every other row has pages of its own."""
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, (columns - 2) * page_size, (rows,), generator=generator)
    pages = torch.randperm(1000, generator=generator)[: rows * columns].view(rows, columns).int() + 1
    pages[0] = 0
    table = {
        "length": length,
        "last_token": torch.randint(0, 500, (rows,), generator=generator),
        "position_delta": torch.randint(-3, 3, (rows,), generator=generator),
        "pages": pages,
    }
    return {name: tensor.to(device) for name, tensor in table.items()}


def step_example(
    rows: list[int],
    counts: list[int],
    decodes: int,
    position_rows: int = 1,
    spare: int = 0,
    device: str = "cpu",
) -> Inputs:
    """Rows with so many new tokens; the first `decodes` run their last token, the others tokens of a prompt. spare: tokens
    of padding behind the last row."""
    table = request_table(device=device)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tokens = sum(counts) + spare
    prompt = torch.arange(100, 100 + tokens - decodes, dtype=torch.int32)
    args = (torch.tensor(rows, dtype=torch.int32).to(device), starts.to(device), *table.values(), prompt.to(device))
    return args, {"tokens": tokens, "page_size": 4, "position_rows": position_rows}


def advance_example(device: str = "cpu") -> Inputs:
    table = request_table(device=device)
    rows = torch.tensor([3, 0, 5, 6], dtype=torch.int32, device=device)
    new_length = torch.tensor([9, 8, 7, 6], dtype=torch.int32, device=device)
    sampling, drawn = torch.tensor([0, 1, 3], device=device), torch.tensor([41, 42, 43], device=device)
    return (table["length"], table["last_token"], rows, new_length, sampling, drawn), {}


STEPS: dict[str, tuple[int | list[int], ...]] = {
    "decode": ([4, 1, 6], [1, 1, 1], 3, 1),
    "padded decode": ([4, 1, 0, 0], [1, 1, 1, 1], 4, 3),
    "mixed": ([2, 5, 3, 1], [1, 1, 5, 3], 2, 1),
    "prefill": ([6, 2], [7, 1], 0, 3),
    "one": ([2], [1], 1, 1),
    "padding behind a full row": ([6, 2], [7, 8], 0, 1, 20),
}

EXAMPLES: dict[str, list[Callable[[], Inputs]]] = {
    "step_inputs": [lambda s=s: step_example(*s) for s in STEPS.values()],
    "advance_rows": [advance_example],
}
