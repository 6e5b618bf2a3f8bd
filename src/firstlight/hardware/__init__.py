"""Descriptions of GPUs and CPUs, links, prices; detection; calibration tables. No torch, except in `detect`."""

from firstlight.hardware.description import CPU_GENERIC, Hardware, Link
from firstlight.hardware.detect import detect
from firstlight.hardware.gpus import GPUS, H200

__all__ = ["CPU_GENERIC", "GPUS", "H200", "Hardware", "Link", "detect"]
