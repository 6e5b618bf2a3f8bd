"""Opening checkpoints of every form, and what is said of those that can't be opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from weights.samples import write_gguf, write_llama

from firstlight.errors import CheckpointError, FirstlightError, TokenizerError
from firstlight.weights.checkpoint import open_checkpoint
from firstlight.weights.location import model_name

CONFIG = {"model_type": "llama", "hidden_size": 8, "auto_map": {"AutoConfig": "evil.EvilConfig"}}


def write_directory(directory):
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(2)}, directory / "model.safetensors")
    return directory


def test_a_directory_of_safetensors(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": 7}
    assert checkpoint.has_weights
    assert checkpoint.path == tmp_path
    assert checkpoint.tensors["a"].load().tolist() == [1, 1]
    assert checkpoint.tensors is checkpoint.tensors
    with pytest.raises(TokenizerError, match="has no tokenizer, so it takes token ids, not text"):
        checkpoint.tokenizer()


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    (tmp_path / "modeling_llama.py").write_text("raise SystemExit('run')")
    assert set(open_checkpoint(tmp_path).tensors) == {"a"}


def test_weights_are_not_looked_at_before_they_are_asked_for(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.has_weights
    with pytest.raises(CheckpointError, match="5 bytes are too few"):
        assert checkpoint.tensors


def test_a_configuration_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text('{"model_type": "qwen3"}')
    for path, model_type in (
        (tmp_path, "llama"),
        (tmp_path / "config.json", "llama"),
        (tmp_path / "other.json", "qwen3"),
    ):
        checkpoint = open_checkpoint(path)
        assert not checkpoint.has_weights
        assert checkpoint.config["model_type"] == model_type
        assert len(checkpoint.tensors) == 0


def test_a_gguf_file_and_a_directory_with_one(tmp_path):
    published = write_llama(tmp_path / "model.Q8_0.gguf")
    for path in (tmp_path, tmp_path / "model.Q8_0.gguf"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == tmp_path / "model.Q8_0.gguf"
        assert checkpoint.config["model_type"] == "llama"
        assert checkpoint.has_weights
        assert checkpoint.tensors.keys() == published.keys()
        assert checkpoint.tokenizer().decode(checkpoint.tokenizer().encode("Hi")) == "Hi"
        assert checkpoint.generation_config == {}


def test_a_gguf_file_without_a_tokenizer(tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", {}, {})
    with pytest.raises(CheckpointError, match=r"m\.gguf: metadata llama\.attention\.head_count is missing"):
        open_checkpoint(tmp_path)
    write_llama(tmp_path / "m.gguf", tokenizer=None)
    with pytest.raises(CheckpointError, match=r"llama\.vocab_size is missing"):
        open_checkpoint(tmp_path)


def test_safetensors_win_over_a_gguf_file_beside_them(tmp_path):
    write_llama(tmp_path / "m.gguf")
    write_directory(tmp_path)
    assert set(open_checkpoint(tmp_path).tensors) == {"a"}


def test_two_gguf_files(tmp_path):
    write_llama(tmp_path / "a.gguf")
    write_llama(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one, such as .*a\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickled_weights_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/run'\ntR.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(
            CheckpointError, match=rf"{name}: pickled weights can run code .* convert them to safetensors"
        ):
            open_checkpoint(path)


def test_paths_that_are_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    for path, message in (
        (tmp_path / "empty", "neither a config.json nor a .gguf file"),
        (tmp_path / "notes.txt", "not a checkpoint; give the directory"),
        (tmp_path / "nothing", "no such file or directory"),
        ("some/model", "no such file or directory"),
        (tmp_path / "missing.gguf", "no such file or directory"),
        ("n" * 5000, "can't be read"),
        ("a\0b", "can't be read|no such file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "must be a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": Infinity}', "Infinity is not JSON"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_malformed_configurations(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(tmp_path)
    assert "config.json" in str(raised.value)


def test_all_errors_are_firstlight_errors():
    assert issubclass(CheckpointError, FirstlightError)
    assert issubclass(TokenizerError, FirstlightError)


@pytest.mark.parametrize("path", ["Some-Model", "Some-Model/config.json", "Some-Model.gguf", "configs/Some-Model.json"])
def test_a_model_is_called_as_its_directory_or_file(path: str, tmp_path: Path) -> None:
    assert model_name(tmp_path / path) == "Some-Model"
