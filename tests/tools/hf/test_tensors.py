"""Safetensors files: whole ones come back as they were written, mistaken and hostile ones are refused in a line."""

import json
import random

import numpy as np
import pytest

from jformer.errors import UserError
from jformer.tools.hf.tensors import INDEX, WHOLE, Tensors, write

pytest.importorskip("safetensors", reason="the extra hf is not installed")
ARRAYS = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float32)}


def raw(path, header, data=b""):
    """Write a file with a header as it is given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(begin=0, end=8, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(("shard_bytes", "files"), [(10**9, 1), (24, 2)])
def test_what_is_written_comes_back(tmp_path, shard_bytes, files):
    write(tmp_path, ARRAYS.items(), shard_bytes)
    source = Tensors(tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) == files
    assert (tmp_path / INDEX).exists() == (files > 1)
    assert source.shapes() == {"a.weight": (2, 3), "b": (5,)}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(source.read(name), array)


@pytest.mark.parametrize(("dtype", "data", "expected"), [
    ("F16", np.array([1.5, -2], "<f2").tobytes(), [1.5, -2]), ("F64", np.array([0.25, 4]).tobytes(), [0.25, 4]),
    ("BF16", np.array([0x3FC0, 0xC000], "<u2").tobytes(), [1.5, -2]),
])  # fmt: skip
def test_other_floating_point_types_become_float32(tmp_path, dtype, data, expected):
    raw(tmp_path / WHOLE, {"x": entry(0, len(data), dtype=dtype)}, data)
    found = Tensors(tmp_path).read("x")
    assert found.dtype == np.float32
    assert found.tolist() == expected


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I64"])
def test_types_that_are_not_read_are_named(tmp_path, dtype):
    size = 16 if dtype == "I64" else 2
    raw(tmp_path / WHOLE, {"x": entry(0, size, dtype=dtype)}, bytes(size))
    with pytest.raises(UserError, match=f"x holds {dtype}, not one of F64"):
        Tensors(tmp_path).read("x")


@pytest.mark.parametrize(("header", "size", "says"), [
    ({"x": entry(), "y": entry(4, 12)}, 12, "overlaps"),
    ({"x": entry(), "y": entry(12, 20)}, 20, "gap"),
    ({"x": entry()}, 4, "header describes"),
    ({"x": entry()}, 99, "header describes"),
    ({"x": entry(shape=(3,))}, 8, "8 bytes are not F32"),
    ({"x": entry(shape=(-2,))}, 8, "whole numbers"),
    ({"x": entry(shape=(True, 2))}, 8, "whole numbers"),
    ({"x": entry(shape=(10**30, 0))}, 8, "8 bytes are not F32"),
    ({"x": entry(dtype="F8")}, 8, "F8"),
    ({"x": {"dtype": "F32"}}, 8, "shape"),
    (b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "x": 1}', 8, "the key 'x' occurs twice"),
    (b"[1]", 0, "not a list of tensors"),
    (b"{", 0, "not a list of tensors"),
])  # fmt: skip
def test_headers_that_cannot_be_true_are_refused(tmp_path, header, size, says):
    raw(tmp_path / WHOLE, header, bytes(size))
    with pytest.raises(UserError, match=says) as error:
        Tensors(tmp_path)
    assert WHOLE in str(error.value)


@pytest.mark.parametrize("content", [b"", b"123", (2**62).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"])
def test_a_header_of_an_absurd_length_is_refused_unread(tmp_path, content):
    (tmp_path / WHOLE).write_bytes(content)
    with pytest.raises(UserError, match="cannot hold a header"):
        Tensors(tmp_path)


@pytest.mark.parametrize(("numbers", "dtype", "says"), [
    ([1.0, np.nan], "F32", "not finite"), ([np.inf, 0], "F32", "not finite"), ([1.0, 2.0], "I32", "holds I32"),
])  # fmt: skip
def test_what_is_no_finite_number_is_refused(tmp_path, numbers, dtype, says):
    raw(tmp_path / WHOLE, {"x": entry(dtype=dtype)}, np.array(numbers, np.float32).tobytes())
    source = Tensors(tmp_path)
    with pytest.raises(UserError, match=f"x .*{says}|{says}"):
        source.read("x")


@pytest.mark.parametrize(("file", "says"), [
    ("../model.safetensors", "not a safetensors file beside it"), ("/etc/x.safetensors", "beside it"),
    ("gone.safetensors", "not there"), (f"{300 * 'x'}.safetensors", "not there"), ("model.bin", "beside it"),
])  # fmt: skip
def test_an_index_names_files_beside_it_and_no_others(tmp_path, file, says):
    write(tmp_path, ARRAYS.items())
    (tmp_path / WHOLE).rename(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a.weight": "a.safetensors", "b": file}}))
    with pytest.raises(UserError, match=says):
        Tensors(tmp_path)


def test_index_and_files_must_agree(tmp_path):
    write(tmp_path, ARRAYS.items())
    (tmp_path / WHOLE).rename(tmp_path / "a.safetensors")
    for names in (["a.weight"], ["a.weight", "b", "c"]):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
        with pytest.raises(UserError, match="is in only one of this file and"):
            Tensors(tmp_path)
    write(tmp_path, [("a.weight", ARRAYS["a.weight"])])
    assert Tensors(tmp_path).shapes() == {"a.weight": (2, 3)}  # as transformers reads the whole file where both are


def test_pickle_is_refused_with_the_line_that_converts_it(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*reads no pickle.*jformer\.hf unpickle"):
        Tensors(tmp_path)


def test_mutated_files_are_refused_or_harmless(tmp_path):
    """Of 500 files with flipped, cut, doubled or swapped bytes, all are refused in a line or read as finite numbers."""
    write(tmp_path, ARRAYS.items())
    whole, rng, refused = (tmp_path / WHOLE).read_bytes(), random.Random(0), 0
    for _ in range(500):
        content = bytearray(whole)
        place = rng.randrange(len(content))
        match rng.randrange(4):
            case 0:
                content[place] ^= 1 << rng.randrange(8)
            case 1:
                del content[place:]
            case 2:
                content[place:place] = content[rng.randrange(len(content)) :]
            case 3:
                other = rng.randrange(len(content))
                content[place], content[other] = content[other], content[place]
        (tmp_path / WHOLE).write_bytes(content)
        try:
            source = Tensors(tmp_path)
            assert all(np.isfinite(source.read(name)).all() for name in source.shapes())
        except UserError as error:
            assert WHOLE in str(error)
            refused += 1
    assert 300 < refused < 500


def test_what_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"missing: could not be written \(Error while serializing.*free some space"):
        write(tmp_path / "missing", ARRAYS.items())
