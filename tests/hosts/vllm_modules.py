"""Says what of vLLM our plugin changes: `python vllm_modules.py MODEL RESULT`.

Everything of vLLM that an engine of ours loads is imported first, by running one with the plugin off. Then the plugin is
registered and serves, and all attributes of all of vLLM's modules and of their classes are compared. RESULT: {"attributes":
those that are another object than before, "containers": dictionaries, lists and sets with other contents, "served": by whom}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from module_contents import contents, holders


def answer(model: str) -> str:
    """Run a small engine; who served."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.inputs import TokensPrompt

    llm = LLM(model, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
    llm.generate(
        TokensPrompt(prompt_token_ids=[5, 6, 7]), SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False
    )
    served: str = llm.apply_model(lambda served: type(served).__module__)[0]
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return served


def main() -> None:
    """See the module's docstring."""
    model, result = sys.argv[1:]
    os.environ["FIRSTLIGHT_PLUGIN"] = "off"
    first = answer(model)
    import vllm.model_executor.layers.mamba.abstract  # noqa: F401  (0.26 loads it for hybrid models only)
    from vllm import ModelRegistry

    import firstlight.plugin.vllm as plugin

    known = holders("vllm")
    kept = {name: dict(vars(holder)) for name, holder in known.items()}  # holds the values, so that no id comes twice
    before = {
        (name, attribute): contents(value) for name, values in kept.items() for attribute, value in values.items()
    }
    architectures = dict(ModelRegistry.models)
    os.environ["FIRSTLIGHT_PLUGIN"] = "on"
    plugin.register()
    plugin.register()
    registered = set(ModelRegistry.models.items()) ^ set(architectures.items())
    import firstlight.plugin.vllm.models  # noqa: F401

    attributes, containers = set(), set()
    for name, values in kept.items():
        for attribute, value in vars(known[name]).items():
            if attribute not in values or values[attribute] is not value:
                attributes.add(f"{name}:{attribute}")
            elif before[name, attribute] != contents(value):
                containers.add(f"{name}:{attribute}")
        attributes |= {f"{name}:{attribute}" for attribute in set(values) - set(vars(known[name]))}
    Path(result).write_text(
        json.dumps(
            {
                "first": first,
                "second": answer(model),
                "attributes": sorted(attributes),
                "containers": sorted(containers),
                "registered": sorted(name for name, _ in registered),
                "modules": len([name for name in known if name in sys.modules]),
            }
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
