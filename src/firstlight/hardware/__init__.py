"""Descriptions of GPUs and CPUs, links, prices; detection; calibration tables. No torch, except in `detect`."""

from firstlight.hardware.description import CPU_GENERIC, GPUS, H200, Hardware
from firstlight.hardware.detect import detect

__all__ = ["CPU_GENERIC", "GPUS", "H200", "Hardware", "detect"]
