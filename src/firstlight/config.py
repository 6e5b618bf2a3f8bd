"""Every option of Firstlight, typed, once.

The CLI takes its flags, defaults and help from `EngineOptions` and `ServerOptions`; each field can be overridden by the
environment variable `FIRSTLIGHT_<FIELD>` (upper case). A malformed or unknown value is an error that names the option.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

ENVIRONMENT_PREFIX = "FIRSTLIGHT_"


class Options(BaseModel):
    """A frozen set of options; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def load(cls, given: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Self:
        """Options from explicit values (None means "not given"), then the environment, then the defaults.

        Raises pydantic.ValidationError, naming the field and the legal values.
        """
        environment = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if (text := environment.get(ENVIRONMENT_PREFIX + name.upper())) is not None:
                # A list is written with commas: FIRSTLIGHT_OP=attention=reference,linear=torch
                values[name] = [part for part in text.split(",") if part] if field.default == () else text
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)


class EngineOptions(Options):
    """How a model is loaded and run."""

    model: str = Field(
        description="Directory with config.json and safetensors, a .gguf file, or a config.json (with --weights random)."
    )
    weights: Literal["auto", "random"] = Field(
        "auto", description="`random`: seeded random weights, made on the device, for any supported config."
    )
    device: str = Field("auto", description="`cpu`, `cuda`, `cuda:1`, ...; `auto` takes the first GPU if there is one.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Activations; `auto`: the checkpoint's own."
    )
    seed: int = Field(0, description="Seed of random weights, and of requests that bring none.")
    op: tuple[str, ...] = Field(
        (), description="Force a provider: `OP=PROVIDER` or `OP.SITE=PROVIDER`; may be repeated."
    )
    invariant: bool = Field(
        False, description="Bind one provider to all buckets, so that batch size never changes rounding."
    )
    threads: int = Field(0, ge=0, description="CPU threads for compute; 0: all cores.")
    max_context: int = Field(
        0, ge=0, description="Longest request, prompt and answer, in tokens; 0: the model's own limit."
    )
    max_running: int = Field(256, ge=1, description="Requests in a step at most.")
    step_tokens: int = Field(
        2048, ge=1, description="New tokens in a step at most; longer prompts are prefilled in chunks."
    )
    offline_step_tokens: int = Field(2048, ge=1, description="Offline prefill tokens in a step at most.")
    offline_share: float = Field(
        0.05, ge=0, le=1, description="Share of tokens kept for offline work under constant online load."
    )
    page_size: int = Field(16, ge=1, description="Tokens in a KV page.")
    cache_gib: float = Field(
        0.0, ge=0, description="Memory for KV pages and state slots; 0: what the device has left (CPU: 1 GiB)."
    )
    checkpoint_gib: float = Field(
        0.0, ge=0, description="Of it, at most this for state checkpoints of hybrid models; 0: half."
    )
    prefix_cache: bool = Field(True, description="Reuse the KV and state of shared prefixes.")
    depth: int = Field(
        0, ge=0, description="Plans in flight; 1 to debug; 0: 2 on a GPU, 1 on a CPU, which computes in order."
    )
    tensor_parallel: int = Field(1, ge=1, description="Ranks that split every layer.")


class ServerOptions(Options):
    """How the API listens."""

    host: str = Field("127.0.0.1", description="Address to bind; anything but a loopback address needs an API key.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0: any free one, printed at start.")
    api_key: str | None = Field(None, description="Clients must send `Authorization: Bearer KEY`.")
    served_name: str | None = Field(
        None,
        description="The model's name in the API; default: its directory's name, or its file's without .gguf or .json.",
    )
    max_waiting: int = Field(
        4096, ge=1, description="Requests waiting, beyond --max-running, at most; one more gets a 429."
    )
    max_body_mib: int = Field(16, ge=1, le=1024, description="Size of a request's body at most, in MiB.")
    drain_seconds: int = Field(30, ge=0, description="At shutdown, running requests get this long to finish.")


def _described(name: str) -> str:
    return EngineOptions.model_fields[name].description or ""


class VerifyOptions(Options):
    """What is compared with the reference. Names and meanings are those of a run."""

    model: str = Field(description=_described("model"))
    weights: Literal["auto", "random"] = Field("auto", description=_described("weights"))
    device: str = Field("auto", description=_described("device"))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Activations; `auto`: float32 on a CPU, the checkpoint's own on a GPU. The reference is in float32.",
    )
    seed: int = Field(0, description="Seed of the token ids, and of random weights.")
    layers: int = Field(0, ge=0, description="Only this many layers, from the first; 0: as many as memory holds.")
    op: tuple[str, ...] = Field((), description=_described("op"))


KINDS: tuple[type[Options], ...] = (EngineOptions, ServerOptions, VerifyOptions)


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with our prefix that set no option of any kind, each with the nearest one that does."""
    legal = {ENVIRONMENT_PREFIX + name.upper() for kind in KINDS for name in kind.model_fields}
    unknown = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in legal)
    return {name: difflib.get_close_matches(name, sorted(legal), n=1, cutoff=0)[0] for name in unknown}
