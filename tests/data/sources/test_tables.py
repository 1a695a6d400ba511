import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet
import pytest

from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.data.text import INVALID_REPLACED
from jformer.errors import UserError

PAIRS = [Pair(f"a {i}", f"b\u2028{i}") for i in range(2_500)]
FLAT = {"id": [1] * 2_500, "en": [pair.source for pair in PAIRS], "de": [pair.target for pair in PAIRS]}
NESTED = {"translation": [{"en": pair.source, "de": pair.target} for pair in PAIRS]}


def write(path, table, new=pa.ipc.new_stream):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=700)
        return
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=900)


def tables(folder, **options):
    return SourceConfig(source="tables", dir=str(folder), **options)


@pytest.mark.parametrize(
    ("suffix", "new"), [("parquet", None), ("arrow", pa.ipc.new_stream), ("arrow", pa.ipc.new_file)]
)
@pytest.mark.parametrize("columns", [FLAT, NESTED], ids=["flat", "nested"])
def test_shards_of_tables_are_read_from_any_row(tmp_path, suffix, new, columns):
    table = pa.table(columns)
    write(tmp_path / f"train-00000-of-00002.{suffix}", table.slice(0, 2_000), new)
    write(tmp_path / f"train-00001-of-00002.{suffix}", table.slice(2_000), new)
    split, counts = open_split(tables(tmp_path), "train-*"), Counter()
    assert (list(split.read(counts)), split.size) == (PAIRS, 2_500)
    assert counts == {"texts with unusual line separators, kept": 2_500}
    for first in (1, 699, 1_999, 2_000, 2_499):
        assert list(split.read(Counter(), first)) == PAIRS[first:]
    if suffix == "parquet":  # reading begins at a group of rows
        path = tmp_path / "train-00000-of-00002.parquet"
        path.write_bytes(b"PAR1" + bytes(200) + path.read_bytes()[204:])
        assert list(split.read(Counter(), 700)) == PAIRS[700:]
    whole = (tmp_path / f"train-00001-of-00002.{suffix}").read_bytes()
    (tmp_path / f"train-00001-of-00002.{suffix}").write_bytes(whole[:-900])
    with pytest.raises(UserError, match=r"train-00001-of-00002.*: not a complete"):
        open_split(tables(tmp_path), "train-*")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()], ids=str)
def test_a_column_named_translation_may_hold_texts(tmp_path, suffix, kind):
    write(tmp_path / f"train.{suffix}", pa.table({"translation": pa.array(["ein Haus", "x"], kind), "id": [1, 2]}))
    split = open_split(tables(tmp_path, source_language="", target_language="translation"), "train")
    assert list(split.read(Counter())) == [Pair("", "ein Haus"), Pair("", "x")]
    with pytest.raises(UserError, match=r"no text or class column 'en'; it has translation, id: set data"):
        open_split(tables(tmp_path, target_language="translation"), "train")


def test_classes_have_names_and_what_is_missing_is_named(tmp_path):
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}, "text": {"dtype": "string"}}
    table = pa.table({"text": ["bad", "good\nline", None], "label": [0, 1, -1]})
    write(
        tmp_path / "train.parquet",
        table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}),
    )
    pairs = open_split(tables(tmp_path, source_language="text", target_language="label"), "train").read(Counter())
    assert [next(pairs), next(pairs)] == [Pair("bad", "neg"), Pair("good line", "pos")]
    with pytest.raises(UserError, match=r"train.parquet, row 3: it has no text$"):
        next(pairs)
    alone = open_split(tables(tmp_path, source_language="", target_language="text"), "train").read(Counter())
    assert [next(alone), next(alone)] == [Pair("", "bad"), Pair("", "good\nline")]
    with pytest.raises(UserError, match=r"no text or class column 'de'; it has text, label: set data"):
        open_split(tables(tmp_path, source_language="text"), "train")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_bytes_that_are_no_text_are_named_or_replaced(tmp_path, kind, nested):
    texts = pa.array([b"a", b"x\xff", b"b"], pa.binary()).cast(pa.large_binary())
    column = (texts if kind == pa.large_string() else texts.cast(pa.binary())).view(kind)
    columns = {"en": column, "de": column}
    write(
        tmp_path / "train.parquet",
        pa.table({"translation": pa.table(columns).to_struct_array()} if nested else columns),
    )
    with pytest.raises(UserError, match=r"train\.parquet, row 2: invalid UTF-8, byte 0xff at offset 1; convert"):
        list(open_split(tables(tmp_path), "train").read(Counter()))
    counts = Counter()
    pairs = list(open_split(tables(tmp_path, invalid="replace"), "train").read(counts))
    assert pairs == [Pair(text, text) for text in ("a", "x\N{REPLACEMENT CHARACTER}", "b")]
    assert counts == {INVALID_REPLACED: 2}


def test_a_table_that_was_compressed_is_to_be_unpacked(tmp_path):
    (tmp_path / "train.parquet.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.parquet\.gz: only texts are read compressed; unpack it$"):
        open_split(tables(tmp_path), "train")


def test_categories_are_texts_and_lists_are_refused_by_name(tmp_path):
    table = pa.table({"de": pa.array(["Haus", "Hut", "Haus"]).dictionary_encode(), "toks": [["a"], ["b"], ["c"]]})
    lists = {"info": {"features": {"de": {"dtype": "string"}, "toks": [{"dtype": "string"}]}}}
    for stored in (lists, {"info": {"features": None}}, {"info": None}):
        write(tmp_path / "train.arrow", table.replace_schema_metadata({"huggingface": json.dumps(stored)}))
        split = open_split(tables(tmp_path, source_language="", target_language="de"), "train")
        assert [pair.target for pair in split.read(Counter())] == ["Haus", "Hut", "Haus"]
        with pytest.raises(UserError, match="no text or class column 'toks'; it has de, toks"):
            open_split(tables(tmp_path, source_language="", target_language="toks"), "train")
