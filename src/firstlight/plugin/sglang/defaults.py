"""Defaults of SGLang's options for models that we serve, through its registry of overrides by architecture.

It asks when its options are being completed, in the process that parses them; what the user has set stays.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import register_model_override

from firstlight.plugin.sglang.architectures import SERVED
from firstlight.plugin.sglang.options import objection
from firstlight.plugin.switches import active

logger = logging.getLogger(__name__)

TEXT_HYBRIDS = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Hybrids for which SGLang chooses no way of caching states by itself, because of their names."""


def install() -> None:
    """Add to SGLang's registry."""
    for architecture in active(SERVED):
        register_model_override(architecture)(defaults)


def defaults(options: Any, hf_config: Any) -> dict[str, Any]:
    """What to set, by name; nothing where SGLang's own class will serve. Options are SGLang's, not yet complete."""
    architecture = hf_config.architectures[0]
    images = architecture.endswith("ForConditionalGeneration")
    text = {"enable_multimodal": False} if images and options.enable_multimodal is None else {}
    if objection(options, hf_config, options.get_model_config().dtype, options.tp_size, **text):
        return {}
    if text:
        logger.warning(
            "Firstlight serves the text model of %s; for images say --enable-multimodal, and SGLang's own class serves",
            architecture,
        )
        options.override("firstlight", **text)  # what the registry sets are other fields
    chosen: dict[str, Any] = {}
    if architecture in TEXT_HYBRIDS and not options.disable_radix_cache:
        strategy = options.mamba_radix_cache_strategy
        if strategy == "auto":
            # States are exported while requests run, or handed over at their end, which needs steps one after another.
            exports = torch.cuda.is_available() and not options.disable_overlap_schedule
            strategy = "extra_buffer" if exports or (options.page_size or 1) > 1 else "no_buffer"
        chosen.update(uses_mamba_radix_cache=True, mamba_radix_cache_strategy=strategy)
        if strategy == "no_buffer":
            chosen["disable_overlap_schedule"] = True
    return chosen
