"""`verify`: the same weights in transformers and here, compared end to end, layer by layer and module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from firstlight.errors import FirstlightError
from firstlight.models import CausalModel
from firstlight.ops.observe import observed
from firstlight.verify.blame import Comparison, OpError
from firstlight.verify.candidate import Candidate
from firstlight.verify.compare import TOLERANCES, Tolerance
from firstlight.verify.findings import MODULE, WIRING, Findings
from firstlight.verify.reference import Record, Reference, full_precision
from firstlight.verify.tower import PATH, Images, reference_images, run_tower
from firstlight.verify.workload import IMAGE, Phase, Row, Sequence, make_phases, make_sequences
from firstlight.weights.stored import StoredTensor


@dataclass(frozen=True, slots=True)
class Subject:
    """What is verified: our model, bound for `candidate.BUCKETS` and loaded, and what it was made from.

    config: a config.json, its layers cut as the model's are. tensors: by the names that `published_names` gives.
    """

    model: CausalModel
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    @property
    def tolerance(self) -> Tolerance:
        """What the dtype of the activations allows."""
        return TOLERANCES[self.dtype]


@dataclass(frozen=True, slots=True)
class Answers:
    """The reference's records of every sequence, of the first on quiet inputs, and what its vision tower made of images."""

    sequences: list[Sequence]
    records: list[Record]
    quiet: Record
    images: Images | None

    def of(self, phase: Phase) -> list[Record]:
        """What a phase is compared with, by sequence."""
        return self.records if phase.whole_model else [self.quiet]


@full_precision()
def reference_answers(subject: Subject, progress: Callable[[str], None] = lambda text: None) -> Answers:
    """Run the reference. progress: called with what is being done."""
    progress("building the reference")
    reference = Reference(subject.config, subject.tensors, subject.device)
    sequences = make_sequences(subject.model.config.vocab_size, subject.model.position_rows, subject.seed)
    records: list[Record] = []
    quiet: Record = {}
    for i, sequence in enumerate(sequences):
        progress(f"reference: sequence {i + 1} of {len(sequences)}, {len(sequence)} tokens")
        record, calls = reference.run(sequence, quiet=i == 0)
        records.append(record)
        quiet = quiet or calls
    images = reference_images(reference.model, subject.model, subject.device, subject.seed)
    return Answers(sequences, records, quiet, images)


def verify(
    subject: Subject,
    answers: Answers | None = None,
    progress: Callable[[str], None] = lambda text: None,
    *,
    quick: bool = False,
) -> Findings:
    """Compare a model with its reference.

    answers: of `reference_answers`, if they are there already. progress: called with what is being done. quick: if a module
    is wrong alone, leave it at that; layers and the whole model, which are wrong then too, aren't run.
    Raises FirstlightError for a dtype without tolerances.
    """
    if subject.dtype not in TOLERANCES:
        raise FirstlightError(f"verify has no tolerances for {subject.dtype}; use float32, bfloat16 or float16")
    answers = answers or reference_answers(subject, progress)
    candidate = Candidate(subject.model, answers.sequences, subject.device, subject.dtype)
    findings = Findings(subject.tolerance)
    phases = make_phases(subject.model.position_rows)
    with torch.no_grad():
        if answers.images is not None:
            count = len(answers.images.embeddings)
            findings.add(MODULE, IMAGE, (Row(0, 0, count),), run_tower(subject.model, answers.images, subject.dtype))
        for phase in phases:
            progress(f"{phase.name}: modules")
            _judge_modules(candidate, phase, answers.of(phase), findings)
        for phase in phases:
            if phase.whole_model and not (quick and findings.faults()):
                progress(f"{phase.name}: layers and the whole model")
                _judge_layers(candidate, phase, answers.records, findings)
                _judge_whole(candidate, phase, answers.records, findings)
        faults = findings.faults()
        if faults and faults[0].kind == MODULE and faults[0].path != PATH:
            phase = next(phase for phase in phases if phase.name == faults[0].phase)
            findings.ops = _blame(candidate, phase, answers.of(phase), faults[0].path)
    return findings


def _judge_modules(candidate: Candidate, phase: Phase, records: list[Record], findings: Findings) -> None:
    """Every module on the reference's inputs, over a phase's steps."""
    candidate.reset()
    for i, rows in enumerate(phase.steps):
        for answer in candidate.run_modules(candidate.step(rows), rows, records):
            if i >= phase.first_judged:
                findings.add(MODULE, phase.name, rows, answer)


def _judge_layers(candidate: Candidate, phase: Phase, records: list[Record], findings: Findings) -> None:
    """Every layer on the reference's inputs, over a phase's steps."""
    candidate.reset()
    for i, rows in enumerate(phase.steps):
        for answer in candidate.run_layers(candidate.step(rows), rows, records):
            if i >= phase.first_judged:
                findings.add(WIRING, phase.name, rows, answer)


def _judge_whole(candidate: Candidate, phase: Phase, records: list[Record], findings: Findings) -> None:
    """The model end to end, over a phase's steps."""
    candidate.reset()
    suspect: dict[int, int] = {}
    for i, rows in enumerate(phase.steps):
        for answer in candidate.run_whole(candidate.step(rows), rows, records):
            if i >= phase.first_judged:
                findings.add_whole(phase.name, rows, answer, suspect)


def _blame(candidate: Candidate, phase: Phase, records: list[Record], path: str) -> list[OpError]:
    """The ops of a wrong module, each against its own reference, over a phase."""
    comparison = Comparison(candidate.model, path)
    candidate.reset()
    try:
        with observed(candidate.model, comparison.observer()):
            for rows in phase.steps:
                candidate.run_module(path, candidate.step(rows), rows, records)
    except Exception:  # the finding itself says what the module raised
        return []
    return list(comparison.errors.values())
