"""Firstlight's models inside SGLang, and all that we ask of it.

SGLang keeps scheduling, paging, its radix cache, sampling and its API. Weights, layers, attention, delta rule, experts and
quantised products are ours; the memory of KV and states is SGLang's, in its layout.

| of SGLang | for | in |
| --- | --- | --- |
| `SGLANG_EXTERNAL_MODEL_PACKAGE`, which adds to `ModelRegistry` | our classes in place of its own | `models` |
| entry point `sglang.srt.plugins` | the same without anything to be set, and defaults of options | here |
| `register_model_override` | defaults of options, by architecture | `defaults` |
| model interface: `load_weights`, `forward`, `LogitsProcessor` | the model | `adapter` |
| `get_attn_backend()`: `req_to_token_pool`, `token_to_kv_pool` | memory of KV pages and states, and its tables | `adapter` |
| `get_parallel().tp_group.device_group` | the collectives of our layers | `adapter` |
| `get_server_args()` | which options are asked for | `options` |

Nothing of SGLang is patched: only its registries are added to. If an option or a config isn't served by our class, it makes
SGLang's own in its place (`options.objection`), and one line of the log says why.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import version

from firstlight.errors import FirstlightError
from firstlight.plugin.switches import switches, without_effect

MODELS = "firstlight.plugin.sglang.models"
EXTERNAL_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
VERSIONS = ("0.5.17", "0.5.18")
"""From the first, up to but without the second: what the tests run."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point: have SGLang take our models, with defaults of options that suit them. Ends the start for wrong switches."""
    try:
        _register()
    except FirstlightError as error:  # of an exception SGLang would make a line of its log, and start all the same
        raise SystemExit(f"Firstlight: {error}") from None


def _register() -> None:
    if ignored := without_effect():
        logger.warning("Firstlight: %s", ignored)
    if reason := inactive():
        logger.warning("Firstlight is not active: %s", reason)
        return
    from firstlight.plugin.sglang.defaults import install

    install()
    registry = sys.modules.get("sglang.srt.models.registry")
    if registry is not None or os.environ.get(EXTERNAL_PACKAGE, MODELS) != MODELS:
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.register(MODELS, overwrite=True)
    else:
        # SGLang imports its models late, and only where it needs them. It finds ours then.
        os.environ[EXTERNAL_PACKAGE] = MODELS


def inactive() -> str | None:
    """Why SGLang's own models serve all architectures, or None: the switch, or the version. Raises what `switches` does."""
    if switches().plugin == "off":
        return "FIRSTLIGHT_PLUGIN=off"
    return unsupported_version(version("sglang"))


def unsupported_version(found: str) -> str | None:
    """Why a version of SGLang can't be served, or None."""
    from packaging.version import InvalidVersion, Version

    low, high = VERSIONS
    try:
        if Version(low) <= Version(found) < Version(high):
            return None
    except InvalidVersion:
        pass
    return (
        f"SGLang {found} is not in the range that this Firstlight was made for, >={low},<{high}; "
        "install one of those, or a Firstlight for yours"
    )
