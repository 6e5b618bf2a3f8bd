"""From answers to the verdict: order, wiring, toss-ups in routing."""

from __future__ import annotations

import math

import torch

from firstlight.verify.candidate import Answer
from firstlight.verify.compare import TOLERANCES
from firstlight.verify.findings import MODULE, WHOLE, WIRING, Findings
from firstlight.verify.workload import Row

ROWS = (Row(2, 10, 1, decode=True), Row(0, 5, 3))
GOOD = torch.ones(4, 8)
BAD = GOOD.clone()
BAD[2] = 2


def answer(path: str, ours: torch.Tensor, **more: object) -> Answer:
    return Answer(path, ((ours, GOOD),), **more)  # type: ignore[arg-type]


def new() -> Findings:
    return Findings(TOLERANCES[torch.float32])


def test_the_worst_row_is_placed() -> None:
    findings = new()
    findings.add(MODULE, "batch", ROWS, answer("layers.1.mlp", BAD))
    (fault,) = findings.faults()
    assert (fault.sequence, fault.token, fault.error) == (0, 6, 1.0)


def test_the_first_wrong_module_is_named_whatever_the_order_of_answers() -> None:
    findings = new()
    findings.add(WIRING, "prefill", ROWS, answer("layers.0", GOOD))
    findings.add(MODULE, "prefill", ROWS, answer("lm_head", BAD))
    findings.add(MODULE, "prefill", ROWS, answer("layers.10.mixer", BAD))
    findings.add(MODULE, "decode", ROWS, answer("layers.2.mlp", BAD))
    findings.add(MODULE, "prefill", ROWS, answer("layers.2.mlp", GOOD))
    findings.add(WIRING, "prefill", ROWS, answer("layers.2", BAD))
    findings.add_whole("prefill", ROWS, answer("layers.0", BAD), {})
    assert [(fault.path, fault.kind, fault.phase) for fault in findings.faults()] == [
        ("layers.2.mlp", MODULE, "decode")
    ]


def test_a_layer_whose_modules_agree_is_wired_wrongly() -> None:
    findings = new()
    findings.add(MODULE, "prefill", ROWS, answer("layers.1.mlp", GOOD))
    findings.add(WIRING, "prefill", ROWS, answer("layers.1", BAD))
    findings.add(MODULE, "prefill", ROWS, answer("layers.2.mixer", BAD))
    assert [(fault.path, fault.kind) for fault in findings.faults()] == [("layers.1", WIRING)]


def test_end_to_end_decides_only_if_all_else_agrees() -> None:
    findings = new()
    findings.add(MODULE, "prefill", ROWS, answer("layers.0.mixer", GOOD))
    findings.add_whole("prefill", ROWS, answer("lm_head", BAD), {})
    findings.add_whole("prefill", ROWS, answer("layers.1", BAD), {})
    assert [(fault.path, fault.kind) for fault in findings.faults()] == [("layers.1", WHOLE)]
    assert findings.worst == 1.0


def test_failures_and_wrong_shapes_are_faults() -> None:
    findings = new()
    findings.add(MODULE, "prefill", ROWS, Answer("norm", (), failure="TypeError: no"))
    findings.add(MODULE, "prefill", ROWS, Answer("embed_tokens", ((GOOD[:2], GOOD),)))
    (fault,) = findings.faults()
    assert fault.path == "embed_tokens"
    assert fault.error == math.inf
    assert "shapes differ" in fault.failure


def test_a_toss_up_excuses_its_own_row_only() -> None:
    clear = torch.ones(4)
    toss = clear.clone()
    toss[2] = 1e-7
    for gap, excused in ((toss, 1), (clear, 0)):
        findings = new()
        findings.add(MODULE, "prefill", ROWS, answer("layers.0.mlp", BAD, gap=gap))
        assert findings.all[0].excused == excused
        assert bool(findings.faults()) == (not excused)


def test_end_to_end_a_toss_up_excuses_later_tokens_of_its_sequence_but_not_the_median() -> None:
    toss = torch.ones(4)
    toss[1] = 1e-7  # sequence 0, token 5
    suspect: dict[int, int] = {}
    findings = new()
    findings.add_whole("prefill", ROWS, answer("layers.0", GOOD, gap=toss), suspect)
    findings.add_whole("prefill", ROWS, answer("layers.1", BAD), suspect)  # token 6
    assert suspect == {0: 5}
    assert not findings.faults()
    findings.add_whole("decode", (Row(0, 4, 1), Row(2, 1, 3)), answer("layers.1", BAD), suspect)  # another sequence
    assert [fault.phase for fault in findings.faults()] == ["decode"]

    everything = new()
    everything.add_whole("prefill", ROWS, answer("layers.1", 2 * GOOD), {0: 0, 2: 0})
    assert everything.faults()
