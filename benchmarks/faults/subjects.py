"""Tiny models of every family to verify, right or with a fault in them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from faults import Fault
from firstlight.hardware import detect
from firstlight.models import build_model
from firstlight.models.walk import bind_model
from firstlight.quant import scheme_of
from firstlight.verify.candidate import BUCKETS, PAGE_SIZE
from firstlight.verify.findings import Findings
from firstlight.verify.run import Answers, Subject, reference_answers, verify
from firstlight.weights.loader import load_weights
from firstlight.weights.random_weights import random_tensors

CPU = torch.device("cpu")
TINY_CONFIGS = Path(__file__).parents[2] / "tests" / "tiny_configs"
FAMILIES = (
    "llama",
    "smollm2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_text_tied",
    "qwen3_5_moe_text",
    "deepseek_v3",
)


def tiny_config(name: str) -> dict[str, Any]:
    """A tiny config by its file name."""
    config: dict[str, Any] = json.loads((TINY_CONFIGS / f"{name}.json").read_text())
    return config


def subject_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Subject:
    """A config with random weights, loaded."""
    model = build_model(config, dtype=dtype, scheme=scheme_of(config, dtype))
    _, layouts = bind_model(model, BUCKETS, detect("cpu"), page_size=PAGE_SIZE)
    tensors = random_tensors(model, 0, CPU)
    load_weights(model, tensors, CPU, layouts)
    return Subject(model, config, tensors, CPU, dtype)


@lru_cache(maxsize=2)
def answers_of(name: str) -> Answers:
    """The reference's answers for a tiny config: the same for every fault."""
    return reference_answers(subject_of(tiny_config(name)))


def inject(name: str, fault: Fault) -> tuple[Subject, str] | None:
    """A tiny model with a fault, and the path where it is; None if the family has no such place."""
    subject = subject_of(tiny_config(name))
    path = fault.place(subject.model)
    if path is None:
        return None
    with torch.no_grad():
        fault.change(subject.model, subject.model.get_submodule(path))
    return subject, path


def judged(name: str, subject: Subject) -> Findings:
    """The findings of a subject made from a tiny config."""
    return verify(subject, answers_of(name), quick=True)


def complaints(fault: Fault, path: str, findings: Findings) -> list[str]:
    """What is wrong with how a fault was found; empty if it was found where and when it should be."""
    faults = findings.faults()
    if not faults:
        return ["not found"]
    first = faults[0]
    wrong = {finding.phase for finding in faults}
    found = []
    if (first.path, first.kind) != (path, fault.kind):
        found.append(f"found in {first.path} ({first.kind})")
    if fault.wrong - wrong:
        found.append(f"not seen in {', '.join(sorted(fault.wrong - wrong))}")
    if fault.right & wrong:
        found.append(f"seen in {', '.join(sorted(fault.right & wrong))}")
    return found
