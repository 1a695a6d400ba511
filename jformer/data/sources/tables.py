"""Parquet and Arrow files as a source, such as those of Hugging Face's `datasets`: a split may have shards.

data.source_language and data.target_language name columns, or fields of the column `translation`. Classes are read as
their names, which `datasets` stores with the schema. Without a source_language, the target is plain text, which may
have several lines.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, find_shards, fingerprint
from jformer.data.sources.text_files import Shard, split_of
from jformer.data.text import PACKED, admit, decode
from jformer.errors import UserError
from jformer.integrity import parse_object

ROWS = 1_024  # read at a time
FILE = b"ARROW1"  # how Arrow's file format begins, unlike its stream format
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.parquet or SPLIT.arrow, or several shards.

    Raises UserError for a file that is cut short or compressed as a whole, and a missing column.
    """
    paths = [path for (path,) in find_shards(config.dir, split, [(".parquet",), (".arrow",)])]
    for path in paths:
        if path.suffix in PACKED:
            raise UserError(f"{path}: only texts are read compressed; unpack it")
    names = (config.source_language, config.target_language)
    shards = [Shard((path,), sum(len(rows) for _, rows in _batches(path, names, decoded=False)), ()) for path in paths]
    identity = fingerprint("tables 1", [digest(path).sha256 for path in paths], names, config.invalid)
    return split_of(split, identity, shards, functools.partial(_read, names, config.invalid))


def _read(names: tuple[str, str], invalid: str, shard: Shard, counts: Counter[str], first: int) -> Iterator[Pair]:
    (path,) = shard.paths
    for row, batch in _batches(path, names, first):
        columns = [_texts(batch, name) for name in names]
        for number, texts in enumerate(zip(*columns, strict=True), start=row + 1):
            try:
                source, target = (admit(decode(text, invalid), counts, invalid, lines=not names[0]) for text in texts)
            except (AttributeError, ValueError) as error:
                reason = error if isinstance(error, ValueError) else "it has no text"
                raise UserError(f"{path}, row {number}: {reason}") from error
            yield Pair(source, target)


def _batches(
    path: Path, names: tuple[str, str], first: int = 0, decoded: bool = True
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a file from row `first` on, in parts, each with the number of its first row.

    They have the columns that are needed, or for Parquet none, to count rows. Parquet begins at a row group.
    """
    try:
        with path.open("rb") as file:
            parquet = path.suffix == ".parquet"
            whole = pyarrow.parquet.ParquetFile(file) if parquet else _open_arrow(file)
            schema = whole.schema_arrow if parquet else whole.schema
            for name in filter(None, names):
                _column(schema, name, path)
            row, batches = 0, whole
            if parquet:
                groups = range(whole.num_row_groups)
                ends = np.cumsum([0, *(whole.metadata.row_group(group).num_rows for group in groups)])
                skipped = int(np.searchsorted(ends[1:], first, side="right"))
                columns = [name for name in schema.names if decoded and name in (*names, "translation")]
                row, batches = int(ends[skipped]), whole.iter_batches(ROWS, groups[skipped:], columns)
            elif isinstance(whole, pa.ipc.RecordBatchFileReader):
                batches = map(whole.get_batch, range(whole.num_record_batches))
            for batch in batches:
                start, row = row, row + len(batch)
                if row > first:
                    yield max(start, first), batch.slice(max(first - start, 0))
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a complete {path.suffix} file ({error}); fetch it again") from error


def _open_arrow(file: BinaryIO) -> Any:
    """Open a stream, which `datasets` writes, or a file (Feather 2, polars)."""
    is_file = file.read(len(FILE)) == FILE
    file.seek(0)
    return pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)


def _column(schema: pa.Schema, name: str, path: Path) -> None:
    """Raise UserError if a table has no text or class column of this name."""
    field = schema.field(name) if name in schema.names else None
    if field is None and "translation" in schema.names:
        nested = schema.field("translation").type
        field = {each.name: each for each in nested}.get(name) if pa.types.is_struct(nested) else None
    if field is None or not (_is_text(field.type) or _classes(schema, name)):
        known = ", ".join(schema.names)
        raise UserError(f"{path}: no text or class column {name!r}; it has {known}: set data.*_language")


def _is_text(kind: pa.DataType) -> bool:
    """Return whether a column has texts, perhaps dictionary-encoded, as pandas' categories are stored."""
    return any(is_text(kind.value_type if pa.types.is_dictionary(kind) else kind) for is_text in TEXTS)


def _texts(batch: pa.RecordBatch, name: str) -> list[bytes | None]:
    """Return the texts of a column or the names of its classes as bytes, which may be invalid UTF-8; None = missing."""
    if not name:
        return [b""] * len(batch)
    if name not in batch.schema.names:
        column = pyarrow.compute.struct_field(batch.column("translation"), [name])
    elif classes := _classes(batch.schema, name):
        numbers = batch.column(name).to_pylist()
        return [classes[each].encode() if each is not None and each >= 0 else None for each in numbers]
    else:
        column = batch.column(name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return list(column.cast(pa.large_binary()).to_pylist())


def _classes(schema: pa.Schema, name: str) -> list[str]:
    """Return the names of a column's classes, as `datasets` stores them; none for other columns."""
    stored = (schema.metadata or {}).get(b"huggingface")
    features = (parse_object(stored).get("info") or {}).get("features") if stored else None
    feature = (features or {}).get(name)  # an object, or a list for a column of lists
    return list(feature.get("names") or []) if isinstance(feature, dict) else []
