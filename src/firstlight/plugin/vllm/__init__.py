"""Firstlight's models inside vLLM (entry point `vllm.general_plugins`), and all that we ask of it.

vLLM keeps scheduling, paging, prefix caching, sampling and its API. Weights, layers, attention, delta rule, experts and
quantised products are ours; the memory of KV pages and states is vLLM's, in its layout.

What we use of vLLM, and where:

| of vLLM | for | in |
| --- | --- | --- |
| entry point `vllm.general_plugins` | `register`, once in every process | here |
| `ModelRegistry.register_model` | two names of our own, `FirstlightForCausalLM` and `FirstlightHybridForCausalLM` | here |
| `MODELS_CONFIG_MAP[architecture]` | a hook on the finished configuration, which decides who serves | `takeover` |
| model interface: `load_weights`, `forward`, `compute_logits` | the model; `IsHybrid`, `SupportsMRoPE`: what it is | `models` |
| `AttentionLayerBase`, `MambaBase` in `static_forward_context` | memory of KV pages and of states, one layer each | `memory` |
| `AttentionBackend`, `AttentionMetadataBuilder` | page size; block tables and lengths of a step | `memory` |
| `get_forward_context().attn_metadata` | what the builders noted, read once a step | `models` |
| `get_tp_group().device_group` | the collectives of our layers | `models` |

Nothing of vLLM is patched: only the two registries change, and both are meant to be added to. vLLM's own classes stay
registered. When a configuration is complete, our hook looks at all of its options (`takeover.objection`): if we serve every one
of them, the model's architecture becomes ours; if not, vLLM's own class serves, and one line of the log says why.

States in "align" mode of prefix caching: vLLM itself copies a state to the block that a request goes on in, before the step.
So a state is always read and written in place, in the block of the request's last token, and no slot that one request writes
is read by another. A request without computed tokens starts from zeros, whatever its block holds.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from firstlight.plugin.switches import switches, without_effect

VERSIONS = ("0.26", "0.32")
"""Releases, by their first two numbers, in which our models have been run."""

logger = logging.getLogger("vllm.firstlight")  # below vLLM's own, so that its settings hold


def register() -> None:
    """Add our models to vLLM's registries; does so once, however often it is called. Raises what `switches` does."""
    if ignored := without_effect():
        logger.warning("Firstlight: %s", ignored)
    if switches().plugin == "off":
        logger.info("Firstlight is off (FIRSTLIGHT_PLUGIN=off)")
        return
    if reason := unsupported_version(vllm_version()):
        logger.warning("Firstlight is not active: %s", reason)
        return
    from firstlight.plugin.vllm.takeover import install

    install()


def vllm_version() -> str:
    """The version of the vLLM that is running, without its local part ("0.32.0" for "0.32.0+cpu")."""
    try:
        return version("vllm").partition("+")[0]
    except PackageNotFoundError:
        import vllm

        return str(vllm.__version__).partition("+")[0]


def unsupported_version(found: str) -> str | None:
    """Why a version of vLLM can't be served, or None."""
    if ".".join(found.split(".")[:2]) in VERSIONS:
        return None
    return (
        f"vLLM {found} is not one of those that this Firstlight was made for, {' and '.join(VERSIONS)}; "
        "install one of those, or a Firstlight for yours"
    )
