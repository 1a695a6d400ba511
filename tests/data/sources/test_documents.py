import gzip
import itertools
import random
from collections import Counter

import pytest

from jformer.data import text
from jformer.data.data_config import DataConfig, SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.errors import UserError

PLAY = "\nFirst:\nBefore we go.\n\nAll:\nSpeak.\n \t\n\nFirst:\nYou.\n"


def config(folder, document="line"):
    return SourceConfig(source="text", dir=str(folder), document=document)


def write(folder, content, name="input.txt"):
    content = content if isinstance(content, bytes) else content.encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def read(split):
    counts = Counter()
    pairs = list(split.read(counts))
    assert all(pair == Pair("", pair.target) for pair in pairs)
    return [pair.target for pair in pairs], counts


def documents(folder, split, document):
    return read(open_split(config(folder, document), split))[0]


@pytest.mark.parametrize("name", ["input.txt", "input.txt.gz", "input", "input.gz"])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("line", ["", "First:", "Before we go.", "", "All:", "Speak.", " \t", "", "First:", "You."]),
        ("paragraph", ["First:\nBefore we go.", "All:\nSpeak.", "First:\nYou."]),
        ("file", [PLAY]),
    ],
)
def test_an_example_is_a_line_a_paragraph_or_the_file(tmp_path, name, document, expected):
    write(tmp_path, PLAY, name)
    split = open_split(config(tmp_path, document), "input")
    assert [read(split) for _ in range(2)] == [(expected, {})] * 2


def test_a_file_is_found_by_its_whole_name_too(tmp_path):
    write(tmp_path, "a\n", "wiki.train.tokens")
    assert documents(tmp_path, "wiki.train.tokens[50%:]", "line") == ["a"]


@pytest.mark.parametrize("content", [PLAY, "one", "one\ntwo", "\n\n", "a\nb\nc\nd\ne\nf\ng\n"])
def test_shares_that_touch_tile_the_file(tmp_path, content):
    write(tmp_path, content)
    rng = random.Random(0)
    for _ in range(20):
        borders = ["", *(f"{percent}%" for percent in sorted(rng.sample(range(1, 100), k=3))), ""]
        tiles = []
        for start, end in itertools.pairwise(borders):
            try:
                tiles += documents(tmp_path, f"input[{start}:{end}]", "file")
            except UserError as error:
                assert "holds none of its" in str(error)
        assert "".join(tiles) == content


@pytest.mark.parametrize("content", [PLAY, "one", "ünö\ntwö", "\n\n\n", "a\nb\nc\nd\ne\nf\ng\n"])
def test_a_file_can_be_shared_out_by_its_characters(tmp_path, content):
    write(tmp_path, content)
    by_characters = SourceConfig(source="text", dir=str(tmp_path), document="file", share_of="characters")
    for border in (40, 50, 77):
        first, second = (open_split(by_characters, f"input[{share}]") for share in (f":{border}%", f"{border}%:"))
        cut = len(content) * border // 100
        assert [read(split)[0] for split in (first, second)] == [[content[:cut]], [content[cut:]]]
        assert first.fingerprint != second.fingerprint
    with pytest.raises(UserError, match=rf"holds none of its {len(content)} characters; give it a larger share"):
        open_split(by_characters, "input[:1%]")


def test_borders_are_rounded_down(tmp_path):
    write(tmp_path, "".join(f"{number}\n" for number in range(150)))
    assert documents(tmp_path, "input[:1%]", "line") == ["0"]
    assert documents(tmp_path, "input[1%:3%]", "line") == ["1", "2", "3"]
    assert documents(tmp_path, "input[99%:100%]", "line") == ["148", "149"]
    assert documents(tmp_path, "input[98%:]", "line") == ["147", "148", "149"]


def test_a_share_cuts_paragraphs_at_its_borders(tmp_path):
    write(tmp_path, "a\nb\nc\nd\n\ne\nf\ng\n\nh\n")
    shares = [documents(tmp_path, f"input[{share}]", "paragraph") for share in (":20%", "20%:70%", "70%:")]
    assert shares == [["a\nb"], ["c\nd", "e\nf"], ["g", "h"]]


def test_what_a_share_does_not_hold_is_neither_refused_nor_counted(tmp_path):
    write(tmp_path, b"\xef\xbb\xbfa\r\nb\n\0\nd\r\n")
    assert read(open_split(config(tmp_path), "input[25%:50%]")) == (["b"], {})
    assert read(open_split(config(tmp_path), "input[75%:]")) == (["d"], {text.CARRIAGE_RETURNS_REMOVED: 1})
    with pytest.raises(UserError, match=r"input.txt:3: NUL"):
        read(open_split(config(tmp_path), "input"))


def test_carriage_returns_and_the_byte_order_mark_go_and_line_feeds_stay(tmp_path):
    write(tmp_path, "\ufeffa\r\nb\r\n\r\nc\u2028d".encode())
    altered = {text.BOMS_REMOVED: 1, text.CARRIAGE_RETURNS_REMOVED: 3, text.SEPARATORS_KEPT: 1}
    assert read(open_split(config(tmp_path, "file"), "input")) == (["a\nb\n\nc\u2028d"], altered)
    assert documents(tmp_path, "input", "paragraph") == ["a\nb", "c\u2028d"]


def test_the_fingerprint_depends_on_bytes_document_and_share(tmp_path):
    write(tmp_path, PLAY)
    write(tmp_path, PLAY, "same.txt.gz")
    write(tmp_path, PLAY + " ", "other.txt")

    def identity(split, document="line"):
        return open_split(config(tmp_path, document), split).fingerprint

    assert identity("input") == identity("same") == identity("input[:]") == identity("input[0%:100%]")
    different = [identity("input"), identity("other"), identity("input[:50%]"), identity("input[50%:]")]
    different += [identity("input", "paragraph"), identity("input", "file")]
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    "split",
    [
        *("input[:1000]", "input[10:20%]", "input[:1.5%]", "input[-5%:]", "input[]", "input[5%]", "[:5%]"),
        *("input[50%:50%]", "input[60%:50%]", "input[:101%]", "input[:0%]", "input[:5%][5%:]"),
    ],
)
def test_another_share_is_refused(tmp_path, split):
    write(tmp_path, PLAY)
    with pytest.raises(UserError, match=r"^split '.*': a share is whole percents of a file's lines, as in 'input\["):
        open_split(config(tmp_path), split)


@pytest.mark.parametrize(("content", "split"), [("a\nb\n", "input[:40%]"), ("", "input"), ("a\n", "input[1%:99%]")])
def test_a_share_that_holds_nothing_is_refused(tmp_path, content, split):
    write(tmp_path, content)
    with pytest.raises(UserError) as caught:
        open_split(config(tmp_path), split)
    assert f"input.txt: split {split!r} holds none of its {content.count(chr(10))} lines" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path, PLAY, "imput.txt")
    with pytest.raises(
        UserError, match=r"no split 'input': looked for input.txt, input \(or .gz, .xz, .zst\); it has imput.txt$"
    ):
        open_split(config(tmp_path), "input[:90%]")


def test_one_file_gives_train_valid_and_test(tmp_path):
    write(tmp_path, "".join(f"{number}\n" for number in range(20)))
    options = DataConfig(
        source="text",
        dir=str(tmp_path),
        train="input[:90%]",
        valid="input[90%:95%]",
        test=("test=input[95%:]",),
    )
    options.check()
    splits = [options.train, options.valid, *options.test_splits().values()]
    assert [len(read(open_split(options, split))[0]) for split in splits] == [18, 1, 1]
    with pytest.raises(UserError, match="cannot be a key; name the set"):
        DataConfig(test=("input[95%:]",)).check()
