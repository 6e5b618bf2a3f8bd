"""Says what of SGLang our plugin changes: `python sglang_modules.py RESULT`.

All of SGLang that a scheduler loads is imported first, without us. Then both ways in are gone, and all attributes of all of
SGLang's modules and of their classes are compared. RESULT: {"modules": how many; "attributes": those that are another object
than before; "containers": dictionaries, lists and sets with other contents; "served": {architecture: module of its class}}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from module_contents import contents, holders


def main() -> None:
    """See the module's docstring."""
    from importlib import import_module

    for name in ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"):
        import_module(name)
    registry = import_module("sglang.srt.models.registry")

    modules = holders("sglang")
    attributes = {f"{name}:{key}": value for name, held in modules.items() for key, value in list(vars(held).items())}
    inside = {key: contents(value) for key, value in attributes.items()}
    models = registry.ModelRegistry.models
    before, overrides = dict(models), _overrides()

    from firstlight.plugin.sglang import MODELS, register

    register()
    registry.ModelRegistry.register(MODELS, overwrite=True)  # what SGLANG_EXTERNAL_MODEL_PACKAGE does
    now = {f"{name}:{key}": value for name, held in modules.items() for key, value in list(vars(held).items())}
    changed = sorted(key for key in attributes.keys() | now.keys() if attributes.get(key) is not now.get(key))
    Path(sys.argv[1]).write_text(
        json.dumps(
            {
                "modules": len(modules),
                "attributes": changed,
                "containers": sorted(key for key, value in now.items() if contents(value) != inside.get(key)),
                "served": {name: cls.__module__ for name, cls in models.items() if before.get(name) is not cls},
                "overrides": sorted(name for name, count in _overrides().items() if count != overrides.get(name, 0)),
                "others": len(before),
            }
        )
    )


def _overrides() -> dict[str, int]:
    from sglang.srt.arg_groups.overrides import _MODEL_OVERRIDE_FNS

    return {name: len(providers) for name, providers in _MODEL_OVERRIDE_FNS.items()}


if __name__ == "__main__":
    main()
