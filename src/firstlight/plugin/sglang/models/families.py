"""A class for each architecture, named as config.json names it."""

from __future__ import annotations

from sglang.srt.models.registry import import_model_classes

from firstlight.plugin.sglang import inactive
from firstlight.plugin.sglang.adapter import HostedCausalModel
from firstlight.plugin.sglang.architectures import SERVED
from firstlight.plugin.switches import active

if reason := inactive():
    raise ImportError(f"Firstlight is not active: {reason}")  # SGLang logs it, and its own classes serve


def _served(architecture: str) -> type[HostedCausalModel]:
    host_class = import_model_classes("sglang.srt.models", strict=False)[architecture]
    return type(architecture, (HostedCausalModel,), {"host_class": host_class, "__module__": __name__})


EntryClass = [_served(architecture) for architecture in active(SERVED)]
