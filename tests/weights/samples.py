"""Small checkpoints for the tests of `weights`, written by the `gguf` and `safetensors` packages."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXT = (
    "The quick brown fox jumps over the lazy dog, again and again: 0123456789 times. It's what they've said, isn't it? "
    "Größe, naïve café, 日本語の文章, привет мир, emoji 😀👩‍👩‍👧 and tabs\t\tand\n\n  spaces   of  all kinds. "
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USER_DEFINED = ("<think>",)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Tokens and merges of a byte-level BPE trained on TEXT; the first tokens are CONTROL and USER_DEFINED."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*CONTROL, *USER_DEFINED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 3], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tuple(tokens), tuple(" ".join(merge) for merge in model["merges"])


def add_tokenizer(writer: GGUFWriter, kind: str, **ids: int) -> None:
    """The vocabulary as a GGUF file's tokenizer. ids: bos, eos, eot, ... by name."""
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types([3 if token in CONTROL else 4 if token in USER_DEFINED else 1 for token in tokens])
    writer.add_token_merges(list(merges))
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, str]],
    tokenizer: str | None = None,
    **ids: int,
) -> Path:
    """A GGUF file. metadata: by key without the architecture; tensors: values [out, in] in float32, and their type."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else add[type(value)])(f"{architecture}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, **ids)
    for name, (values, ggml_type) in tensors.items():
        raw = quants.quantize(values.astype(np.float32), GGMLQuantizationType[ggml_type])
        plain = {"F32": np.float32, "F16": np.float16}
        if ggml_type in plain:
            writer.add_tensor(name, raw.view(plain[ggml_type]).reshape(values.shape))
        else:
            writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[ggml_type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 100000.0,
    "rope.dimension_count": 16,
}


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama GGUF files have them: a head's two rotary halves, interleaved."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def llama_tensors(seed: int = 0, weight_type: str = "Q8_0") -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Random weights of a tied llama of LLAMA's sizes: by published name, and as the file has them."""
    random = np.random.default_rng(seed)
    published: dict[str, np.ndarray] = {}
    stored: dict[str, tuple[np.ndarray, str]] = {}

    def add(name: str, gguf_name: str, *shape: int, heads: int = 0) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        published[name] = values
        stored[gguf_name] = (permuted(values, heads) if heads else values, "F32" if len(shape) == 1 else weight_type)

    add("model.embed_tokens.weight", "token_embd.weight", len(vocabulary()[0]), 64)
    for layer in range(2):
        here, there = f"model.layers.{layer}.", f"blk.{layer}."
        add(here + "input_layernorm.weight", there + "attn_norm.weight", 64)
        add(here + "self_attn.q_proj.weight", there + "attn_q.weight", 64, 64, heads=4)
        add(here + "self_attn.k_proj.weight", there + "attn_k.weight", 32, 64, heads=2)
        add(here + "self_attn.v_proj.weight", there + "attn_v.weight", 32, 64)
        add(here + "self_attn.o_proj.weight", there + "attn_output.weight", 64, 64)
        add(here + "post_attention_layernorm.weight", there + "ffn_norm.weight", 64)
        add(here + "mlp.gate_proj.weight", there + "ffn_gate.weight", 96, 64)
        add(here + "mlp.up_proj.weight", there + "ffn_up.weight", 96, 64)
        add(here + "mlp.down_proj.weight", there + "ffn_down.weight", 64, 96)
    add("model.norm.weight", "output_norm.weight", 64)
    return published, stored


def write_llama(path: Path, weight_type: str = "Q8_0", tokenizer: str | None = "smollm") -> dict[str, np.ndarray]:
    """A tied llama GGUF file; returns its weights by published name, before quantisation."""
    published, stored = llama_tensors(weight_type=weight_type)
    write_gguf(path, "llama", LLAMA, stored, tokenizer, bos=1, eos=2, unknown=0, padding=2)
    return published


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    """A safetensors file from a header (an object, or JSON text as bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
