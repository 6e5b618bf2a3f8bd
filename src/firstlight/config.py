"""Every option of Firstlight, typed, once.

The CLI takes its flags, defaults and help from `EngineOptions` and `ServerOptions`; each field can be overridden by the
environment variable `FIRSTLIGHT_<FIELD>` (upper case). A malformed or unknown value is an error that names the option.
"""

from __future__ import annotations

import difflib
import os
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

ENVIRONMENT_PREFIX = "FIRSTLIGHT_"
LARGEST_SEED = (1 << 63) - 1
"""Seeds are signed 64-bit integers, as in the API."""
MOST_STEP_TOKENS = 16_777_216
MOST_GIB = 1_048_576


class Options(BaseModel):
    """A frozen set of options; unknown names are refused."""

    # No option means anything by infinity or by no number at all, and what reckons with one fails far from the option.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
                values[name] = (
                    [part.strip() for part in text.split(",") if part.strip()] if field.default == () else text
                )
        values.update({name: value for name, value in given.items() if value is not None})
        return cls(**values)

    def to_json(self) -> bytes:
        """A line for another process. Only what was given: which options were decides what hardware's own defaults replace."""
        return self.model_dump_json(exclude_unset=True).encode()

    @classmethod
    def from_json(cls, line: bytes) -> Self:
        """What `to_json` wrote."""
        return cls.model_validate_json(line)


def checked_key(key: str) -> str:
    """An API key as it stands in a header, without the line's end that a file or a secret brings along.

    Raises ValueError for one that can't stand there. The message doesn't repeat it: it may end in a log.
    """
    key = key.strip()
    if not key:
        raise ValueError("is empty or all white space; give a key, or leave the option and its variable out")
    if not key.isprintable():
        raise ValueError("has characters inside that a header can't carry; only printable ones and spaces are legal")
    return key


def checked_url(url: str) -> urllib.parse.SplitResult:
    """A server's address, its path up to and with /v1; `http://` and /v1 may be left out.

    Raises ValueError, naming the option, for anything that is no address of a server.
    """
    wrong = f"--url {url}: it must look like http://127.0.0.1:8000"
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        port, host = parts.port, parts.hostname or ""  # read here: they are looked at when they are asked for only
        host.encode("ascii" if ":" in host else "idna")
        if not all("!" <= character <= "~" for character in parts.path) or " " in host:
            raise ValueError("write a space or a letter beyond ASCII as %XX")
    except ValueError as error:
        raise ValueError(f"{wrong} ({error})") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(wrong)
    if port == 0:
        raise ValueError(f"{wrong} (nothing answers on port 0; ports are 1 to 65535)")
    return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1") + "/v1", query="", fragment="")


KeyOption = Annotated[str, AfterValidator(checked_key)]


class EngineOptions(Options):
    """How a model is loaded and run."""

    # The upper bounds are far beyond any machine: what they refuse would only fail later, in an allocation or a library.
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
    state_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Recurrent states of hybrid models; `auto`: float32. `bfloat16` halves a state's memory and traffic, and "
        "changes answers a little.",
    )
    kv_dtype: Literal["auto", "float8_e4m3fn"] = Field(
        "auto",
        description="KV pages; `auto`: the activations'. `float8_e4m3fn` halves them and changes answers a little: "
        "scale 1, values beyond +-448 are clamped.",
    )
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Seed of random weights, and of requests that bring none.")
    op: tuple[str, ...] = Field(
        (), description="Force a provider: `OP=PROVIDER` or `OP.SITE=PROVIDER`; may be repeated."
    )
    table: str = Field(
        "auto",
        description="Timings to choose providers by, from `firstlight calibrate`: a file; `auto`: the one that comes with "
        "Firstlight for this hardware, if there is one; `none`: choose by rank.",
    )
    invariant: bool = Field(
        False, description="Bind one provider to all buckets, so that batch size never changes rounding."
    )
    threads: int = Field(0, ge=0, le=4096, description="CPU threads for compute; 0: all cores.")
    max_context: int = Field(
        0, ge=0, description="Longest request, prompt and answer, in tokens; 0: the model's own limit."
    )
    max_running: int = Field(256, ge=1, le=65_536, description="Requests in a step at most.")
    step_tokens: int = Field(
        2048,
        ge=1,
        le=MOST_STEP_TOKENS,
        description="New tokens in a step at most; longer prompts are prefilled in chunks, of fewer tokens the further in, while "
        "online requests decode. If not given, 8192 on a GPU.",
    )
    offline_step_tokens: int = Field(
        2048, ge=1, le=MOST_STEP_TOKENS, description="Offline prefill tokens in a step at most."
    )
    offline_share: float = Field(
        0.05, ge=0, le=1, description="Share of tokens kept for offline work under constant online load."
    )
    page_size: int = Field(16, ge=1, le=65_536, description="Tokens in a KV page. If not given, 64 on a GPU.")
    cache_gib: float = Field(
        0.0,
        ge=0,
        le=MOST_GIB,
        description="Memory for KV pages and state slots; 0: what the device has left (CPU: 1 GiB).",
    )
    checkpoint_gib: float = Field(
        0.0,
        ge=0,
        le=MOST_GIB,
        description="Of it, at most this for state checkpoints of hybrid models; 0: half. None are kept with --no-prefix-cache.",
    )
    prefix_cache: bool = Field(True, description="Reuse the KV and state of shared prefixes.")
    depth: int = Field(
        0, ge=0, le=64, description="Plans in flight; 1 to debug; 0: 2 on a GPU, 1 on a CPU, which computes in order."
    )
    graphs: bool = Field(
        True,
        description="Capture steps in CUDA graphs, padded to their buckets; without effect on a CPU.",
    )
    tensor_parallel: int = Field(1, ge=1, le=1024, description="Ranks that split every layer.")


class ServerOptions(Options):
    """How the API listens."""

    host: str = Field("127.0.0.1", description="Address to bind; anything but a loopback address needs an API key.")
    port: int = Field(8000, ge=0, le=65535, description="Port; 0: any free one, printed at start.")
    api_key: KeyOption | None = Field(None, description="Clients must send `Authorization: Bearer KEY`.")
    served_name: str | None = Field(
        None,
        description="The model's name in the API; default: its directory's name, or its file's without .gguf or .json.",
    )
    max_waiting: int = Field(
        4096, ge=1, description="Requests waiting, beyond --max-running, at most; one more gets a 429."
    )
    max_body_mib: int = Field(16, ge=1, le=1024, description="Size of a request's body at most, in MiB.")
    drain_seconds: int = Field(
        30, ge=0, le=86_400, description="At shutdown, running requests get this long to finish."
    )


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
    seed: int = Field(0, ge=0, le=LARGEST_SEED, description="Seed of the token ids, and of random weights.")
    layers: int = Field(0, ge=0, description="Only this many layers, from the first; 0: as many as memory holds.")
    op: tuple[str, ...] = Field((), description=_described("op"))


class ExplainOptions(Options):
    """What `explain` has in common with a run; its other options say what is priced."""

    model: str = Field(description="Directory with config.json, or a config.json; no weights are needed.")
    table: str = Field("auto", description=f"With --bound. {_described('table')}")


@dataclass(frozen=True)
class Span:
    """Whole numbers from `low` to `high`, both included; as text `8192`, or `1000-2000`."""

    low: int
    high: int

    @classmethod
    def parse(cls, value: Any) -> Any:
        """A span from text or a number; spans pass, as does None. Raises ValueError for anything else."""
        if value is None or isinstance(value, Span):
            return value
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(value).strip())
        if match is None:
            raise ValueError("must be a whole number, such as 8192, or a range, such as 1000-2000")
        low, high = int(match[1]), int(match[2] or match[1])
        if low > high:
            raise ValueError(f"the range begins at {low} and ends before it, at {high}")
        return cls(low, high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


LARGEST_TOKEN_ID = 2**31 - 1
"""Prompts are kept as 32-bit ids."""
MOST_TOKENS = 2**24
"""In a prompt or an answer of a benchmark: more than any model reads, and no more than memory holds."""
MOST_REQUESTS = 10**7
"""In a benchmark, which makes them all before it begins."""


def _spans(low: int, high: int) -> BeforeValidator:
    """Parses spans between bounds, both included. Before pydantic's own check, so that errors show what was given."""

    def parsed(value: Any) -> Any:
        span = Span.parse(value)
        if span is not None and span.low < low:
            raise ValueError(f"must be at least {low}")
        if span is not None and span.high > high:
            raise ValueError(f"must be at most {high}")
        return span

    return BeforeValidator(parsed)


TokenIdsOption = Annotated[Span, _spans(0, LARGEST_TOKEN_ID)]
TokensOption = Annotated[Span, _spans(1, MOST_TOKENS)]
TurnsOption = Annotated[Span, _spans(1, MOST_REQUESTS)]


class BenchOptions(Options):
    """What load `bench` puts on a server, and how it judges the answers."""

    url: str = Field("http://127.0.0.1:8000", description="The server, with or without /v1.")
    api_key: KeyOption | None = Field(None, description="The server's key.")
    served_name: str | None = Field(
        None, description="The model's name at the server; default: the first that it lists."
    )
    endpoint: Literal["completions", "chat"] = Field("completions", description="Which of OpenAI's two is asked.")
    tokenizer: str | None = Field(
        None,
        description="Checkpoint whose tokenizer makes prompts text, for servers that take no token ids, and for chats.",
    )
    concurrency: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Requests at once at most. Alone, a closed loop: as soon as one ends, the next begins. "
        "0: 1 in a closed loop, without bound where arrivals have times.",
    )
    rate: float = Field(
        0.0, ge=0, description="Arrivals a second at random times, whether or not answers have come; 0: a closed loop."
    )
    burstiness: float = Field(
        1.0,
        gt=0,
        description="With --rate, the shape of the gamma distribution of the times between arrivals: "
        "1 is a Poisson process, less comes in bursts, more is steadier.",
    )
    trace: str | None = Field(
        None,
        description="JSONL file: a request a line, as a prompt or as lengths, with its time of arrival if it has one.",
    )
    requests: int = Field(
        0,
        ge=0,
        le=MOST_REQUESTS,
        description="Requests (conversations, with --turns); 0: a trace's lines; else 4 x --concurrency, "
        "or 100 with --rate.",
    )
    warm_up: int = Field(
        1, ge=0, le=MOST_REQUESTS, description="Requests before the clock starts, which count for nothing."
    )
    input_tokens: TokensOption = Field(
        Span(512, 512), description="Random tokens of a prompt: a number, or LOW-HIGH, drawn uniformly."
    )
    output_tokens: TokensOption = Field(Span(128, 128), description="Tokens of an answer, likewise.")
    token_range: TokenIdsOption | None = Field(
        None, description="Random prompts have token ids of LOW-HIGH; default: the vocabulary of tokenizer or server."
    )
    prefix_tokens: int = Field(
        0, ge=0, le=MOST_TOKENS, description="Tokens before them that a group of requests has in common."
    )
    prefix_groups: int = Field(1, ge=1, le=MOST_REQUESTS, description="Groups, each with a prefix of its own.")
    turns: TurnsOption = Field(
        Span(1, 1), description="Turns of a conversation: each brings new tokens, and repeats all that was said."
    )
    think_seconds: float = Field(0.0, ge=0, description="Pause between an answer and the next turn.")
    ignore_eos: bool = Field(True, description="Answers end by length alone (a field that not every server knows).")
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    return_token_ids: bool = Field(
        False, description="Ask for the tokens' ids: each chunk then says how many it has. Not every server knows it."
    )
    field: tuple[str, ...] = Field(
        (), description="A further field of each request: `NAME=JSON`, such as `top_k=20`; may be repeated."
    )
    slo: tuple[str, ...] = Field(
        (), description="What a good request keeps, in ms: `ttft=500`, `tpot=20` or `e2el=9000`; may be repeated."
    )
    timeout_seconds: float = Field(1800.0, gt=0, description="A request that takes longer has failed.")
    seed: int = Field(0, ge=0, description="Of prompts, lengths and arrivals; the same seed is the same load.")
    gpus: int = Field(
        1, ge=1, le=MOST_REQUESTS, description="GPUs behind the server, for throughput by GPU in the JSON."
    )


class PluginOptions(Options):
    """Whether Firstlight's models run inside another engine; set by environment variables alone."""

    plugin: Literal["on", "off"] = Field(
        "on", description="`off`: the host runs its own models, as if we weren't installed."
    )
    plugin_skip: tuple[str, ...] = Field(
        (), description="Architectures, by their names in config.json, that stay with the host; commas between them."
    )


KINDS: tuple[type[Options], ...] = (
    EngineOptions,
    ServerOptions,
    VerifyOptions,
    ExplainOptions,
    BenchOptions,
    PluginOptions,
)


def unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with our prefix that set no option of any kind, each with the nearest one that does."""
    legal = {ENVIRONMENT_PREFIX + name.upper() for kind in KINDS for name in kind.model_fields}
    unknown = sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in legal)
    return {name: difflib.get_close_matches(name, sorted(legal), n=1, cutoff=0)[0] for name in unknown}
