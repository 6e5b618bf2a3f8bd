"""Prove `firstlight verify`: put one fault after another into every family, and see each found, where it is, and when.

    python benchmarks/mutations.py [FAMILY ...]

Prints a row for each fault and family, then `N passed, N failed`; exit status 1 if any failed. Models without a fault must
raise no alarm.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
from faults import everywhere
from faults.subjects import FAMILIES, complaints, inject, judged, subject_of, tiny_config

from firstlight.verify.report import figure


@dataclass
class Tally:
    """What came of a family: lines to print, checks passed and failed, and the faults that were found."""

    lines: list[str] = field(default_factory=list)
    passed: int = 0
    failed: int = 0
    found: set[str] = field(default_factory=set)

    def add(self, family: str, fault: str, outcome: str, ok: bool) -> None:
        """Note a check."""
        self.lines.append(f"{family:18} {fault:62} {outcome}")
        self.passed, self.failed = self.passed + ok, self.failed + (not ok)


def check_family(name: str) -> Tally:
    """The family without a fault, then with each that it has a place for."""
    torch.set_num_threads(1)
    tally = Tally()
    alarms = judged(name, subject_of(tiny_config(name))).faults()
    tally.add(name, "no fault", f"FALSE ALARM in {alarms[0].path}" if alarms else "no alarm", not alarms)
    for fault in everywhere():
        injected = inject(name, fault)
        if injected is None:
            continue
        subject, path = injected
        findings = judged(name, subject)
        wrong = complaints(fault, path, findings)
        if wrong:
            tally.add(name, fault.name, f"FAILED: {path}: {'; '.join(wrong)}", False)
        else:
            size = max(finding.error for finding in findings.faults())
            tally.add(name, fault.name, f"found in {path}: {figure(size)}", True)
            tally.found.add(fault.name)
    return tally


def main(families: tuple[str, ...]) -> int:
    """Check the families, some at a time; returns how many faults weren't found as they should be."""
    start = time.perf_counter()
    tallies = []
    with ProcessPoolExecutor(min(len(families), os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for tally in pool.map(check_family, families):
            print("\n".join(tally.lines), flush=True)
            tallies.append(tally)
    found = set().union(*(tally.found for tally in tallies))
    if missing := [fault.name for fault in everywhere() if fault.name not in found]:
        print(f"found in no family: {', '.join(missing)}")
    print(f"\n{len(found)} kinds of fault, {len(families)} families, {time.perf_counter() - start:.0f} s")
    failed = sum(tally.failed for tally in tallies)
    print(f"{sum(tally.passed for tally in tallies)} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in FAMILIES]
    if unknown:
        sys.exit(f"no such family: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    sys.exit(1 if main(tuple(sys.argv[1:]) or FAMILIES) else 0)
