"""Which of SGLang's options our classes serve, and which they leave to SGLang's own.

`objection` is asked at start, when SGLang's options and the model's config are known. If it has a reason, SGLang's own class
serves and the log says why: an option that doesn't mean for us what it means for SGLang must never give wrong tokens.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import mamba2_state_dtype

from firstlight.cache.spec import SlotSpec
from firstlight.errors import FirstlightError
from firstlight.nn.module import caches
from firstlight.plugin.core import describe, mesh_of
from firstlight.quant import dtype_name

SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    # Parallelism other than tensor parallelism, and what belongs to it.
    "pp_size": (1,),
    "ep_size": (1,),
    "enable_dp_attention": (False,),
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "moe_dp_size": (1,),
    "dwdp_size": (1,),
    "moe_dense_tp_size": (None,),
    "moe_a2a_backend": ("none",),
    "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,),
    "init_expert_location": ("trivial",),
    "elastic_ep_backend": (None,),
    "expert_distribution_recorder_mode": (None,),
    "enable_two_batch_overlap": (False,),
    "enable_single_batch_overlap": (False,),
    "enable_pdmux": (False,),
    # Other ways of decoding, and other answers than tokens.
    "speculative_algorithm": (None,),
    "dllm_algorithm": (None,),
    "is_embedding": (False,),
    "enable_mis": (False,),
    "enable_return_routed_experts": (False,),
    "enable_return_indexer_topk": (False,),
    "enable_fp32_lm_head": (False,),
    "enable_deterministic_inference": (False,),
    "rl_on_policy_target": (None,),
    # Weights that aren't the checkpoint's as published.
    "enable_lora": (None, False),
    "lora_paths": (None, (), [], {}),
    "torchao_config": ("", None),
    "modelopt_quant": (None,),
    "quantize_and_serve": (False,),
    "rl_quant_profile": (None,),
    "load_format": ("auto", "safetensors", "dummy"),
    "custom_weight_loader": (None, [], ()),
    "decrypted_config_file": (None, ""),
    "model_config_parser": ("auto", "hf"),
    "weight_cache_mode": ("off",),
    "kt_weight_path": (None,),
    "cpu_offload_gb": (0,),
    "offload_group_size": (-1,),
    "enable_memory_saver": (False,),
    "enable_weights_cpu_backup": (False,),
    # Caches in another layout or place.
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_page_major_kv_layout": (False,),
    "enable_unified_memory": (False,),
    "prefill_only_disable_kv_cache": (False,),
    "disaggregation_mode": ("null",),
    "encoder_only": (False,),
    "language_only": (False,),
    "mamba_ssm_dtype": (None, "float32"),
    "enable_mamba_cache_stochastic_rounding": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "enable_linear_replayssm": (False,),
    "enable_linear_replayssm_spec": (False,),
    # Ways of running that reach into a model's modules.
    "model_impl": ("auto", "sglang"),
    "enable_torch_compile": (False,),
    "forward_hooks": (None, [], ()),
    "debug_tensor_dump_output_folder": (None,),
    "msprobe_dump_config": (None,),
    "kv_canary": ("none",),
}
"""Values of SGLang's options with which our classes serve; with any other, SGLang's own do."""


def published_config(options: Any) -> dict[str, Any]:
    """The checkpoint's config.json as published, with the fields that --json-model-override-args sets.

    SGLang's own view of it isn't used: its classes fill in what other families have (experts of a dense model).
    Raises FirstlightError where there is none (a GGUF file).
    """
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(options.model_path, revision=options.revision)
    except (OSError, ValueError) as error:
        raise FirstlightError(f"config.json of {options.model_path} can't be read: {error}") from None
    return {**config, **json.loads(options.json_model_override_args or "{}")}


def objection(options: Any, hf_config: Any, dtype: torch.dtype, tp_size: int, **given: Any) -> str | None:
    """Why SGLang's own class should serve, naming the option, or None.

    options: SGLang's ServerArgs, over which `given` goes. hf_config: SGLang's view of config.json. dtype: of activations.
    """
    try:
        config = published_config(options)
    except FirstlightError as error:
        return str(error)

    def value_of(name: str) -> Any:
        return given.get(name, getattr(options, name))

    for name, served in SERVED_VALUES.items():
        if (value := value_of(name)) not in served:
            return f"--{name.replace('_', '-')} {value} is not served"
    kept = {"auto", dtype_name(dtype)} | ({"bf16"} if dtype == torch.bfloat16 else set())
    if (kv := value_of("kv_cache_dtype")) not in kept:
        return f"--kv-cache-dtype {kv} is not served: KV is kept in the activations' {dtype}"
    stored = (config.get("quantization_config") or {}).get("quant_method")
    if (quantization := value_of("quantization")) not in (None, stored):
        return (
            f"--quantization {quantization} is not served: this checkpoint is stored {stored or 'without quantisation'}"
        )
    if "vision_config" in config and value_of("enable_multimodal") is not False:
        return "images are not served (--enable-multimodal)"
    try:
        model = describe(config, dtype=dtype, mesh=mesh_of(tp_size))
    except (FirstlightError, ValueError) as error:
        return str(error)
    states = {
        name: kind
        for spec in caches(model).values()
        if isinstance(spec, SlotSpec)
        for name, (_, kind) in spec.tensors.items()
    }
    if states:
        found = mamba2_state_dtype(hf_config)
        if found.conv != states["conv"]:
            return (
                f"SGLANG_MAMBA_CONV_DTYPE is {found.conv}; windows of convolutions are served in {states['conv']} alone"
            )
        if found.temporal != states["state"]:
            return (
                f"states in {found.temporal} (mamba_ssm_dtype in config.json) are not served, only in {states['state']}"
            )
    return None
