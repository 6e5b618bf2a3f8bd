"""Some of the faults of benchmarks/mutations.py, of every sort: each is found where it is, and in the phases where it shows."""

from __future__ import annotations

import pytest
import torch
from faults import FAULTS, Fault, everywhere
from faults.subjects import FAMILIES, complaints, inject, judged, subject_of, tiny_config

from firstlight.verify.report import verdict

CHOSEN = {
    "qwen3_5_moe_text": (
        "decode: the newest key isn't seen",
        "second chunk: window of the convolution forgotten",
        "batch: a row reads its neighbour's state",
        "exported state is a token too old",
        "l2 norm: eps outside the root",
        "mrope: sections swapped",
        "MoE: two experts swapped",
        "a layer drops the residual",
        "layers run in the wrong order",
    ),
    "llama": (
        "rope: pairs are neighbours",
        "rope: scaling ignored",
        "attention in bfloat16",
        "positions wrap around at 256",
        "the last slot of each page is written one too early",
        "MLP: down projection transposed",
        "head: two rows swapped",
    ),
}
CASES = [(name, fault) for name, faults in CHOSEN.items() for fault in faults]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def named(name: str) -> Fault:
    return next(fault for fault in everywhere() if fault.name == name)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_found_and_placed(family: str, name: str) -> None:
    fault = named(name)
    injected = inject(family, fault)
    assert injected is not None
    subject, path = injected
    findings = judged(family, subject)
    assert complaints(fault, path, findings) == []
    assert path in verdict(subject, findings)[0]


def test_there_are_faults_enough_for_every_family() -> None:
    assert len(everywhere()) >= 80
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for family in FAMILIES:
        model = subject_of(tiny_config(family)).model
        assert sum(fault.place(model) is not None for fault in everywhere()) >= 30


@pytest.mark.parametrize(
    ("name", "blamed"),
    [
        ("attention in bfloat16", ["attention"]),
        ("k isn't normalised", ["gated_delta"]),
        ("softmax scale left out", []),
        ("MoE: one expert too few", []),
    ],
)
def test_the_op_is_blamed_only_if_it_departs_from_its_own_reference(name: str, blamed: list[str]) -> None:
    injected = inject("qwen3_next", named(name))
    assert injected is not None
    findings = judged("qwen3_next", injected[0])
    assert findings.ops
    wrong = {op.op for op in findings.ops if op.error > findings.tolerance.module}
    assert sorted(wrong) == blamed
    last = verdict(injected[0], findings)[-1]
    assert ("departs from the op's own reference" in last) == bool(blamed)
