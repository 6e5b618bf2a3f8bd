"""Reading safetensors: values equal the library's, and every malformed file is a CheckpointError that names it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from weights.samples import safetensors_bytes

from firstlight.errors import CheckpointError
from firstlight.weights.safetensors_reader import DTYPES, read_safetensors, read_safetensors_file


def write(path: Path, header: object, data: bytes = b"") -> Path:
    path.write_bytes(safetensors_bytes(header, data))
    return path


def entry(dtype: str = "U8", shape: list[int] | None = None, offsets: list[int] | None = None) -> dict:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": offsets or [0, 4]}


def test_values_of_every_dtype_equal_those_written(tmp_path):
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for dtype in DTYPES.values():
        raw = torch.randint(0, 2 if dtype is torch.bool else 128, (3, 5, dtype.itemsize), generator=generator)
        expected[str(dtype)] = raw.to(torch.uint8).view(dtype).reshape(3, 5)
    expected["scalar"] = torch.tensor(2.5)
    expected["empty"] = torch.empty(0, 7)
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_safetensors(tmp_path)
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        tensor = tensors[name]
        assert (tensor.shape, tensor.dtype, tensor.nbytes) == (tuple(values.shape), values.dtype, values.nbytes)
        loaded = tensor.load()
        assert loaded.dtype == values.dtype
        assert loaded.shape == values.shape
        assert loaded.flatten().view(torch.uint8).equal(values.flatten().view(torch.uint8))


@pytest.mark.parametrize(
    "ranges", [None, [(1, 3)], [None, (0, 2)], [(2, 2)], [(0, 4), (1, 5), (2, 3)], [None, None, (0, 3)]]
)
def test_slices(tmp_path, ranges):
    values = torch.arange(60, dtype=torch.float32).reshape(4, 5, 3)
    save_file({"x": values}, tmp_path / "model.safetensors")
    index = tuple(slice(None) if part is None else slice(*part) for part in ranges or ())
    assert read_safetensors(tmp_path)["x"].load_slice(ranges).equal(values[index])


@pytest.mark.parametrize("ranges", [[(0, 5)], [(-1, 2)], [(3, 2)], [None, None, None, None]])
def test_slices_outside_the_shape_are_refused(tmp_path, ranges):
    save_file({"some.weight": torch.zeros(4, 5, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(IndexError, match=r"some\.weight.*\[4, 5, 3\]"):
        read_safetensors(tmp_path)["some.weight"].load_slice(ranges)


def test_a_tensor_that_is_not_aligned(tmp_path):
    data = b"\x01" + torch.tensor([1.5, -2.0, 3.25]).numpy().tobytes()
    header = {"a": entry("U8", [1], [0, 1]), "b": entry("F32", [3], [1, 13])}
    text = json.dumps(header).encode()
    path = write(tmp_path / "m.safetensors", text + b" " * (-len(text) % 8), data)
    tensors = read_safetensors_file(path)
    assert tensors["b"].load().tolist() == [1.5, -2.0, 3.25]
    assert tensors["b"].load_slice([(1, 2)]).tolist() == [-2.0]


def test_loading_does_not_change_the_file(tmp_path):
    save_file({"x": torch.zeros(4)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    read_safetensors(tmp_path)["x"].load().fill_(1)
    assert (tmp_path / "model.safetensors").read_bytes() == before


MALFORMED = {
    "dtype and shape": (b"{", "not valid JSON"),
    "not an object": ([], "must be a JSON object"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "twice": (b'{"a": 1, "a": 2}', "appears twice"),
    "nan": (b'{"a": NaN}', "NaN is not JSON"),
    "deep": (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "entry": ({"a": 3}, "'a'.*object with dtype"),
    "field": ({"a": {**entry(), "more": 1}}, "object with dtype"),
    "no field": ({"a": {"dtype": "U8", "shape": [4]}}, "object with dtype"),
    "dtype": ({"a": entry("F4")}, "dtype 'F4' is not supported; supported: BOOL"),
    "dtype kind": ({"a": {**entry(), "dtype": ["U8"]}}, "not supported"),
    "negative": ({"a": entry(shape=[-4])}, "shape must be"),
    "boolean": ({"a": entry(shape=[True, 4])}, "shape must be"),
    "float": ({"a": entry(shape=[4.0])}, "shape must be"),
    "dimensions": ({"a": entry(shape=[1] * 17)}, "at most 16"),
    "huge": ({"a": entry(shape=[2**62, 4, 0], offsets=[0, 0])}, "under 2"),
    "overflow": ({"a": entry(shape=[2**32, 2**32, 2**32])}, "under 2"),
    "offsets": ({"a": entry(offsets=[0, 4, 4])}, "data_offsets must be"),
    "backwards": ({"a": entry(offsets=[4, 0])}, "begin <= end"),
    "size": ({"a": entry(shape=[3])}, r"U8 \[3\] takes 3 bytes, but data_offsets give it 4"),
    "overlap": ({"a": entry(), "b": entry(shape=[3], offsets=[1, 4])}, "'b'.*overlaps"),
    "same": ({"a": entry(), "b": entry()}, "'b'.*overlaps"),
    "hole": ({"a": entry(shape=[2], offsets=[2, 4])}, "no tensor owns bytes 0 to 2"),
    "rest": ({"a": entry(shape=[2], offsets=[0, 2])}, "no tensor owns bytes 2 to 4"),
    "short": ({"a": entry(shape=[9], offsets=[0, 9])}, "too short: tensor 'a' ends at byte 9 .* only 4"),
    "metadata": ({"__metadata__": {"a": 1}, "a": entry()}, "__metadata__"),
    "metadata kind": ({"__metadata__": [], "a": entry()}, "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_headers(tmp_path, case):
    header, message = MALFORMED[case]
    path = write(tmp_path / "bad.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_safetensors_file(path)
    assert "bad.safetensors" in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"\0" * 7, "7 bytes are too few"),
        (b"\xff" * 64, "claims 18446744073709551615 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "claims 1000 bytes; the file has 10"),
    ],
)
def test_files_that_are_too_short(tmp_path, content, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_safetensors_file(path)


def test_every_cut_of_a_file_is_refused(tmp_path):
    save_file({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    for size in range(0, len(content), 7):
        (tmp_path / "cut.safetensors").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            read_safetensors_file(tmp_path / "cut.safetensors")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors(tmp_path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_files_read_or_raise_checkpoint_error(tmp_path_factory, data):
    header = {"__metadata__": {"format": "pt"}, "a": entry("F32", [2, 3], [0, 24]), "bb": entry("BF16", [3], [24, 30])}
    content = bytearray(safetensors_bytes(header, bytes(30)))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["byte", "digit", "cut", "insert", "delete"]))
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        if kind == "byte" and content:
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "digit" and content:
            content[at] = ord(data.draw(st.sampled_from('0123456789-,:[]{}"e.')))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=8))
        elif kind == "delete":
            del content[at : at + data.draw(st.integers(1, 8))]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(bytes(content))
    try:
        tensors = read_safetensors_file(path)
    except CheckpointError as error:
        tensors, message = {}, str(error)
    else:
        message = str(path)
    assert "mutated.safetensors" in message
    for tensor in tensors.values():
        assert tensor.load().shape == tensor.shape


def write_shards(directory: Path) -> dict[str, torch.Tensor]:
    """Three tensors in two shards, with an index."""
    tensors = {name: torch.full((2, 3), float(i)) for i, name in enumerate("abc")}
    save_file({"a": tensors["a"], "b": tensors["b"]}, directory / "model-00001-of-00002.safetensors")
    save_file({"c": tensors["c"]}, directory / "model-00002-of-00002.safetensors")
    names = {"a": 1, "b": 1, "c": 2}
    write_index(directory, {name: f"model-0000{part}-of-00002.safetensors" for name, part in names.items()})
    return tensors


def write_index(directory: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 72}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards(tmp_path):
    expected = write_shards(tmp_path)
    tensors = read_safetensors(tmp_path)
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].load().equal(values) for name, values in expected.items())
    assert tensors["c"].path.name == "model-00002-of-00002.safetensors"


def test_shards_behind_links_out_of_the_directory(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_shards(tmp_path / "blobs")
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert set(read_safetensors(tmp_path / "snapshot")) == {"a", "b", "c"}


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: missing shard: .* places 1 tensors"):
        read_safetensors(tmp_path)


def test_a_short_shard_is_named(tmp_path):
    write_shards(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: the file is too short: tensor 'c'"):
        read_safetensors(tmp_path)


def test_a_tensor_that_is_not_in_its_shard(tmp_path):
    write_shards(tmp_path)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "d": "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-00002.*tensor 'd' is not in it"):
        read_safetensors(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    write_shards(tmp_path)
    save_file({"c": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'b' is in model-00001-of-00002\.safetensors too"):
        read_safetensors(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_there(tmp_path):
    write_shards(tmp_path)
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    assert set(read_safetensors(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "x\\..\\y.safetensors",
        "C:x.safetensors",
        "x.bin",
        "",
        "\0.safetensors",
        "\ud800.safetensors",
        "n" * 300 + ".safetensors",
        "..",
    ],
)
def test_shard_names_must_stay_inside_the_directory(tmp_path, name):
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    (tmp_path / "model").mkdir()
    write_index(tmp_path / "model", {"a": name})
    with pytest.raises(CheckpointError, match=r"is not the name of a \*\.safetensors file inside") as raised:
        read_safetensors(tmp_path / "model")
    str(raised.value).encode()


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 3}, {"a": ["x.safetensors"]}])
def test_malformed_indices(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map must be"):
        read_safetensors(tmp_path)


def test_which_file_to_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_safetensors(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    assert set(read_safetensors(tmp_path)) == {"a"}
    save_file({"b": torch.zeros(1)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(more\.safetensors, weights\.safetensors"):
        read_safetensors(tmp_path)
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert set(read_safetensors(tmp_path)) == {"c"}
