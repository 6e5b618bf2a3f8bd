"""A tokenizer from a GGUF file's metadata: byte-level BPE from its tokens, merges and kind of pre-tokenizer.

`tokenizer.ggml.pre` names how text is cut before merging. The cuts here are those of the published tokenizer.json of the
models that carry each name. SentencePiece vocabularies ("llama" in `tokenizer.ggml.model`) are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from firstlight.errors import CheckpointError, TokenizerError

CONTROL, USER_DEFINED = 3, 4
"""Kinds of token in tokenizer.ggml.token_type that are matched whole in a text; control tokens aren't part of it."""

LLAMA3_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_5_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

LLAMA3_KINDS = ("llama3", "llama-v3", "llama-bpe")
SINGLE_DIGIT_KINDS = ("smollm", "starcoder", "refact", "codeshell")
KINDS = ("gpt-2", "default", *SINGLE_DIGIT_KINDS, "qwen2", "qwen35", *LLAMA3_KINDS)


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Backend:
    """The tokenizer that a GGUF file's metadata describes.

    Raises TokenizerError if it is of an unsupported kind, CheckpointError if it is malformed; both name the file.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise TokenizerError(f"{path}: tokenizer model {model!r} is not supported; supported: gpt2 (byte-level BPE)")
    kind = metadata.get("tokenizer.ggml.pre", "default")
    if kind not in KINDS:
        raise TokenizerError(f"{path}: pre-tokenizer {kind!r} is not supported; supported: {', '.join(KINDS)}")
    tokens, merges = _texts(metadata, "tokens", path), _texts(metadata, "merges", path)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens: {len(tokens) - len(vocabulary)} tokens appear twice")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if not all(left and right and " " not in right for left, right in pairs):
        raise CheckpointError(f"{path}: tokenizer.ggml.merges: a merge must be two tokens and a space between them")
    try:
        backend = Backend(BPE(vocab=vocabulary, merges=pairs, ignore_merges=kind in LLAMA3_KINDS))
    except Exception as error:  # the library raises bare Exception, for a merge of unknown tokens
        raise CheckpointError(f"{path}: the tokenizer's merges don't fit its tokens: {error}") from error
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    if kind in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    _add_special_tokens(backend, tokens, metadata, path)
    _add_template(backend, tokens, metadata, kind, path)
    return backend


def _texts(metadata: Mapping[str, Any], key: str, path: Path) -> list[str]:
    texts = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(texts, list) or not texts:
        raise CheckpointError(f"{path}: tokenizer.ggml.{key} is missing or not a list of strings")
    return texts


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind in SINGLE_DIGIT_KINDS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = QWEN2_CUT if kind == "qwen2" else QWEN3_5_CUT if kind == "qwen35" else LLAMA3_CUT
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_special_tokens(backend: Backend, tokens: list[str], metadata: Mapping[str, Any], path: Path) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type", np.empty(0, np.int32))
    if not isinstance(kinds, np.ndarray) or (kinds.size and kinds.size != len(tokens)):
        raise CheckpointError(f"{path}: tokenizer.ggml.token_type must have a number for each of {len(tokens)} tokens")
    for number, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [tokens[index] for index in np.flatnonzero(kinds == number) if tokens[index]]
        added = [AddedToken(text, normalized=False, special=special) for text in texts]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def special_token(metadata: Mapping[str, Any], key: str, path: Path) -> int | None:
    """The id in tokenizer.ggml.<key>_token_id, or None. Raises CheckpointError if it isn't in the vocabulary."""
    token = metadata.get(f"tokenizer.ggml.{key}_token_id")
    size = len(_texts(metadata, "tokens", path))
    if token is not None and (type(token) is not int or not 0 <= token < size):
        raise CheckpointError(
            f"{path}: tokenizer.ggml.{key}_token_id: {token!r} is not below {size}, the vocabulary's size"
        )
    return token


def _add_template(backend: Backend, tokens: list[str], metadata: Mapping[str, Any], kind: str, path: Path) -> None:
    """What `encode` puts around a text: BOS and EOS, where the metadata (or the kind's custom) says so."""
    before, after = [], []
    if metadata.get("tokenizer.ggml.add_bos_token", kind in LLAMA3_KINDS):
        before = [token] if (token := special_token(metadata, "bos", path)) is not None else []
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        after = [token] if (token := special_token(metadata, "eos", path)) is not None else []
    if before or after:
        parts = [tokens[token] for token in before] + ["$A"] + [tokens[token] for token in after]
        pairs = [(tokens[token], token) for token in dict.fromkeys(before + after)]
        backend.post_processor = processors.TemplateProcessing(single=parts, pair=None, special_tokens=pairs)
