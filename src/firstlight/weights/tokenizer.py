"""Text to token ids and back, and chats to prompts, as the checkpoint declares.

The work is done by the `tokenizers` library; `transformers` would do the same, but takes seconds to import. What a
checkpoint says in tokenizer.json, tokenizer_config.json, generation_config.json and the chat template (or in a GGUF
file's metadata) is brought together here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from firstlight.errors import ChatTemplateError, CheckpointError, TokenizerError
from firstlight.weights.chat_template import ChatTemplate
from firstlight.weights.gguf_file import GgufFile
from firstlight.weights.gguf_tokenizer import gguf_tokenizer, special_token
from firstlight.weights.location import MAX_CONFIG_BYTES, locate
from firstlight.weights.strict_json import parse_json_object, read_bytes, read_json_object
from firstlight.weights.text_stream import ByteLevelText, IncrementalText, WindowText

MAX_TOKENIZER_BYTES = 200_000_000
GGUF_STOPS = ("eos", "eot", "eom")
"""Tokens that end an answer: `tokenizer.ggml.<name>_token_id`."""


class Tokenizer:
    """A checkpoint's tokenizer. Safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        stop_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """special_tokens: text by name ("bos_token", "eos_token", ...), as chat templates know them."""
        self.backend = backend
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the checkpoint names one."""
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the checkpoint names one. `stop_token_ids` has all that end an answer."""
        return self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. With `add_special_tokens`, BOS and the like are put where the checkpoint wants them.

        Special tokens that are written out in the text become single ids.
        Raises TokenizerError if the text holds surrogates, which aren't characters.
        """
        try:
            # A batch of one: unlike `encode`, it lets other threads of the process go on meanwhile.
            ids: list[int] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return ids
        except (UnicodeEncodeError, TypeError) as error:
            raise TokenizerError(f"the text is not valid Unicode: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; U+FFFD stands for bytes that aren't UTF-8, and unknown ids for nothing."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def incremental_text(self, skip_special_tokens: bool) -> IncrementalText:
        """What a `TextStream` works with."""
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteLevelText(lambda token: b"" if token in hidden else self._bytes_of(token))
        return WindowText(
            lambda ids: self.decode(ids, skip_special_tokens), lambda token: token in hidden or self._is_byte(token)
        )

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and json.loads(decoder.__getstate__()).get("type") == "ByteLevel"

    def _bytes_of(self, token: int) -> bytes:
        """What a token stands for in a byte-level vocabulary: each character is a byte, unless one is foreign."""
        text = self.backend.id_to_token(token)
        if text is None:
            return b""
        values = [BYTE_OF_CHARACTER.get(character) for character in text]
        return text.encode() if None in values else bytes(value for value in values if value is not None)

    def _is_byte(self, token: int) -> bool:
        text = self.backend.id_to_token(token)
        return text is not None and len(text) == 6 and text.startswith("<0x") and text.endswith(">")

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise ChatTemplateError("this checkpoint has no chat template; send a plain prompt instead of messages")
        return ChatTemplate(self.chat_template, self.special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a chat. Encode it with add_special_tokens=False: the template writes them itself.

        messages: {"role": ..., "content": ...}; tools: JSON schemas; variables: further names that the template may use.
        Raises ChatTemplateError if there is no template, or it refuses the messages, fails or does too much work.
        """
        return self._compiled_template.render(messages, add_generation_prompt, tools, **variables)


class TextStream:
    """One answer's text, piece by piece: the pieces, joined, are `decode` of all ids pushed."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._text = tokenizer.incremental_text(skip_special_tokens)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; bytes of an unfinished character wait for the next call."""
        return self._text.push(ids)

    def flush(self) -> str:
        """What is left at the end, with U+FFFD for unfinished characters."""
        return self._text.flush()


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves, as Latin-1; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_characters()


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of the checkpoint at a path, without opening its weights; None if it has no tokenizer.

    Raises CheckpointError or TokenizerError, naming the file, if there is no checkpoint, or its tokenizer is malformed
    or of an unsupported kind.
    """
    return load_tokenizer_and_stops(path)[0]


def load_tokenizer_and_stops(path: str | Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """The tokenizer of the checkpoint at a path, as `load_tokenizer`, and the token ids that end its answers.

    A checkpoint without a tokenizer declares those too: its answers end where the model ends them.
    """
    location = locate(path)
    if location.gguf is not None:
        metadata = GgufFile(location.gguf).metadata
        tokenizer = tokenizer_from_gguf(metadata, location.gguf)
        # Without a vocabulary there is nothing to check them against.
        declared = [id for key in GGUF_STOPS for id in _ids(metadata.get(f"tokenizer.ggml.{key}_token_id"))]
    else:
        config, generation = location.read_configs()
        tokenizer = tokenizer_from_directory(location.directory, config, generation)
        declared = declared_stops(config, generation)
    return tokenizer, tuple(dict.fromkeys(declared)) if tokenizer is None else tokenizer.stop_token_ids


def tokenizer_from_directory(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Tokenizer | None:
    """The tokenizer in a checkpoint's directory; `config` and `generation` are its config.json and generation_config.json.

    None if there is no tokenizer.json. Raises CheckpointError, naming the file, if one is malformed.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    backend = _read_backend(path)
    backend.no_truncation()
    backend.no_padding()
    options_path = directory / "tokenizer_config.json"
    options = read_json_object(options_path, MAX_CONFIG_BYTES) if options_path.exists() else {}
    special_tokens = {name: text for name, value in options.items() if (text := _token_text(name, value)) is not None}
    stop = declared_stops(config, generation)
    tokenizer = Tokenizer(backend, stop, special_tokens, _template_in(directory, options))
    if tokenizer.eos_token_id is not None:
        tokenizer.stop_token_ids = tuple(dict.fromkeys((*stop, tokenizer.eos_token_id)))
    return tokenizer


def _read_backend(path: Path) -> Backend:
    """The tokenizer in a tokenizer.json. Raises CheckpointError, naming the file."""
    content = read_bytes(path, MAX_TOKENIZER_BYTES)
    model = parse_json_object(content, str(path)).get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix") and model.get("type", "BPE") == "BPE":
        # The library takes the prefix's length off every merge unchecked, and ends the process if one is shorter.
        raise CheckpointError(f"{path}: a continuing_subword_prefix in a BPE tokenizer is not supported")
    try:
        return Backend.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare Exception from the library, or PanicException, which is no Exception
        raise CheckpointError(f"{path}: not a valid tokenizer: {str(error)[:300]}") from error


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer | None:
    """The tokenizer in a GGUF file's metadata, or None. Raises TokenizerError or CheckpointError, naming the file."""
    if "tokenizer.ggml.model" not in metadata:
        return None
    backend = gguf_tokenizer(metadata, path)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special_tokens = {
        name: tokens[token] for key, name in names.items() if (token := special_token(metadata, key, path)) is not None
    }
    stop = [token for key in GGUF_STOPS if (token := special_token(metadata, key, path)) is not None]
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: tokenizer.chat_template is not a string")
    return Tokenizer(backend, stop, special_tokens, template)


def declared_stops(config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """The ids that end an answer, of generation_config.json, or else of config.json; an id or a list in either."""
    return _ids(generation.get("eos_token_id")) or _ids(_text_config(config).get("eos_token_id"))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if "eos_token_id" not in config and isinstance(nested, dict) else config


def _ids(value: Any) -> list[int]:
    """Ids from an id, a list of ids or nothing."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _token_text(name: str, value: Any) -> str | None:
    """A special token's text, which may be a string or an object with `content`."""
    if not name.endswith("_token"):
        return None
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template_in(directory: Path, options: Mapping[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, chat_template.json, or the one in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bytes(path, MAX_CONFIG_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: not UTF-8: {error}") from error
    template = options.get("chat_template")
    if template is None and (path := directory / "chat_template.json").is_file():
        template = read_json_object(path, MAX_CONFIG_BYTES).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory}: the chat template is not a string")
    return template
