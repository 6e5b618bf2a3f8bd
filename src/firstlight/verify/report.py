"""Findings for people (a table and a verdict) and for programs (JSON)."""

from __future__ import annotations

import math
from typing import Any

from rich.markup import escape
from rich.table import Table

from firstlight.models.config import LINEAR_ATTENTION
from firstlight.verify.findings import MODULE, WHOLE, WIRING, Finding, Findings
from firstlight.verify.run import Subject

HEAD = ("norm", "lm_head")


def summary_table(subject: Subject, findings: Findings) -> Table:
    """A row for each layer: its worst module on the reference's inputs, and the residual stream behind it."""
    table = Table("layer", "module", "phase", "error", "end to end", "verdict", box=None, pad_edge=False)
    for place, members in _by_layer(findings).items():
        local = max((m for m in members if m.kind != WHOLE), key=_severity)
        whole = max((m for m in members if m.kind == WHOLE), key=_severity, default=None)
        ok = all(member.ok for member in members)
        table.add_row(
            _layer_name(subject, place),
            _module_name(local),
            local.phase,
            figure(local.error),
            "" if whole is None else figure(whole.error),
            _verdict(ok),
        )
    return table


def full_table(findings: Findings) -> Table:
    """A row for each module and phase."""
    table = Table("module", "compared", "phase", "worst row", "error", "tolerance", "verdict", box=None, pad_edge=False)
    for finding in findings.all:
        table.add_row(
            finding.path,
            {MODULE: "alone", WIRING: "layer", WHOLE: "end to end"}[finding.kind],
            finding.phase,
            f"sequence {finding.sequence}, token {finding.token}",
            figure(finding.error),
            figure(finding.tolerance),
            _verdict(finding.ok) + (f" ({finding.excused} routing toss-ups)" if finding.excused else ""),
        )
    return table


def verdict(subject: Subject, findings: Findings) -> list[str]:
    """What it comes to, in a few lines without markup; the first names the first wrong module."""
    faults = findings.faults()
    if not faults:
        excused = sum(finding.excused for finding in findings.all)
        lines = [f"OK: every module agrees with transformers; worst relative error end to end {figure(findings.worst)}"]
        if excused:
            rows = "1 row differs" if excused == 1 else f"{excused} rows differ"
            lines.append(
                f"{rows} because two experts' logits are nearer than {figure(findings.tolerance.tie)}; "
                "either choice is right"
            )
        return lines
    worst = max(faults, key=_severity)
    kind = type(subject.model.get_submodule(worst.path)).__name__
    wrong = [finding.phase for finding in faults]
    seen = [finding.phase for finding in findings.all if (finding.path, finding.kind) == (worst.path, worst.kind)]
    right = [phase for phase in seen if phase not in wrong]
    what = {
        MODULE: f"{worst.path} ({kind}) is the first wrong module",
        WIRING: f"{worst.path} ({kind}) is wired wrongly: its modules agree with transformers, the layer doesn't",
        WHOLE: f"the model is wrong from {worst.path} on, though each module and layer agrees on transformers' own inputs",
    }[worst.kind]
    lines = [f"FAULT: {what}", f"wrong in: {', '.join(wrong)}" + (f"; right in: {', '.join(right)}" if right else "")]
    if worst.failure:
        return [*lines, f"in {worst.phase}: {worst.failure}"]
    where = f"sequence {worst.sequence}, token {worst.token}"
    errors = f"relative error {figure(worst.error)}, tolerance {figure(worst.tolerance)}"
    return [*lines, f"worst row: {where} in {worst.phase}: {errors}", *_blamed(findings)]


def _blamed(findings: Findings) -> list[str]:
    """Which ops of the first wrong module differ from their own references."""
    if not findings.ops:
        return []
    wrong = [op for op in findings.ops if op.error > findings.tolerance.module]
    if not wrong:
        return ["each op that it calls agrees with the op's own reference: look at its weights, arguments and wiring"]
    return [
        f"{op.op} at {op.site} ({op.provider}) departs from the op's own reference by {figure(op.error)}"
        for op in wrong
    ]


def as_json(name: str, subject: Subject, findings: Findings) -> dict[str, Any]:
    """Everything, as JSON values; an error that isn't finite is null."""
    import transformers

    faults = findings.faults()
    return {
        "model": name,
        "reference": f"transformers {transformers.__version__}, float32",
        "device": str(subject.device),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "layers": subject.model.config.num_hidden_layers,
        "ok": not faults,
        "worst_end_to_end": _number(findings.worst),
        "verdict": verdict(subject, findings),
        "first_fault": _finding_json(max(faults, key=_severity)) if faults else None,
        "ops_of_first_fault": [
            {"site": op.site, "op": op.op, "provider": op.provider, "error": _number(op.error)} for op in findings.ops
        ],
        "findings": [_finding_json(finding) for finding in findings.all],
    }


def figure(value: float) -> str:
    """An error with two digits."""
    return "not finite" if math.isinf(value) else f"{value:.1e}"


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "module": finding.path,
        "compared": finding.kind,
        "phase": finding.phase,
        "error": _number(finding.error),
        "tolerance": finding.tolerance,
        "sequence": finding.sequence,
        "token": finding.token,
        "excused": finding.excused,
        "failure": finding.failure or None,
        "ok": finding.ok,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _severity(finding: Finding) -> float:
    return finding.error / finding.tolerance


def _verdict(ok: bool) -> str:
    return "[green]ok[/green]" if ok else "[red]FAULT[/red]"


def _by_layer(findings: Findings) -> dict[str, list[Finding]]:
    places: dict[str, list[Finding]] = {}
    for finding in findings.all:
        parts = finding.path.split(".")
        places.setdefault(".".join(parts[:2]) if parts[0] == "layers" else finding.path, []).append(finding)
    return {key: places[key] for key in sorted(places, key=lambda key: key in HEAD)}


def _layer_name(subject: Subject, place: str) -> str:
    if not place.startswith("layers."):
        return place
    index = int(place.split(".")[1])
    linear = subject.model.config.layer_types[index] == LINEAR_ATTENTION
    return f"{index} ({'linear' if linear else 'full'} attention)"


def _module_name(finding: Finding) -> str:
    return "the whole layer" if finding.kind == WIRING else escape(finding.path.split(".")[-1])
