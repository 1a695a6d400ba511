"""TFDS text data sets as a source, prepared if needed as array_record files and read, all without TensorFlow.

A feature is a text, or a class read as its name. Without a source_language, the target is plain text, which may have
several lines.

Importing this takes most of a second, so only `sources` imports it, when a config needs it.
"""

import contextlib
import difflib
import functools
import importlib.util
import os
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import tensorflow_datasets as tfds
import tensorflow_datasets.translate  # registers the builders that TFDS does not find by name, such as wmt14_translate
from tensorflow_datasets.core.download import download_manager, extractor

from jformer.data.corpus import locked
from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.sources.split import Pair, Split, fingerprint
from jformer.data.text import admit, decode
from jformer.errors import UserError

# The only format that TFDS writes and reads correctly without TensorFlow; its parquet loses examples (4.9.10).
FORMAT = "array_record"
READ = (tfds.features.Text, tfds.features.ClassLabel)


def open_split(config: SourceConfig, split: str) -> Split:
    """Open a TFDS split such as "train[:10%]", preparing the data set first if `data.dir` does not hold it yet.

    The fingerprint covers the data set's name and version, the slice, and the content of the shards it touches.
    Raises UserError for a set that TFDS does not know, cannot prepare, or holds in another format.
    """
    builder = _prepared(config)
    languages = (config.source_language, config.target_language)
    texts = {name: kind for name, kind in builder.info.features.items() if isinstance(kind, READ)}
    if not set(languages) <= {*texts, ""} or not languages[1]:
        wanted = " and ".join(map(repr, languages))
        known = ", ".join(sorted(texts)) or "none"
        raise UserError(f"data.name={config.name!r} has the texts {known}, not {wanted}; set data.*_language")
    classes = {name: texts[name].names for name in languages if isinstance(texts.get(name), tfds.features.ClassLabel)}
    try:
        slices = builder.info.splits[split].file_instructions
    except (ValueError, KeyError) as error:
        known = ", ".join(builder.info.splits)
        raise UserError(f"data.name={config.name!r} has no split {split!r}; choose from: {known}") from error
    shards = [(Path(part.filename).name, part.skip, part.take, digest(Path(part.filename))[0]) for part in slices]
    records = builder.as_data_source(split, file_format=FORMAT)
    read = functools.partial(_read, records, f"{config.name} {split}", languages, classes, config.invalid)
    named = (classes,) if classes else ()
    return Split(split, fingerprint("tfds 2", builder.info.full_name, languages, shards, config.invalid, *named), read)


def _read(
    records: Sequence[dict[str, Any]],
    place: str,
    languages: tuple[str, str],
    classes: Mapping[str, Sequence[str]],
    invalid: str,
    counts: Counter[str],
) -> Iterator[Pair]:
    def text(record: dict[str, Any], name: str) -> str:
        if not name:
            return ""
        if name in classes:
            if (number := int(record[name])) < 0:  # as in test sets with secret labels
                raise ValueError(f"{name!r} has no class")
            return classes[name][number]
        return admit(decode(record[name], invalid), counts, invalid, lines=not languages[0])

    for start in range(0, len(records), 1024):
        rows = range(start, min(start + 1024, len(records)))
        for row, record in zip(rows, records.__getitems__(rows), strict=True):  # type: ignore[attr-defined]
            try:
                source, target = (text(record, name) for name in languages)
            except ValueError as error:
                raise UserError(f"{place}, example {row}: {error}") from error
            yield Pair(source, target)


def _find(config: SourceConfig) -> Any:
    """Return the builder of a data set: by its code, or by the files of an earlier preparation."""
    data_dir = {"data_dir": str(Path(config.dir).expanduser())} if config.dir else {}
    try:
        return tfds.builder(config.name, **data_dir)
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        near = difflib.get_close_matches(config.name.partition("/")[0], known)
        hint = f"did you mean {' or '.join(near)}?" if near else "name it as builder[/config]"
        where = config.dir or "the TFDS default folder"
        raise UserError(
            f"data.name={config.name!r}: TFDS has no such data set, and none is in {where}; {hint}"
        ) from error
    except ValueError as error:
        raise UserError(f"data.name={config.name!r}: {_one_line(error)}{_nearest_configs(config.name)}") from error
    except (AssertionError, ImportError) as error:
        raise UserError(f"data.name={config.name!r}: {_one_line(error)}") from error


def _nearest_configs(name: str) -> str:
    builder, _, wanted = name.partition("/")
    try:
        configs = tfds.builder_cls(builder).builder_configs
    except ValueError:  # not a valid name of a builder
        return ""
    return f" {', '.join(difflib.get_close_matches(wanted, configs, n=10, cutoff=0))}"


def _prepared(config: SourceConfig) -> Any:
    """Return the builder of a data set whose files we can read, downloaded and prepared unless they are there already.

    One process prepares it while others wait.
    """
    builder = _find(config)
    try:
        if not builder.data_path.exists():
            waiting = locked(Path(builder.data_dir), f"waiting for another process that prepares {config.name}")
            with waiting, _extraction_without_tensorflow():
                builder = _find(config)  # reads what another process has prepared
                builder.download_and_prepare(
                    file_format=FORMAT, download_config=tfds.download.DownloadConfig(try_download_gcs=False)
                )
    except _PREPARATION_ERRORS as error:
        raise UserError(
            f"data.name={config.name!r}: TFDS could not prepare it in {builder.data_dir}: {_one_line(error)}; "
            "fix that, or prepare it elsewhere as array_record and point data.dir there"
        ) from error
    if tfds.core.FileFormat.ARRAY_RECORD not in builder.info.available_file_formats():
        found = builder.info.file_format.value
        raise UserError(
            f"data.name={config.name!r} is in {builder.data_dir} as {found}; remove that folder or set another "
            "data.dir to have it prepared as array_record, or convert it (tfds convert_format)"
        )
    return builder


_PREPARATION_ERRORS = (
    AssertionError,  # files to be fetched by hand are missing
    ImportError,  # the builder needs Beam or another library
    OSError,  # no network, no room
    ValueError,
    tfds.download.DownloadError,
    download_manager.NonMatchingChecksumError,
    extractor.ExtractError,
)


@contextlib.contextmanager
def _extraction_without_tensorflow() -> Iterator[None]:
    """Let TFDS unpack archives without TensorFlow: give its extractor the two functions that it calls."""
    if importlib.util.find_spec("tensorflow"):
        yield
        return

    def open_file(path: str | os.PathLike[str], mode: str = "r") -> IO[Any]:
        return Path(path).open(mode)

    gfile = types.SimpleNamespace(GFile=open_file)
    stand_in = types.SimpleNamespace(io=types.SimpleNamespace(gfile=gfile), compat=types.SimpleNamespace(as_text=str))
    tensorflow, extractor.tf = extractor.tf, stand_in
    try:
        yield
    finally:
        extractor.tf = tensorflow


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
