"""Who serves a model: vLLM's own class, or ours.

vLLM calls a hook for each architecture when all options are known (`MODELS_CONFIG_MAP`). Ours runs the one that was there,
then looks whether there is an option that we don't serve.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

from vllm import ModelRegistry, envs
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

from firstlight.cache import SlotSpec
from firstlight.errors import FirstlightError
from firstlight.models import CausalModel
from firstlight.nn.module import caches
from firstlight.parallel import Mesh
from firstlight.plugin.active import ACTIVE
from firstlight.plugin.core import describe
from firstlight.plugin.switches import active
from firstlight.quant import dtype_name

logger = logging.getLogger("vllm.firstlight")
VERSION = version("firstlight")

DENSE, HYBRID = "FirstlightForCausalLM", "FirstlightHybridForCausalLM"
OWN = {DENSE: "ForCausalLM", HYBRID: "HybridForCausalLM"}
"""Our names in vLLM's registry, and the class in `models` that each stands for."""

SERVED = {
    "LlamaForCausalLM": DENSE,
    "Qwen3ForCausalLM": DENSE,
    "Qwen3MoeForCausalLM": DENSE,
    "Qwen3NextForCausalLM": HYBRID,
    "Qwen3_5ForCausalLM": HYBRID,
    "Qwen3_5ForConditionalGeneration": HYBRID,
    "Qwen3_5MoeForCausalLM": HYBRID,
    "Qwen3_5MoeForConditionalGeneration": HYBRID,
}
"""Architectures, as in config.json, and which of our classes serves each."""

GPU_PAGE_TOKENS = 64
"""Into pages of so many tokens vLLM cuts its blocks on a GPU, for our attention kernels: those for prompts take no others."""

STREAMED = ("auto", "hf", "safetensors", "pt", "dummy", "fastsafetensors", "runai_streamer", "instanttensor")
"""Values of --load-format that hand over the checkpoint's own tensors, or ask for random ones."""


def install() -> None:
    """Add our classes and hooks to vLLM's registries. Raises what `active` does."""
    architectures = active(SERVED)
    for name, own_class in OWN.items():
        ModelRegistry.register_model(name, f"firstlight.plugin.vllm.models:{own_class}")
    for architecture in architectures:
        before = MODELS_CONFIG_MAP.get(architecture)
        if not issubclass(before or VerifyAndUpdateConfig, Hook):
            contents = {"before": before, "own": SERVED[architecture]}
            MODELS_CONFIG_MAP[architecture] = type(f"{architecture}Hook", (Hook,), contents)
    MODELS_CONFIG_MAP.update(dict.fromkeys(OWN, OwnHook))


class Hook(VerifyAndUpdateConfig):
    """before: the hook that vLLM has for the architecture, if any. own: the name of our class for it."""

    before: type[Any] | None
    own: str

    @classmethod
    def verify_and_update_model_config(cls, model_config: Any) -> None:
        """What vLLM does, and no more."""
        if cls.before is not None:
            cls.before.verify_and_update_model_config(model_config)

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """What vLLM does; then hand the model to our class if it can serve the configuration."""
        if cls.before is not None:
            cls.before.verify_and_update_config(vllm_config)
        model = vllm_config.model_config
        architecture = model.architecture
        reason = objection(vllm_config)
        ACTIVE.labels("vllm", architecture, VERSION).set(0 if reason else 1)
        if reason:
            logger.warning("vLLM's own class serves %s, not Firstlight's: %s", architecture, reason)
            return
        logger.info("Firstlight %s serves %s", VERSION, architecture)
        model.hf_config.architectures = [cls.own]
        model._model_info, model._architecture = model.registry.inspect_model_cls([cls.own], model)
        keep_states_at_block_ends(vllm_config)
        model.multimodal_config = None  # without images the model is a text model
        model.quantization = None  # no layer of vLLM's is quantised: ours read config.json themselves


class OwnHook(VerifyAndUpdateConfig):
    """For a model that asks for one of our classes by its own name, as --hf-overrides can."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Raises ValueError, naming it, for an option that we don't serve."""
        architecture = vllm_config.model_config.architecture
        if reason := objection(vllm_config):
            raise ValueError(f"{architecture} was asked for, but {reason}")
        if architecture == DENSE and any(
            isinstance(spec, SlotSpec) for spec in caches(described(vllm_config)).values()
        ):
            raise ValueError(f"{DENSE} was asked for, but this model keeps recurrent states: ask for {HYBRID}")
        keep_states_at_block_ends(vllm_config)
        vllm_config.model_config.quantization = None
        ACTIVE.labels("vllm", architecture, VERSION).set(1)


def keep_states_at_block_ends(config: Any) -> None:
    """Prefix caching in the mode that we serve. vLLM 0.26 would take "all" for a class that says it can cache prefixes."""
    cache = config.cache_config
    if config.model_config.is_hybrid and cache.enable_prefix_caching and cache.mamba_cache_mode == "none":
        cache.mamba_cache_mode = "align"


def objection(config: Any) -> str | None:
    """Why our classes don't serve a VllmConfig, naming the option, or None if they do."""
    model = config.model_config
    reasons = [name for name, asked in _options(config).items() if asked]
    if reasons:
        return f"{', '.join(reasons)} {'is' if len(reasons) == 1 else 'are'} not served"
    if config.load_config.load_format not in STREAMED:
        return f"--load-format {config.load_config.load_format} is not served; {', '.join(STREAMED)} are"
    if model.multimodal_config is not None and any(
        model.multimodal_config.get_limit_per_prompt(kind) for kind in ("image", "video")
    ):
        return "images and videos are not served; with --language-model-only we serve the text model"
    try:
        described(config)
    except (FirstlightError, ValueError) as error:
        return str(error)
    return None


def described(config: Any) -> CausalModel:
    """The model of a VllmConfig, on the meta device. Raises what `describe` does."""
    model = config.model_config
    return describe(config_dict(model), dtype=model.dtype, mesh=Mesh.of(tp=config.parallel_config.tensor_parallel_size))


def _options(config: Any) -> dict[str, bool]:
    """Options that we don't serve, by name, and whether each is asked for."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    offload, text = config.offload_config, config.model_config.hf_text_config
    auxiliary = getattr(config, "aux_output_config", None)  # one option of the model's before 0.32
    declared = getattr(model.hf_config, "quantization_config", None) or getattr(text, "quantization_config", None)
    return {
        "--model-impl vllm": model.model_impl == "vllm",
        "--speculative-config": config.speculative_config is not None,
        "--enable-lora": config.lora_config is not None,
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "--data-parallel-size above 1": parallel.data_parallel_size > 1,
        "--decode-context-parallel-size above 1": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size above 1": parallel.prefill_context_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-elastic-ep": parallel.enable_elastic_ep,
        "--enable-dbo": parallel.enable_dbo or parallel.ubatch_size > 0,
        f"--kv-cache-dtype {cache.cache_dtype}": cache.cache_dtype not in ("auto", dtype_name(model.dtype)),
        f"--mamba-cache-dtype {cache.mamba_cache_dtype}": cache.mamba_cache_dtype
        not in ("auto", dtype_name(model.dtype)),
        f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype}": cache.mamba_ssm_cache_dtype
        not in ("auto", "float32"),
        "--mamba-cache-mode all": cache.mamba_cache_mode == "all",
        "replayed states (use_replayssm)": getattr(cache, "use_replayssm", False),
        f"--block-size {cache.block_size} on a GPU (multiples of {GPU_PAGE_TOKENS} are)": current_platform.is_cuda_alike()
        and cache.user_specified_block_size
        and not model.is_hybrid  # vLLM makes blocks of those as large as a state, in multiples of our pages
        and cache.block_size % GPU_PAGE_TOKENS > 0,
        "--kv-sharing-fast-prefill": cache.kv_sharing_fast_prefill,
        "--kv-offloading-size": cache.kv_offloading_size is not None,
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--ec-transfer-config": config.ec_transfer_config is not None,
        "--cpu-offload-gb": offload.uva.cpu_offload_gb > 0,
        "--offload-group-size": offload.prefetch.offload_group_size > 0,
        "VLLM_BATCH_INVARIANT": bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)),
        "--attention-backend": config.attention_config.backend is not None,
        f"--quantization {model.quantization}": model.quantization is not None and not declared,
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "--enable-sleep-mode": model.enable_sleep_mode,
        "--weight-transfer-config": config.weight_transfer_config is not None,
        f"--runner {model.runner_type}": model.runner_type != "generate",
        f"--convert {model.convert_type}": model.convert_type != "none",
        "auxiliary outputs (--enable-return-routed-experts)": auxiliary.enabled
        if auxiliary
        else getattr(model, "enable_return_routed_experts", False),
        "a sliding window (use_sliding_window in config.json)": bool(getattr(text, "use_sliding_window", False)),
        "dual_chunk_attention_config in config.json": getattr(text, "dual_chunk_attention_config", None) is not None,
        "model runner V2 (VLLM_USE_V2_MODEL_RUNNER=0 takes the other)": config.use_v2_model_runner,
    }


def config_dict(model_config: Any) -> dict[str, Any]:
    """The checkpoint's config.json as vLLM has it, the user's --hf-overrides included."""
    return dict(model_config.hf_config.to_dict())
