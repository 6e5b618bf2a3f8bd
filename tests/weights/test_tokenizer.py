"""Tokenizers, from directories and from GGUF files, against the published forms and transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from weights.samples import CHAT_TEMPLATE, CONTROL, LLAMA, TEXT, USER_DEFINED, vocabulary, write_gguf

from firstlight.errors import ChatTemplateError, CheckpointError, TokenizerError
from firstlight.weights.gguf_tokenizer import KINDS, gguf_tokenizer
from firstlight.weights.tokenizer import (
    TextStream,
    Tokenizer,
    load_tokenizer,
    load_tokenizer_and_stops,
    tokenizer_from_gguf,
)

TEXTS = [
    "",
    "Hello world",
    "The quick brown fox",
    "it's THEY'RE isn't",
    "  two  spaces, then three   and a tab\t\tx",
    "\n\n\n lines \r\n of \n text",
    "numbers 1 12 123 1234 x9y 3.14",
    "naïve café — Größe e\u0301",
    "日本語の文章 привет مرحبا ไทย",
    "😀👩‍👩‍👧 \u0000\x7f \u00a0 \ufffd",
    "<|im_start|>user\nHi<|im_end|>\n<think>hm</think>",
    TEXT,
]


def published_tokenizer(kind: str) -> Backend:
    """What the tokenizer.json of models with this kind of pre-tokenizer holds, with the tests' vocabulary."""
    tokens, merges = vocabulary()
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=kind == "llama-bpe")
    )
    backend.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    if kind == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    else:
        digits, letters = {"llama-bpe": ("{1,3}", ""), "qwen2": ("", ""), "qwen35": ("", r"\p{M}")}[kind]
        word = rf"[\p{{L}}{letters}]+" if letters else r"\p{L}+"
        cut = (
            rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{word}|\p{{N}}{digits}"
            rf"| ?[^\s\p{{L}}{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind.startswith("qwen"):
        backend.normalizer = normalizers.NFC()
    if kind == "llama-bpe":
        backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    return backend


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", "qwen2", "qwen35"])
def test_gguf_tokenizers_equal_the_published_ones(tmp_path, kind):
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {}, kind, bos=1, eos=2)
    tokenizer, expected = load_tokenizer(tmp_path / "m.gguf"), published_tokenizer(kind)
    generator = random.Random(0)
    texts = TEXTS + ["".join(generator.choices(TEXT + " 0123  '\n", k=40)) for _ in range(200)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == expected.encode(text).ids, text
        assert tokenizer.decode(ids) == expected.decode(ids), text
    assert tokenizer.vocab_size == expected.get_vocab_size() == len(vocabulary()[0])


@pytest.mark.parametrize("kind", ["smollm", "qwen35"])
def test_gguf_tokenizers_equal_transformers(tmp_path, kind):
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {}, kind, bos=1, eos=2)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        if kind == "smollm" and any(map(str.isdigit, text)):
            continue  # transformers doesn't cut digits singly here, as the published tokenizer does
        if kind == "qwen35" and "e\u0301" in text:
            continue  # nor does it compose characters, as the published tokenizer does
        ids = tokenizer.encode(text)
        assert ids == expected.encode(text), text
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == expected.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == expected.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_special_tokens_of_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", LLAMA, {}, "smollm", bos=1, eos=2, eot=0, unknown=0)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.stop_token_ids) == (1, 2, (2, 0))
    assert tokenizer.special_tokens["unk_token"] == "<|endoftext|>"
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>b<|im_end|>"


def gguf_metadata(**changes: object) -> dict[str, object]:
    tokens, merges = vocabulary()
    names = {"model": "gpt2", "pre": "smollm", "tokens": list(tokens), "merges": list(merges)} | changes
    return {f"tokenizer.ggml.{name}": value for name, value in names.items() if value is not None}


@pytest.mark.parametrize(
    ("bos", "eos", "expected"), [(True, False, [1, None]), (True, True, [1, None, 2]), (False, True, [None, 2])]
)
def test_bos_and_eos_are_put_where_the_metadata_says(bos, eos, expected):
    metadata = gguf_metadata(add_bos_token=bos, add_eos_token=eos, bos_token_id=1, eos_token_id=2)
    tokenizer = tokenizer_from_gguf(metadata, Path("m.gguf"))
    inner = tokenizer.encode("brown", add_special_tokens=False)
    assert tokenizer.encode("brown") == [id for part in expected for id in (inner if part is None else [part])]


WRONG_METADATA = {
    "model": ({"model": "llama"}, TokenizerError, "tokenizer model 'llama' is not supported; supported: gpt2"),
    "pre": ({"pre": "viking"}, TokenizerError, "pre-tokenizer 'viking' is not supported; supported: gpt-2"),
    "no tokens": ({"tokens": None}, CheckpointError, r"tokenizer\.ggml\.tokens is missing"),
    "tokens": ({"tokens": ["a", "a"]}, CheckpointError, "1 tokens appear twice"),
    "merges": ({"merges": ["a b c"]}, CheckpointError, "two tokens and a space"),
    "unknown merges": ({"merges": ["Ω Ω"]}, CheckpointError, "merges don't fit its tokens"),
    "types": ({"token_type": np.zeros(3, np.int32)}, CheckpointError, r"token_type must have a number for each of \d+"),
    "eos": ({"eos_token_id": 10**6}, CheckpointError, r"eos_token_id: 1000000 is not below"),
    "eos kind": ({"eos_token_id": "x"}, CheckpointError, r"eos_token_id: 'x' is not below"),
}


@pytest.mark.parametrize("case", WRONG_METADATA)
def test_wrong_gguf_metadata(case):
    changes, error, message = WRONG_METADATA[case]
    with pytest.raises(error, match=message) as raised:
        tokenizer_from_gguf(gguf_metadata(**changes), Path("file.gguf"))
    assert "file.gguf" in str(raised.value)


def test_every_kind_can_be_built():
    for kind in KINDS:
        backend = gguf_tokenizer(gguf_metadata(pre=kind), Path("m.gguf"))
        assert backend.decode(backend.encode("The lazy dog 12").ids) == "The lazy dog 12"


def write_directory(directory: Path, **config: object) -> Path:
    published_tokenizer("smollm").save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    return directory


def test_a_directory_equals_transformers(tmp_path):
    write_directory(
        tmp_path,
        bos_token={"__type": "AddedToken", "content": "<|im_start|>", "special": True},
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer = load_tokenizer(tmp_path)
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == expected.encode(text)
        assert tokenizer.decode(ids) == expected.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages) == expected.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_truncation_and_padding_in_tokenizer_json_are_off(tmp_path):
    backend = published_tokenizer("smollm")
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path).encode(TEXT) == published_tokenizer("smollm").encode(TEXT).ids


@pytest.mark.parametrize(
    ("generation", "config", "declared"),
    [
        ({"eos_token_id": [0, 3]}, {"eos_token_id": 1}, (0, 3)),
        ({"eos_token_id": 3}, {}, (3,)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {"text_config": {"eos_token_id": 0}}, (0,)),
        (None, {}, ()),
        ({"eos_token_id": None}, {"eos_token_id": "no"}, ()),
    ],
)
def test_stop_tokens(tmp_path, generation, config, declared):
    write_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    tokenizer, stops = load_tokenizer_and_stops(tmp_path)
    assert stops == tokenizer.stop_token_ids == tuple(dict.fromkeys((*declared, 2)))  # 2: the tokenizer's own
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer_and_stops(tmp_path) == (None, declared)


def test_stop_tokens_of_a_gguf_file_without_a_tokenizer(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert load_tokenizer_and_stops(tmp_path / "m.gguf") == (None, (7, 5))


def test_where_the_chat_template_may_be(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    write_directory(tmp_path)
    with pytest.raises(ChatTemplateError, match="no chat template; send a plain prompt"):
        load_tokenizer(tmp_path).apply_chat_template(messages)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "from json"
    several = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "from a list"}]
    write_directory(tmp_path, chat_template=several)
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "from a list"
    write_directory(tmp_path, chat_template="from config {{ eos_token }}")
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "from config <|im_end|>"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert load_tokenizer(tmp_path).apply_chat_template(messages) == "from a file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not UTF-8"):
        load_tokenizer(tmp_path)


def test_wrong_directories(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path, chat_template=3)
    with pytest.raises(CheckpointError, match="the chat template is not a string"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: must be a JSON object"):
        load_tokenizer(tmp_path)


def test_a_prefix_that_would_end_the_process_is_refused(tmp_path):
    write_directory(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "##"
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a continuing_subword_prefix in a BPE tokenizer"):
        load_tokenizer(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_mutated_tokenizers_load_or_raise_checkpoint_error(tmp_path_factory, data):
    directory = tmp_path_factory.getbasetemp() / "mutated"
    directory.mkdir(exist_ok=True)
    tokenizer = json.loads(published_tokenizer("smollm").to_str())
    part = tokenizer
    while isinstance(part, dict) and part:
        key = data.draw(st.sampled_from(sorted(key for key in part if key not in ("vocab", "merges"))))
        if not isinstance(part[key], dict) or not part[key] or data.draw(st.booleans()):
            part[key] = data.draw(st.sampled_from([None, True, -1, 2**40, "", "x", [], {}, {"type": "ByteLevel"}]))
            break
        part = part[key]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text("{}")
    try:
        loaded = load_tokenizer(directory)
    except CheckpointError as error:
        loaded, message = None, str(error)
    else:
        message = str(directory / "tokenizer.json")
        loaded.decode(loaded.encode("Hello 123 é <think>"))
    assert "tokenizer.json" in message


def test_surrogates_are_refused(tmp_path):
    tokenizer = load_tokenizer(write_directory(tmp_path))
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def sentencepiece_like() -> Tokenizer:
    """A vocabulary whose tokens' text depends on their neighbours: spaces as ▁, bytes as <0x..>."""
    pieces = ["<unk>", "<s>", "▁", "▁he", "llo", "▁world", "a", "é", "日本", "!"]
    tokens = pieces + [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """Pieces from pushing ids in groups of the given sizes, repeated, and then the rest."""
    stream, pieces, at, turn = TextStream(tokenizer, skip), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, stream.flush()]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(published_tokenizer("smollm"))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_streamed_is_whole_for_random_ids(byte_level, data, skip, sizes):
    some_bytes = st.sampled_from(byte_level.encode("é日😀\x00ÿ", add_special_tokens=False))
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3) | st.integers(0, 260) | some_bytes, max_size=40))
    assert "".join(streamed(byte_level, ids, sizes, skip)) == byte_level.decode(ids, skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_streamed_text_has_no_broken_characters(byte_level, text, sizes):
    pieces = streamed(byte_level, byte_level.encode(text), sizes, skip=False)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_streamed_is_whole_for_sentencepiece_vocabularies(data, skip, sizes):
    tokenizer = sentencepiece_like()
    euro = st.sampled_from([10 + byte for byte in "€😀".encode()])
    ids = data.draw(st.lists(st.integers(0, 9) | st.integers(0, 265) | euro, max_size=40))
    assert "".join(streamed(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


def test_sentencepiece_text_comes_as_soon_as_it_is_complete():
    tokenizer = sentencepiece_like()
    euro = [10 + byte for byte in "€".encode()]
    assert streamed(tokenizer, [3, 4, 5, *euro, 9], [1]) == ["he", "llo", " world", "", "", "", "€!", ""]


def test_an_endless_run_of_bytes_is_given_in_the_end():
    stream = TextStream(sentencepiece_like())
    pieces = [stream.push([10 + 0xFF]) for _ in range(1000)]
    assert sum(map(len, pieces)) >= 900


def test_a_stream_can_be_used_again_after_flush(byte_level):
    stream = TextStream(byte_level)
    first, second = byte_level.encode("é")[0], byte_level.encode("hello")
    assert stream.push([first]) + stream.flush() == byte_level.decode([first])
    assert stream.push(second) + stream.flush() == "hello"


def test_the_tokenizer_does_not_import_torch_or_transformers(tmp_path):
    write_directory(tmp_path)
    code = (
        "import sys; from firstlight.weights.tokenizer import load_tokenizer; load_tokenizer(sys.argv[1]).encode('a');"
    )
    code += "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
