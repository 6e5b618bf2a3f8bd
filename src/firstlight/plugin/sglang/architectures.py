"""The architectures that our classes serve, by their names in config.json."""

from __future__ import annotations

from firstlight.errors import FirstlightError
from firstlight.plugin.switches import switches

SERVED = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def active() -> tuple[str, ...]:
    """Those that FIRSTLIGHT_PLUGIN_SKIP doesn't name. Raises FirstlightError if it names others."""
    skip = switches().plugin_skip
    if unknown := sorted(set(skip) - set(SERVED)):
        raise FirstlightError(f"FIRSTLIGHT_PLUGIN_SKIP: {', '.join(unknown)}: we serve {', '.join(SERVED)}")
    return tuple(name for name in SERVED if name not in skip)
