import dataclasses
import gzip
import json
import lzma
import sys
from collections import Counter

import fsspec
import pytest

from jformer.data import text
from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from tests.bucket import Bucket

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SOURCE, TARGET = ["a house", "", "two\u2028parts", "last"], ["ein Haus", "leer", "zwei\x85Teile", ""]
PAIRS = [Pair(*texts) for texts in zip(SOURCE, TARGET, strict=True)]


def lines(texts):
    return "".join(f"{line}\n" for line in texts).encode()


def write(folder, **contents):
    """Write files named by keyword: train_en_gz is train.en.gz."""
    for name, content in contents.items():
        path = folder / name.replace("_", ".")
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def files(folder):
    return SourceConfig(dir=str(folder))


def read(split):
    counts = Counter()
    return list(split.read(counts)), counts


FLAT = lines(json.dumps({"en": s, "de": t, "id": 1}, ensure_ascii=i % 2 == 0) for i, (s, t, *_) in enumerate(PAIRS))
NESTED = lines(json.dumps({"translation": {"de": t, "en": s}}) for s, t, *_ in PAIRS)
TSV = lines("\t".join(pair[:2]) for pair in PAIRS)


def test_further_references_lie_beside_the_target(tmp_path):
    write(tmp_path, test_en=lines(SOURCE), test_de=lines(TARGET))
    alone = open_split(files(tmp_path), "test")
    write(tmp_path, test_de_1_gz=lines("abcd"), test_de_2=lines("efgh"), test_de_4=lines("ijkl"))
    split = open_split(files(tmp_path), "test")
    pairs, _ = read(split)
    assert [pair.others for pair in pairs] == [("a", "e"), ("b", "f"), ("c", "g"), ("d", "h")]
    assert [pair[:3] for pair in pairs] == [pair[:3] for pair in PAIRS]
    assert split.fingerprint != alone.fingerprint
    write(tmp_path, test_de_2=lines("efg"))
    with pytest.raises(UserError, match=r"test\.de has 4 lines but .*test\.de\.2 has 3 lines: line n of one must"):
        open_split(files(tmp_path), "test")


@pytest.mark.parametrize(
    "contents",
    [
        {"train_en": lines(SOURCE), "train_de": lines(TARGET)},
        {"train_en_gz": lines(SOURCE), "train_de": lines(TARGET)},
        {"train_en": lines(SOURCE).removesuffix(b"\n"), "train_de_gz": lines(TARGET)},
        {"train_tsv": TSV},
        {"train_tsv_gz": TSV.replace(b"\n", b"\r\n")},
        {"train_jsonl": FLAT},
        {"train_jsonl_gz": NESTED},
    ],
)
def test_every_layout_gives_the_same_pairs_at_each_reading(tmp_path, contents):
    write(tmp_path, **contents)
    split = open_split(files(tmp_path), "train")
    for _ in range(2):
        pairs, counts = read(split)
        assert pairs == PAIRS
        assert counts[text.SEPARATORS_KEPT] == (1 if "tsv" in str(contents.keys()) else 2)  # a TSV line is one text
    assert split.name == "train"


def test_the_side_of_a_language_follows_the_config(tmp_path):
    write(tmp_path, train_en=b"house\n", train_de=b"Haus\n")
    config = SourceConfig(dir=str(tmp_path), source_language="de", target_language="en")
    assert read(open_split(config, "train"))[0] == [Pair("Haus", "house")]


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    write(
        tmp_path,
        a_en=b"x\n",
        a_de=b"y\n",
        b_en_gz=b"x\n",
        b_de=b"y\n",
        c_en=b"x\n",
        c_de=b"z\n",
        d_en=b"y\n",
        d_de=b"x\n",
    )
    a, b, c, d = (open_split(files(tmp_path), split).fingerprint for split in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd.compress}


@pytest.mark.parametrize("suffix", PACK)
def test_shards_of_any_form_are_one_split_that_is_read_from_any_pair(tmp_path, suffix):
    pairs = [Pair(f"a {i}", f"b {i}") for i in range(60)]
    for number, size in enumerate((20, 30, 10)):
        start = (0, 20, 50)[number]
        for side, language in enumerate(("en", "de")):
            content = lines(pair[side] for pair in pairs[start : start + size])
            (tmp_path / f"train-{number:05}-of-00003.{language}{suffix}").write_bytes(PACK[suffix](content))
    split = open_split(files(tmp_path), "train-*")
    assert (read(split)[0], split.size) == (pairs, 60)
    assert [list(split.read(Counter(), first)) for first in (0, 19, 20, 55, 60)] == [
        pairs[first:] for first in (0, 19, 20, 55, 60)
    ]
    first = open_split(files(tmp_path), "train-00000-of-00003")
    assert (read(first)[0], first.fingerprint != split.fingerprint) == (pairs[:20], True)
    both = open_split(files(tmp_path), "train-00002-of-00003+train-00000-of-00003")
    assert [pair.source for pair in read(both)[0]] == [pair.source for pair in pairs[50:] + pairs[:20]]
    with pytest.raises(UserError, match="names 'train-00001-of-00003' twice"):
        open_split(files(tmp_path), "train-*+train-00001-of-00003")

    last = tmp_path / f"train-00002-of-00003.de{suffix}"
    content = last.read_bytes()
    last.write_bytes(PACK[suffix](lines("abc")))
    with pytest.raises(UserError, match=r"has 10 lines but .* has 3 lines: .* \(shard 3 of 3\)"):
        open_split(files(tmp_path), "train-*")
    if suffix:
        for damaged in (content[:-9], b"junk" + content):
            last.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"-00002-of-00003.de{suffix}: not a complete \w+ file"):
                open_split(files(tmp_path), "train-*")
    last.unlink()
    with pytest.raises(UserError, match=r"looked for train-00002-of-00003.en \+ .* \(shard 3 of 3\)"):
        open_split(files(tmp_path), "train-*")
    for path in tmp_path.glob("train-00001*"):
        path.unlink()
    with pytest.raises(UserError, match=r"has 2 of the 3 shards train-\*: 00001 missing"):
        open_split(files(tmp_path), "train-*")


def test_texts_are_read_from_a_bucket(tmp_path):
    class Folder(Bucket):
        root = tmp_path

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("s3://"))

    fsspec.register_implementation("s3", Folder, clobber=True)
    data = tmp_path / "data"
    data.mkdir()
    write(data, train_en=lines(SOURCE), train_de_gz=lines(TARGET))
    there, here = (open_split(SourceConfig(dir=folder), "tr*") for folder in ("s3://data", str(data)))
    assert read(there) == read(here)
    assert there.fingerprint == here.fingerprint
    with pytest.raises(UserError, match=r"'s3://data': this data.source reads only local folders"):
        open_split(SourceConfig(source="images", dir="s3://data"), "train")


def test_reading_is_lazy(tmp_path):
    write(tmp_path, train_tsv=b"a\tb\n" * 3 + b"no tab\n")
    pairs = open_split(files(tmp_path), "train").read(Counter())
    assert [next(pairs) for _ in range(3)] == [Pair("a", "b")] * 3


def test_differing_line_counts_are_refused_before_any_pair(tmp_path):
    write(tmp_path, train_en=b"a\nb\nc\n", train_de_gz=b"a\nb\n")
    with pytest.raises(UserError, match=r"train\.en has 3 lines but .*train\.de\.gz has 2 lines"):
        open_split(files(tmp_path), "train")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, r"no split 'train': looked for train.en \+ train.de, train.tsv, train.jsonl \(or .gz, .xz, .zst\)$"),
        ({"train_en": b""}, r"no split 'train'.*; it has train.en$"),
        ({"tain_en": b"", "tain_de_gz": b""}, r"no split 'train'.*; it has tain.en, tain.de.gz$"),
        ({"train_en": b"", "train_de": b"", "train_tsv_gz": b""}, "more than once: train.en, train.de, train.tsv.gz"),
        ({"train_en": b"", "train_de": b"", "train_de_gz": b""}, "more than once: train.en, train.de, train.de.gz"),
    ],
)
def test_missing_or_several_files_are_named(tmp_path, contents, message):
    write(tmp_path, **contents)
    with pytest.raises(UserError, match=message):
        open_split(files(tmp_path), "train")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"train_tsv": b"a\tb\nc d\n"}, r"train.tsv:2: 0 TABs"),
        ({"train_tsv": b"a\tb\nc\td\t\n"}, r"train.tsv:2: 2 TABs"),
        ({"train_tsv": b"a\tb\n\xff\tb\n"}, r"train.tsv:2: invalid UTF-8"),
        ({"train_jsonl": b'{"en": "a", "de": "b"}\nnot json\n'}, r"train.jsonl:2: "),
        ({"train_jsonl": b'{"en": "a"}\n'}, r"train.jsonl:1: not an object with a text under each of 'en' and 'de'"),
        ({"train_jsonl": b'{"en": "a", "de": 5}\n'}, r"train.jsonl:1: not an object"),
        ({"train_jsonl": b'{"translation": ["a", "b"]}\n'}, r"train.jsonl:1: not an object"),
        ({"train_jsonl": b'["en", "de"]\n'}, r"train.jsonl:1: not an object"),
        ({"train_jsonl": b'{"en": "a\\u0000", "de": "b"}\n'}, r"train.jsonl:1: NUL"),
        ({"train_jsonl": b'{"en": "\\ud800", "de": "b"}\n'}, r"train.jsonl:1: .*surrogate"),
        ({"train_jsonl": b"[" * 200_000}, r"train.jsonl:1: "),
        ({"train_en": b"a\nb\0\n", "train_de": b"a\nb\n"}, r"train.en:2: NUL"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path, contents, message):
    write(tmp_path, **contents)
    split = open_split(files(tmp_path), "train")
    with pytest.raises(UserError, match=message):
        read(split)


def test_a_json_key_named_translation_may_hold_a_text(tmp_path):
    write(tmp_path, train_jsonl=b'{"en": "a house", "translation": "ein Haus"}\n')
    split = open_split(SourceConfig(dir=str(tmp_path), target_language="translation"), "train")
    assert read(split)[0] == [Pair("a house", "ein Haus")]


def test_line_feeds_inside_json_texts_are_replaced_and_counted(tmp_path):
    write(tmp_path, train_jsonl=b'{"en": "a\\nb", "de": "c\\r\\n"}\r\n')
    assert read(open_split(files(tmp_path), "train")) == (
        [Pair("a b", "c  ")],
        {text.LINE_FEEDS_REPLACED: 2, text.CARRIAGE_RETURNS_REMOVED: 1},
    )


def labelled(folder):
    return SourceConfig(source="labelled", dir=str(folder), source_language="text", target_language="label")


ONE, TWO = (
    [Pair("a film , good", "1"), Pair("", "0"), Pair("bad", "no it isn't")],
    [Pair("a\tb", "0"), Pair("c\t", "1")],
)


@pytest.mark.parametrize("pairs", [ONE, TWO])
@pytest.mark.parametrize("name", ["train_tsv", "train_tsv_gz", "train_jsonl", "train_jsonl_gz"])
def test_one_text_or_two_have_a_label_in_every_layout(tmp_path, pairs, name):
    as_tsv = lines("\t".join(pair[:2]) for pair in pairs).removesuffix(b"\n")
    as_jsonl = lines(json.dumps({"text": s, "label": t, "id": 7}) for s, t, *_ in pairs)
    write(tmp_path, **{name: as_jsonl if "jsonl" in name else as_tsv})
    split = open_split(labelled(tmp_path), "train")
    assert [read(split) for _ in range(2)] == [(pairs, {})] * 2


def test_carriage_returns_do_not_make_another_label(tmp_path):
    write(tmp_path, train_tsv=b"a\t1\r\nb\t1")
    assert read(open_split(labelled(tmp_path), "train")) == (
        [Pair("a", "1"), Pair("b", "1")],
        {text.CARRIAGE_RETURNS_REMOVED: 1},
    )


def test_the_fingerprint_of_labelled_texts_is_that_of_the_content(tmp_path):
    write(tmp_path, a_tsv=b"x\t1\n", b_tsv_gz=b"x\t1\n", c_tsv=b"x\t0\n")
    a, b, c = (open_split(labelled(tmp_path), split).fingerprint for split in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"train_tsv": b"a\t1\nno label\n"}, r"train.tsv:2: 'no label' is not one or two texts and then a label"),
        ({"train_tsv": b"a\t1\nb\t\n"}, r"train.tsv:2: 'b\\t' is not one or two texts and then a label"),
        ({"train_tsv": b"a\t1\n\n"}, r"train.tsv:2: '' is not"),
        ({"train_tsv": b"a\tb\tc\t1\n"}, r"train.tsv:1: 'a\\tb\\tc\\t1' is not"),
        ({"train_tsv": b"a\t1\nb\tc\t1\n"}, r"train.tsv:2: 3 columns, where line 1 has 2"),
        ({"train_tsv": b"a\tb\t1\nc\t1\n"}, r"train.tsv:2: 2 columns, where line 1 has 3"),
        ({"train_jsonl": b'{"text": "a", "label": ""}\n'}, r"train.jsonl:1: 'a\\t' is not"),
        ({"train_jsonl": b'{"text": "a", "label": 1}\n'}, r"train.jsonl:1: not an object with a text under each of"),
        ({"train_jsonl": b'{"text": "a", "label": "1\\u0000"}\n'}, r"train.jsonl:1: NUL"),
    ],
)
def test_bad_labelled_lines_are_named_by_file_and_line(tmp_path, contents, message):
    write(tmp_path, **contents)
    split = open_split(labelled(tmp_path), "train")
    with pytest.raises(UserError, match=message):
        read(split)


def test_labelled_shards_have_columns_alike(tmp_path):
    write(tmp_path, a_tsv=b"", b_tsv=b"x\t1\n", c_tsv=b"x\t1\n", d_tsv=b"x\t1\n1\tx\t1\n", e_tsv=b"1\tx\t1\n")
    assert len(read(open_split(labelled(tmp_path), "a+b+c"))[0]) == 2
    for shards, message in {
        "a+b+d": "d.tsv:2: 3 columns, where line 1 of b.tsv has 2",
        "a+b+e": "e.tsv:1: 3 columns, where line 1 of b.tsv has 2",
    }.items():
        with pytest.raises(UserError, match=message):
            read(open_split(labelled(tmp_path), shards))


def test_an_example_may_have_no_label_only_where_several_are_possible(tmp_path):
    write(tmp_path, train_tsv=b"good\tglad,calm\nbad\t\n")
    config = dataclasses.replace(labelled(tmp_path), labels="several")
    assert [pair.target for pair in open_split(config, "train").read(Counter())] == ["glad,calm", ""]
    with pytest.raises(UserError, match=r"train\.tsv:2: 'bad\\t' is not one or two texts and then a label"):
        list(open_split(labelled(tmp_path), "train").read(Counter()))


def test_a_label_that_is_no_number_is_named_by_its_line(tmp_path):
    write(tmp_path, train_tsv=b"good\t4.5\nbad\tlow\n")
    config = dataclasses.replace(labelled(tmp_path), labels="number")
    with pytest.raises(UserError, match=r"train\.tsv:2: label 'low': data\.labels='number' needs"):
        list(open_split(config, "train").read(Counter()))


def test_missing_labelled_texts_are_named(tmp_path):
    write(tmp_path, tarin_tsv=b"")
    with pytest.raises(UserError, match=r"no split 'train': looked for train.tsv, train.jsonl .*; it has tarin.tsv$"):
        open_split(labelled(tmp_path), "train")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SourceConfig(source="file"),
            "data.source='file'; choose one of: files, labelled, text, images, captions, tables, tfds",
        ),
        (SourceConfig(dir=""), "data.dir=''"),
        (SourceConfig(dir="nowhere/at/all"), "data.dir='nowhere/at/all' is not a folder"),
        (SourceConfig(source="generated", name="quick"), "data.name='quick'; choose one of: quickstart, copy"),
        (SourceConfig(source="generated", name="copy", num_pairs=9), "no split 'train.5'; choose one of: train"),
    ],
)
def test_what_does_not_exist_is_named_with_the_choices(config, message):
    with pytest.raises(UserError, match=message):
        open_split(config, "train.5" if config.name == "copy" else "train")


@pytest.mark.parametrize(
    "files",
    [
        {"train_en": b"a\0b\nok\n", "train_de": b"c\n\xff\n"},
        {"train_tsv": b"a\0b\tc\nok\t\xff\n"},
        {"train_jsonl": b'{"en": "a\\u0000b", "de": "c"}\n{"en": "ok", "de": "\xff"}\n'},
    ],
)
def test_characters_that_are_no_text_are_replaced_where_the_config_says_so(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name.replace("_", ".")).write_bytes(content)
    counts = Counter()
    config = SourceConfig(dir=str(tmp_path), invalid="replace")
    pairs = list(open_split(config, "train").read(counts))
    assert [pair[:2] for pair in pairs] == [("a\ufffdb", "c"), ("ok", "\ufffd")]
    assert counts == {"texts with invalid characters, replaced by U+FFFD": 2}
    assert open_split(config, "train").fingerprint != fingerprint_of(tmp_path)


def fingerprint_of(folder):
    return open_split(SourceConfig(dir=str(folder)), "train").fingerprint
