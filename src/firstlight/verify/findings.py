"""From answers to findings, and from findings to a verdict: which module is the first wrong one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from firstlight.verify.blame import OpError
from firstlight.verify.candidate import Answer
from firstlight.verify.compare import Tolerance, row_errors
from firstlight.verify.workload import Row

MODULE, WIRING, WHOLE = "module", "wiring", "whole"
"""Kinds of comparison: a module, or a whole layer, on the reference's inputs; the model end to end."""


@dataclass(slots=True)
class Finding:
    """The worst row of a module in a phase.

    error: its relative error, infinite for NaN and failures. sequence, token: where the row is. excused: rows beyond the
    tolerance whose experts the reference chose by a hair. failure: what the module raised, or how its shape is wrong.
    """

    path: str
    kind: str
    phase: str
    tolerance: float
    error: float = 0.0
    sequence: int = 0
    token: int = 0
    excused: int = 0
    failure: str = ""

    @property
    def ok(self) -> bool:
        """Whether the worst row is within the tolerance."""
        return self.error <= self.tolerance

    def take(self, errors: torch.Tensor, rows: tuple[Row, ...]) -> None:
        """Keep the worst of some rows' errors, [T]."""
        worst = int(errors.argmax())
        if float(errors[worst]) > self.error:
            self.error = float(errors[worst])
            self.sequence, self.token = places(rows)[worst]


def places(rows: tuple[Row, ...]) -> list[tuple[int, int]]:
    """(sequence, token) of each token of a step."""
    return [(row.sequence, row.start + i) for row in rows for i in range(row.count)]


@dataclass(slots=True)
class Findings:
    """All findings of a run, by (kind, path, phase). ops: of the first wrong module, against their own references."""

    tolerance: Tolerance
    ops: list[OpError] = field(default_factory=list)
    by_key: dict[tuple[str, str, str], Finding] = field(default_factory=dict)

    def finding(self, kind: str, path: str, phase: str) -> Finding:
        """The finding of a module in a phase, made when it is first asked for."""
        key = (kind, path, phase)
        if key not in self.by_key:
            limit = self.tolerance.whole if kind == WHOLE else self.tolerance.module
            self.by_key[key] = Finding(path, kind, phase, limit)
        return self.by_key[key]

    def add(self, kind: str, phase: str, rows: tuple[Row, ...], answer: Answer) -> None:
        """Judge what a module gave in a step on the reference's inputs; tokens with a toss-up in routing aren't."""
        finding = self.finding(kind, answer.path, phase)
        limit = self.tolerance.tie if kind == MODULE else max(self.tolerance.tie, self.tolerance.module)
        for errors in self._errors(finding, answer):
            if answer.gap is not None:
                tied = answer.gap <= limit
                finding.excused += int((tied & (errors > finding.tolerance)).sum())
                errors = errors.masked_fill(tied, 0.0)
            finding.take(errors, rows)

    def add_whole(self, phase: str, rows: tuple[Row, ...], answer: Answer, suspect: dict[int, int]) -> None:
        """Judge a step end to end. suspect: by sequence, the first token after a toss-up in routing, brought up to date.

        From that token on a row may differ and be right. The median row, which no toss-up explains, is judged as well.
        """
        finding = self.finding(WHOLE, answer.path, phase)
        where = places(rows)
        if answer.gap is not None:
            for (sequence, token), gap in zip(where, answer.gap.tolist(), strict=True):
                if gap <= self.tolerance.whole:
                    suspect[sequence] = min(token, suspect.get(sequence, token))
        after = torch.tensor([token >= suspect.get(sequence, math.inf) for sequence, token in where])
        for errors in self._errors(finding, answer):
            median = float(errors.median())
            beyond = after & (errors > finding.tolerance)
            finding.excused += int(beyond.sum())
            finding.take(errors.masked_fill(beyond, median if median > finding.tolerance else 0.0), rows)

    def _errors(self, finding: Finding, answer: Answer) -> list[torch.Tensor]:
        """Errors of each output's rows; a failure is noted and has none."""
        failure, errors = answer.failure, []
        for ours, reference in answer.pairs:
            try:
                errors.append(row_errors(ours, reference))
            except ValueError as error:
                failure = failure or str(error)
        if failure and not finding.failure:
            finding.failure, finding.error = failure, math.inf
        return errors

    @property
    def all(self) -> list[Finding]:
        """Every finding."""
        return list(self.by_key.values())

    @property
    def worst(self) -> float:
        """The largest relative error end to end."""
        return max((finding.error for finding in self.all if finding.kind == WHOLE), default=0.0)

    def faults(self) -> list[Finding]:
        """Findings beyond their tolerance that belong to the first wrong module; empty if all is well.

        On the reference's inputs a fault shows where it is, and in the wiring of its layer; so modules come in the order
        in which they run, a layer after its modules. Only if all of those agree is it the model's own wiring.
        """
        local = [finding for finding in self.all if finding.kind != WHOLE and not finding.ok]
        bad = local or [finding for finding in self.all if not finding.ok]
        if not bad:
            return []
        first = min(bad, key=_order)
        return [finding for finding in bad if finding.path == first.path and finding.kind == first.kind]


PLACES = ("visual", "embed_tokens", "rotary", "layers", "norm", "lm_head")
WITHIN_LAYER = ("input_layernorm", "mixer", "post_attention_layernorm", "mlp")


def _order(finding: Finding) -> tuple[int, int, int]:
    """When a module runs; a layer as a whole comes after its modules."""
    place, *rest = finding.path.split(".")
    layer = int(rest[0]) if rest else 0
    within = WITHIN_LAYER.index(rest[1]) if len(rest) > 1 else len(WITHIN_LAYER)
    return PLACES.index(place), layer, within
