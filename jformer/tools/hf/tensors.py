"""Read and write safetensors files: headers are validated, parts of tensors are read through a memory map.

A file is 8 bytes with the length of its header, the header as JSON, and the tensors. A damaged or hostile file is
refused: every offset must follow from the shapes and lie in the file. Reading does not use the library, whose slices
cannot express a part of a transposed or permuted tensor: each process would hold whole tensors.
"""

import json
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jformer.errors import UserError
from jformer.integrity import parse_object
from jformer.storage import is_file, unwritten

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
DTYPES: dict[str, Any] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
OTHERS = {  # bytes of types that are never read
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "U16": 2, "U32": 4, "U64": 8, "C64": 8, "F8_E4M3": 1,
    "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
PIECE = 1 << 24  # bytes of a file in memory at once
SHARD_BYTES = 5_000_000_000  # the most in a file of an export, unless one tensor is larger


class Tensor(NamedTuple):
    """The place of a tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file
    end: int


def _as_they_are(names: Collection[str]) -> dict[str, str]:
    return {name: name for name in names}


class Tensors:
    """The tensors of a model's directory, by name."""

    def __init__(self, directory: Path, rename: Callable[[Collection[str]], Mapping[str, str]] = _as_they_are) -> None:
        """Read the headers of all files; `rename` maps the names of all tensors.

        Raises UserError for an invalid file.
        """
        self.directory, self.found = directory, dict[str, Tensor]()
        for path, names in _files(directory).items():
            here = read_header(path)
            for name in here:
                if name in self.found:
                    raise UserError(f"{path}: tensor {name!r} is in {self.found[name].path.name} too; fix one of them")
            if names is not None and (wrong := sorted(names ^ here.keys())):
                raise UserError(f"{path}: tensor {wrong[0]!r} is in only one of this file and {INDEX}; restore both")
            self.found |= here
        current, renamed = rename(self.found), dict[str, Tensor]()
        for name, tensor in self.found.items():
            if current[name] in renamed:
                raise UserError(f"{directory}: {name!r} is also there under another name; remove one of them")
            renamed[current[name]] = tensor
        self.found = renamed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor."""
        return {name: tensor.shape for name, tensor in self.found.items()}

    def read(self, name: str, take: Callable[[np.ndarray], np.ndarray] = np.asarray) -> np.ndarray:
        """Return `take` of a tensor, such as a part of it, as float32; no more of the file is read.

        Raises UserError unless it holds finite floating-point numbers.
        """
        tensor = self.found[name]
        if tensor.dtype not in DTYPES:
            raise UserError(f"{tensor.path}: {name} holds {tensor.dtype}, not one of {', '.join(DTYPES)}")
        if tensor.path.stat().st_size < tensor.end:
            raise UserError(f"{tensor.path}: ends within {name}; fetch it again")
        with tensor.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        count = int(np.prod(tensor.shape, dtype=np.int64))
        whole = np.frombuffer(mapped, DTYPES[tensor.dtype], count, tensor.begin).reshape(tensor.shape)
        array = _copy(take(whole), mapped)
        if not np.isfinite(array).all():
            raise UserError(f"{tensor.path}: {name} holds numbers that are not finite in float32; restore the file")
        return array


def _copy(part: np.ndarray, mapped: mmap.mmap) -> np.ndarray:
    """Copy in pieces and release the pages of the file: the columns of a table span all of its pages."""
    if not part.ndim:
        return np.array(part, np.float32)
    array = np.empty(part.shape, np.float32)
    slowest = int(np.argmax(np.abs(part.strides)))
    source, target = np.moveaxis(part, slowest, 0), np.moveaxis(array, slowest, 0)
    rows = max(1, PIECE // max(1, abs(part.strides[slowest])))
    for begin in range(0, len(source), rows):
        target[begin : begin + rows] = source[begin : begin + rows]
        mapped.madvise(mmap.MADV_DONTNEED)
    return array


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file. Raise UserError for an invalid header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise UserError(f"{path}: {size} bytes cannot hold a header of {length}; fetch the file again")
        text = file.read(length)
    try:
        header = parse_object(text)
        header.pop("__metadata__", None)
        found = {name: _tensor(path, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its header is not a list of tensors ({error}); fetch the file again") from error
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: item[1].begin):
        if tensor.begin != end:
            raise UserError(f"{path}: {name} overlaps its neighbour or leaves a gap; fetch the file again")
        end = tensor.end
    if end != size:
        raise UserError(f"{path}: holds {size} bytes, but its header describes {end}; fetch the file again")
    return found


def write(directory: Path, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int = SHARD_BYTES) -> int:
    """Write named arrays as float32, into several files with an index if one would be too large; return the bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    shards: list[dict[str, int]] = []
    for shard in _shards(tensors, shard_bytes):
        try:
            save_file(shard, directory / f"shard-{len(shards)}", metadata={"format": "pt"})
        except SafetensorError as error:  # which a full disk raises instead of OSError
            raise unwritten(directory, OSError(str(error))) from error
        shards.append({name: array.nbytes for name, array in shard.items()})
    total = sum(sum(shard.values()) for shard in shards)
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / WHOLE)
        return total
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for i, name in enumerate(names):
        (directory / f"shard-{i}").rename(directory / name)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _files(directory: Path) -> dict[Path, set[str] | None]:
    """Return the files of a directory, or the one file, and, if there is an index, the names of their tensors."""
    if directory.is_file():
        return {directory: None}
    index, whole = directory / INDEX, directory / WHOLE
    if whole.is_file():  # transformers also prefers it if there are both
        return {whole: None}
    if index.exists():
        try:
            weight_map = parse_object(index.read_bytes())["weight_map"]
            places = [(str(name), str(file)) for name, file in weight_map.items()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: is not an index of tensors ({error}); fetch it again") from error
        files: dict[Path, set[str]] = {}
        for name, file in places:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise UserError(f"{index}: {name!r} lies in {file!r}, which is not a safetensors file beside it")
            if not is_file(directory / file):
                raise UserError(f"{index}: names {file!r}, which is not there; fetch it")
            files.setdefault(directory / file, set()).add(name)
        return {**files}
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise UserError(
            f"{directory}: has {pickled[0]} but no {WHOLE}, and import reads no pickle: convert it with "
            f"python -m jformer.hf unpickle {directory}"
        )
    raise UserError(f"{directory}: has neither {WHOLE} nor {INDEX}; name the folder of a model")


def _tensor(path: Path, entry: Mapping[str, Any], start: int) -> Tensor:
    """Return the place of a tensor; raise ValueError for an inconsistent entry."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError("sizes and offsets must be whole numbers")
    width = DTYPES[dtype].itemsize if dtype in DTYPES else OTHERS[dtype]
    size = width
    for length in shape:
        size *= length
    if end - begin != size:
        raise ValueError(f"{end - begin} bytes are not {dtype} of shape {shape}")
    return Tensor(path=path, dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)


def _shards(tensors: Iterable[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        array = np.ascontiguousarray(array, np.float32)
        if shard and size + array.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    yield shard
