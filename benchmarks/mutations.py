"""Prove `firstlight verify`: put one fault after another into every family, and see each found, where it is, and when.

    python benchmarks/mutations.py [FAMILY ...]

Prints a row for each fault and family, then `N passed, N failed`; exit status 1 if any failed. Models without a fault must
raise no alarm.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from reference import FAMILIES, tiny_config
from verify.faults import everywhere
from verify.subjects import complaints, inject, judged, subject_of

from firstlight.verify.report import figure


def main(families: tuple[str, ...]) -> int:
    """Run all faults over the families; returns how many weren't found as they should be."""
    torch.set_num_threads(1)
    passed = failed = 0
    found: dict[str, int] = {}
    start = time.perf_counter()
    for name in families:
        faults = judged(name, subject_of(tiny_config(name))).faults()
        passed, failed = passed + (not faults), failed + bool(faults)
        print(f"{name:20} {'no fault':62} {'ok' if not faults else f'FALSE ALARM in {faults[0].path}'}", flush=True)
        for fault in everywhere():
            injected = inject(name, fault)
            if injected is None:
                continue
            subject, path = injected
            findings = judged(name, subject)
            wrong = complaints(fault, path, findings)
            passed, failed = passed + (not wrong), failed + bool(wrong)
            found[fault.name] = found.get(fault.name, 0) + (not wrong)
            size = max((finding.error for finding in findings.faults()), default=0.0)
            verdict = f"found in {path}: {figure(size)}" if not wrong else f"FAILED: {path}: {'; '.join(wrong)}"
            print(f"{name:20} {fault.name:62} {verdict}", flush=True)
    missing = [fault.name for fault in everywhere() if fault.name not in found]
    if missing:
        print(f"no family has a place for: {', '.join(missing)}")
    print(f"\n{len(found)} kinds of fault over {len(families)} families in {time.perf_counter() - start:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in FAMILIES]
    if unknown:
        sys.exit(f"no such family: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    sys.exit(1 if main(tuple(sys.argv[1:]) or FAMILIES) else 0)
