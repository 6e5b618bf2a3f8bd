"""The GGUF container: equal to the gguf package's reading, and safe against any damage."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.samples import write_llama

from firstlight.errors import CheckpointError
from firstlight.weights.gguf_file import GgufFile
from firstlight.weights.gguf_reader import read_gguf

U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "a", dimensions: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    """A description; dimensions innermost first."""
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def file_bytes(
    pairs: list[bytes] | None = None, tensors: list[bytes] | None = None, data: int = 4096, **head: int
) -> bytes:
    pairs, tensors = pairs or [], tensors or []
    counts = head.get("tensor_count", len(tensors)), head.get("pair_count", len(pairs))
    content = b"GGUF" + struct.pack("<IQQ", head.get("version", 3), *counts) + b"".join(pairs + tensors)
    return content + bytes(-len(content) % 32 + data)


def test_reading_equals_the_gguf_package(tmp_path):
    write_llama(tmp_path / "m.gguf")
    file, reader = GgufFile(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    assert list(file.entries) == [tensor.name for tensor in reader.tensors]
    for expected in reader.tensors:
        entry = file.entries[expected.name]
        assert entry.shape == tuple(reversed(expected.shape.tolist()))
        assert (entry.start, entry.nbytes) == (expected.data_offset, expected.n_bytes)
        assert entry.ggml_type == expected.tensor_type.name
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys()
    for name, field in fields.items():
        value = file.metadata[name]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == pytest.approx(field.contents()) if isinstance(value, float) else value == field.contents(), name


def test_every_kind_of_metadata(tmp_path):
    numbers = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 2**32 - 1), 5: ("i", -5)}
    numbers |= {6: ("f", 0.1), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**60)), 12: ("d", 0.1)}
    pairs = [pair(f"n{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in numbers.items()]
    pairs += [
        pair(f"a{kind}", ARRAY, struct.pack("<IQ" + 2 * code, kind, 2, value, value))
        for kind, (code, value) in numbers.items()
    ]
    pairs += [pair("s", STRING, text("é")), pair("as", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text(""))]
    (tmp_path / "m.gguf").write_bytes(file_bytes(pairs))
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    for kind, (_, value) in numbers.items():
        assert metadata[f"n{kind}"] == value
        assert metadata[f"a{kind}"].tolist() == [np.float32(value) if kind == 6 else value] * 2
    assert (metadata["s"], metadata["as"]) == ("é", ["x", ""])


DAMAGED = {
    "magic": (b"GGML" + bytes(60), "doesn't begin with 'GGUF'"),
    "empty": (b"", "cut short"),
    "version": (file_bytes(version=1), "GGUF version 1 is not supported; supported: 2 and 3"),
    "big-endian": (file_bytes(version=3 << 24), "big-endian"),
    "pairs": (file_bytes(pair_count=2**63), "cut short|appears twice"),
    "tensors": (file_bytes(tensor_count=2**63), "claims 9223372036854775808 tensors"),
    "string": (file_bytes([text("a") + struct.pack("<IQ", STRING, 2**62)]), "cut short"),
    "numbers": (file_bytes([pair("a", ARRAY, struct.pack("<IQ", U32, 2**60))]), "cut short"),
    "strings": (file_bytes([pair("a", ARRAY, struct.pack("<IQ", STRING, 2**60))], data=0), "cut short"),
    "nested": (file_bytes([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "'a': arrays of arrays"),
    "kind": (file_bytes([pair("a", 77, b"")]), "'a': unknown type 77"),
    "UTF-8": (file_bytes([pair("a", STRING, text(b"\xff"))]), "isn't UTF-8"),
    "key twice": (file_bytes([pair("a", U32, bytes(4))] * 2), "key 'a' appears twice"),
    "tensor twice": (file_bytes(None, 2 * [tensor()]), "tensor 'a': (appears twice|overlaps)"),
    "tensor twice apart": (file_bytes([], [tensor(), tensor(offset=128)]), "tensor 'a': appears twice"),
    "alignment": (file_bytes([pair("general.alignment", U32, struct.pack("<I", 24))]), "power of two"),
    "alignment kind": (file_bytes([pair("general.alignment", STRING, text("x"))]), "power of two"),
    "no dimensions": (file_bytes([], [tensor(dimensions=())]), "0 dimensions"),
    "dimensions": (file_bytes([], [tensor(dimensions=(1,) * 5)]), "5 dimensions"),
    "many dimensions": (file_bytes([], [text("a") + struct.pack("<I", 2**31) + bytes(64)]), "2147483648 dimensions"),
    "zero": (file_bytes([], [tensor(dimensions=(32, 0))]), r"impossible shape \[0, 32\]"),
    "product": (file_bytes([], [tensor(dimensions=(2**32, 2**32))]), "impossible shape"),
    "type": (file_bytes([], [tensor(kind=999)]), "unknown tensor type 999"),
    "block": (
        file_bytes([], [tensor(dimensions=(33,), kind=8)]),
        "rows of 33 are not a whole number of Q8_0 blocks of 32",
    ),
    "offset": (file_bytes([], [tensor(offset=4)]), "offset 4 is not a multiple of the alignment, 32"),
    "end": (file_bytes([], [tensor(offset=2**40)]), "'a': ends at byte .* cut short"),
    "large": (file_bytes([], [tensor(dimensions=(2**40,))]), "'a': ends at byte .* cut short"),
    "overlap": (file_bytes([], [tensor(), tensor("b", offset=96)]), "'b': overlaps the tensor before it"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files(tmp_path, case):
    content, message = DAMAGED[case]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        GgufFile(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(raised.value)


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_llama(path)
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_files_read_or_raise_checkpoint_error(tmp_path_factory, sample, data):
    content = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        # a third of the mutations each: the head, the tensor descriptions, anywhere
        limit = data.draw(st.sampled_from([600, 20_000, len(content)]))
        at = data.draw(st.integers(0, max(min(limit, len(content)) - 1, 0)))
        kind = data.draw(st.sampled_from(["byte", "word", "cut", "delete"]))
        if kind == "byte":
            content[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif kind == "word":
            content[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")]))
        elif kind == "cut":
            del content[at:]
        else:
            del content[at : at + data.draw(st.integers(1, 8))]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(bytes(content))
    try:
        _, tensors, _ = read_gguf(path)
    except CheckpointError as error:
        tensors, message = {}, str(error)
    else:
        message = str(path)
    assert "mutated.gguf" in message
    for stored in tensors.values():
        assert stored.load().shape == stored.shape
