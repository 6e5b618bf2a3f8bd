"""Says where, and by how much, a model departs from its reference: the same modules that serve, one by one."""

from firstlight.verify.findings import Finding, Findings
from firstlight.verify.run import Subject, verify

__all__ = ["Finding", "Findings", "Subject", "verify"]
