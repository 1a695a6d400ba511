import copy
import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jformer import integrity
from jformer.data import corpus, preparation, text
from jformer.data.corpus import open_corpus
from jformer.data.data_config import DataConfig
from jformer.data.encoders import PairEncoder, Side
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair, Split, listed
from jformer.data.tokenizers import BOS, EOS, Symbols, learn
from jformer.data.tokenizers.lists import ByteTokenizer, ListTokenizer
from jformer.errors import UserError
from tests.faults.full_disk import no_file_above

ROOT = Path(__file__).parents[2]
BYTES = ByteTokenizer("identity")
PAIRS = [Pair("a house", "ein Haus"), Pair("", "leer"), Pair("much too long", "zu lang"), Pair("end", "Ende")]
WORDS = PairEncoder(*[Side(ByteTokenizer("identity"), 12)] * 2, "drop")
DROPPING = PairEncoder(Side(BYTES, 10), Side(BYTES, 12), "drop")
CUTTING = dataclasses.replace(DROPPING, overlong="cut")
TEXT = PairEncoder(Side(None, 1), Side(BYTES, 4), "split")


def with_side(name, **change):
    return dataclasses.replace(DROPPING, **{name: dataclasses.replace(getattr(DROPPING, name), **change)})


class Readings:
    """A split that counts how often it is read, and may take its time."""

    def __init__(self, pairs=PAIRS, fingerprint="text 1", seconds=0.0):
        self.count, self.pairs, self.seconds = 0, pairs, seconds
        self.split = Split("train", fingerprint, self.read)

    def read(self, counts):
        self.count += 1
        time.sleep(self.seconds)
        counts["lines mended"] += 1
        yield from self.pairs


def sentences(side):
    return [side.values[a:b].tolist() for a, b in zip(side.offsets, side.offsets[1:], strict=False)]


def texts(side):
    return [BYTES.decode(tokens) for tokens in sentences(side)]


def test_sentences_end_with_eos_and_keep_their_order(tmp_path):
    corpus = open_corpus(Readings().split, DROPPING, str(tmp_path))
    assert texts(corpus.source) == ["a house", "end"]
    assert texts(corpus.target) == ["ein Haus", "Ende"]
    for tokens in sentences(corpus.source) + sentences(corpus.target):
        assert tokens[-1] == EOS
        assert EOS not in tokens[:-1]
    assert len(corpus) == 2
    assert corpus.source.lengths.tolist() == [8, 4]


def test_a_second_opening_reads_the_cache_and_not_the_text(tmp_path):
    readings = Readings()
    first, second = (open_corpus(readings.split, DROPPING, str(tmp_path)) for _ in range(2))
    assert readings.count == 1
    assert isinstance(second.source.values, np.memmap)
    for side in ("source", "target"):
        for part in ("values", "offsets"):
            a, b = (getattr(getattr(corpus, side), part) for corpus in (first, second))
            np.testing.assert_array_equal(a, b)
    assert (first.counts, first.fingerprint) == (second.counts, second.fingerprint)


def test_every_example_is_counted_once_by_what_became_of_it(tmp_path):
    dropped = open_corpus(Readings().split, DROPPING, str(tmp_path)).counts
    assert dropped == {
        "lines mended": 1, "examples read": 4, "empty examples dropped": 1, "overlong examples dropped": 1,
        "examples used": 2,
    }  # fmt: skip
    cut = open_corpus(Readings().split, CUTTING, str(tmp_path)).counts
    assert cut == {
        "lines mended": 1, "examples read": 4, "empty examples dropped": 1, "overlong examples cut": 1,
        "examples used": 3,
    }  # fmt: skip
    images = listed("train", "text 2", [Pair("a", "b")], Counter({"files left out": 3}))  # counted when it is opened
    assert open_corpus(images, DROPPING, str(tmp_path)).counts["files left out"] == 3


def test_tokens_that_training_did_not_hold_are_counted_in_all_blocks(tmp_path, monkeypatch):
    words = learn("word", ["a b"], 10, "identity", split_digits=False)
    encoder = PairEncoder(Side(words, 10), Side(words, 40), "drop")
    corpus = open_corpus(Readings([Pair("a new b", "a"), Pair("b", "b old older")]).split, encoder, str(tmp_path))
    assert corpus.counts["unknown tokens"] == 3
    monkeypatch.setattr(preparation, "BLOCK", 1)
    several = ["one two", " ".join(f"w{i}" for i in range(30)) + " one"]
    corpus = open_corpus(Readings([Pair("a", each) for each in several], "text 2").split, encoder, str(tmp_path))
    named = {name: count for name, count in corpus.counts.items() if name.startswith("unknown: ")}
    assert (len(named), named["unknown: 'one'"], named["unknown: 'w17'"]) == (20, 2, 1)
    assert corpus.counts["further unknown"] == 12


def test_what_stands_between_two_texts_is_not_unknown(tmp_path):
    letters = learn("char", ["ab"], 10, "identity", split_digits=False)
    encoder = PairEncoder(Side(letters, 10, parts=True), Side(letters, 10), "drop")
    counts = open_corpus(Readings([Pair("a\tz", "a"), Pair("y", "b")]).split, encoder, str(tmp_path)).counts
    assert {name for name in counts if name.startswith("unknown: ")} == {"unknown: 'z'", "unknown: 'y'"}


@pytest.mark.parametrize("blank", [Pair("", "x"), Pair("x", ""), Pair(" \t", "x"), Pair("x", "\u2003")])
def test_an_example_with_a_blank_side_is_dropped_and_counted(tmp_path, blank):
    corpus = open_corpus(Readings([blank, Pair("x", "y")]).split, DROPPING, str(tmp_path))
    assert (len(corpus), corpus.counts["empty examples dropped"]) == (1, 1)


def test_limits_include_the_end_symbol(tmp_path):
    fitting = Pair("x" * 9, "y" * 11)
    corpus = open_corpus(Readings([fitting]).split, DROPPING, str(tmp_path))
    assert (corpus.source.lengths.tolist(), corpus.target.lengths.tolist()) == ([10], [12])
    assert "overlong examples dropped" not in corpus.counts
    over = [fitting, Pair("x" * 10, "y"), Pair("x", "y" * 12)]
    corpus = open_corpus(Readings(over, "text 2").split, DROPPING, str(tmp_path))
    assert (len(corpus), corpus.counts["overlong examples dropped"]) == (1, 2)


def test_a_cut_example_fills_its_limit_and_still_ends(tmp_path):
    corpus = open_corpus(Readings([Pair("x" * 30, "y" * 5)]).split, CUTTING, str(tmp_path))
    assert sentences(corpus.source) == [[*BYTES.encode(["x" * 9])[0], EOS]]
    assert texts(corpus.target) == ["y" * 5]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("aaaaaaaaaa\tbb", ["aaaa", "bb"]),
        ("aa\tbbbbbbbbbb", ["aa", "bbbb"]),
        ("aaaaaaaa\tbbbbbbbbbb", ["aaa", "bbb"]),
        ("aaaaaaaaaa\tbb\tcccc", ["aa", "b", "cc"]),
        ("aaaaaaaaaa", ["aaaaaaa"]),
        ("aaa\tbbb", ["aaa", "bbb"]),
    ],
)
def test_of_several_texts_the_longest_are_cut_first(text, left):
    """As transformers' longest_first does: the question after a long passage is not lost."""
    for between in ((), (EOS,)):  # as of BERT and of RoBERTa
        tokenizer = copy.copy(BYTES)
        tokenizer.symbols = BYTES.symbols._replace(between=between)
        side = Side(tokenizer, 9 + len(between) * text.count("\t"), begin=True, parts=True)
        first, *others = (BYTES.encode([part])[0] for part in left)
        cut = side.cut(side.encode([text])[0])
        assert cut == [BOS, *first, *(token for other in others for token in (EOS, *between, *other)), EOS]
        assert len(cut) <= side.max_length


def test_a_side_without_a_tokenizer_holds_nothing_and_its_text_is_not_missed(tmp_path):
    for pair in (Pair("", "abc"), Pair("never read", "abc")):
        corpus = open_corpus(Readings([pair, Pair("x", "")], pair.source).split, TEXT, str(tmp_path))
        assert (sentences(corpus.source), texts(corpus.target)) == ([[]], ["abc"])
        assert corpus.counts["empty examples dropped"] == 1


def test_split_text_is_whole_in_consecutive_examples_and_ends_once(tmp_path):
    documents = [Pair("", "ab"), Pair("", "abcdefgh"), Pair("", "abcdefg"), Pair("", "xyz")]
    corpus = open_corpus(Readings(documents).split, TEXT, str(tmp_path))
    assert texts(corpus.target) == ["ab", "abcd", "efgh", "", "abcd", "efg", "xyz"]
    assert [EOS in tokens for tokens in sentences(corpus.target)] == [True, False, False, True, False, True, True]
    assert corpus.target.lengths.max() == 4
    assert corpus.source.lengths.tolist() == [0] * 7
    assert corpus.counts == {
        "lines mended": 1, "examples read": 4, "empty examples dropped": 0, "overlong examples split": 2,
        "examples used": 7,
    }  # fmt: skip


def test_the_only_side_may_be_the_source_and_read_the_target(tmp_path):
    encoder = PairEncoder(Side(BYTES, 6, begin=True), Side(None, 1), "cut", reads=("target", "target"))
    corpus = open_corpus(Readings([Pair("", "abc"), Pair("", "abcdefgh"), Pair("x", "")]).split, encoder, str(tmp_path))
    abc = BYTES.encode(["abcd"])[0]
    assert sentences(corpus.source) == [[BOS, *abc[:3], EOS], [BOS, *abc, EOS]]
    assert sentences(corpus.target) == [[], []]


def test_each_of_two_texts_ends_with_eos(tmp_path):
    encoder = with_side("source", begin=True, parts=True)
    corpus = open_corpus(Readings([Pair("ab\tc", "x"), Pair("d", "y")]).split, encoder, str(tmp_path))
    a, b, c, d = BYTES.encode(["abcd"])[0]
    assert sentences(corpus.source) == [[BOS, a, b, EOS, c, EOS], [BOS, d, EOS]]


class Pixels:
    """A tokenizer of images: texts become arrays."""

    vocab_size, fingerprint, symbols = 256, "pixels", Symbols()

    def encode(self, lines):
        return [np.full(12, int(line), np.uint8) for line in lines]


def test_pixels_are_stored_as_bytes_and_labels_as_one_id(tmp_path):
    labels = ListTokenizer("word", "identity", ["cat", "dog"])
    encoder = PairEncoder(Side(Pixels(), 12, bare=True), Side(labels, 1, bare=True), "drop")
    corpus = open_corpus(Readings([Pair("255", "dog"), Pair("0", "cat")]).split, encoder, str(tmp_path))
    assert corpus.source.values.dtype == np.uint8
    assert sentences(corpus.source) == [[255] * 12, [0] * 12]
    assert sentences(corpus.target) == [[5], [4]]


@pytest.mark.parametrize(
    "encoder",
    [
        CUTTING,
        dataclasses.replace(DROPPING, reads=("target", "source")),
        *(
            with_side(name, **change)
            for name in ("source", "target")
            for change in (
                {"max_length": 11},
                {"begin": True},
                {"bare": True},
                {"parts": True},
                {"tokenizer": ByteTokenizer("nfkc")},
                {"tokenizer": None},
            )
        ),
    ],
)
def test_another_tokenizer_or_limit_is_another_corpus(tmp_path, encoder):
    readings = Readings()
    fingerprints = {open_corpus(readings.split, e, str(tmp_path)).fingerprint for e in (DROPPING, encoder)}
    assert (len(fingerprints), readings.count) == (2, 2)


def test_another_text_is_another_corpus(tmp_path):
    splits = [Readings().split, Readings(PAIRS[:1], "text 2").split]
    corpora = [open_corpus(split, DROPPING, str(tmp_path)) for split in splits]
    assert corpora[0].fingerprint != corpora[1].fingerprint
    assert len(corpora[1]) == 1


def test_ids_beyond_sixteen_bits_survive(tmp_path):
    words = ListTokenizer("word", "identity", [f"w{i}" for i in range(70_000)])
    encoder = dataclasses.replace(DROPPING, source=Side(words, 10))
    corpus = open_corpus(Readings([Pair("w69999 w0", "x")]).split, encoder, str(tmp_path))
    assert sentences(corpus.source) == [[70_003, 4, EOS]]
    assert corpus.target.values.dtype == np.uint16


def test_a_corpus_of_several_chunks_is_whole(tmp_path):
    pairs = [Pair(f"{i}", f"-{i}") for i in range(9_000)]
    corpus = open_corpus(Readings(pairs).split, DROPPING, str(tmp_path))
    assert texts(corpus.source) == [pair.source for pair in pairs]
    assert texts(corpus.target)[8_190:8_194] == [pair.target for pair in pairs[8_190:8_194]]


def test_no_usable_example_is_refused_with_the_counts(tmp_path):
    pairs = [Pair("", "x"), Pair("x" * 99, "y")]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(
            UserError, match=r"^train: .*empty examples dropped 1.*overlong examples dropped 1.*limits$"
        ):
            open_corpus(Readings(pairs).split, DROPPING, str(tmp_path))


def test_a_text_that_cannot_be_read_leaves_no_cache_behind(tmp_path):
    def read(counts: Counter):
        yield Pair("a", "b")
        raise UserError("train.en:2: not UTF-8")

    for _ in range(2):
        with pytest.raises(UserError, match="not UTF-8"):
            open_corpus(Split("train", "text 1", read), DROPPING, str(tmp_path))
    assert len(open_corpus(Readings().split, DROPPING, str(tmp_path))) == 2


def test_a_cache_that_has_no_room_is_one_line_and_keeps_the_blocks_that_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BLOCK", 16)
    pairs = [Pair("word " * 9, "Wort " * 9)] * 200
    encoder = dataclasses.replace(DROPPING, source=Side(BYTES, 90), target=Side(BYTES, 90))
    with no_file_above(9_000), pytest.raises(UserError, match=r"could not be written \(.*\); free some space"):
        open_corpus(Readings(pairs).split, encoder, str(tmp_path))
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".tmp"}
    assert len(list(tmp_path.glob("*.tmp/*.npz"))) == 13
    assert len(open_corpus(Readings(pairs).split, encoder, str(tmp_path))) == 200


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


DAMAGES = {
    "flipped": flip,
    "cut": lambda path, rng: path.write_bytes(path.read_bytes()[:-2]),
    "emptied": lambda path, rng: path.write_bytes(b""),
    "gone": lambda path, rng: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_named_and_built_again(tmp_path, capsys, damage):
    rng = np.random.default_rng(0)
    readings = Readings()
    open_corpus(readings.split, DROPPING, str(tmp_path))
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 7
    for number, name in enumerate(names, start=1):
        DAMAGES[damage](folder / name, rng)
        corpus = open_corpus(readings.split, DROPPING, str(tmp_path))
        assert readings.count == 1 + number
        assert texts(corpus.source) == ["a house", "end"]
        err = capsys.readouterr().err
        assert " damaged: tokenizing train again\n" in err
        assert name in err or name == "digests.json"


def test_large_arrays_are_hashed_again_only_when_anything_about_them_changes(tmp_path, monkeypatch, capsys):
    hashed, readings, whole = [], Readings(), integrity._sha256
    monkeypatch.setattr(integrity, "_sha256", lambda path: hashed.append(path.name) or whole(path))
    monkeypatch.setattr(corpus, "LARGE", 0)

    def hashed_to_open():
        hashed.clear()
        open_corpus(readings.split, DROPPING, str(tmp_path))
        return len(hashed)

    assert [hashed_to_open() for _ in range(3)] == [6, 0, 0]  # once as they are sealed
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for damage in DAMAGES.values():
        damage(folder / corpus.TIMES, np.random.default_rng(0))
        assert [hashed_to_open() for _ in range(3)] == [6, 0, 0]
    path, before = folder / "source.values.npy", (folder / "source.values.npy").stat()
    time.sleep(0.02)  # the file system's clock is coarser than ours
    flip(path, np.random.default_rng(0))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps the times does
    hashed_to_open()
    assert "source.values.npy damaged: tokenizing train again" in capsys.readouterr().err
    assert (hashed_to_open(), readings.count) == (0, 2)


def test_a_large_compressed_text_is_unpacked_once(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SKIPPED", 100)
    (tmp_path / "train.tsv.gz").write_bytes(gzip.compress(b"a house\tein Haus\n" * 200))
    split = open_split(DataConfig(dir=str(tmp_path), source="files"), "train")
    opened, unpack = [], text.open_bytes
    monkeypatch.setattr(text, "open_bytes", lambda path: opened.append(path) or unpack(path))
    monkeypatch.setattr(preparation, "BLOCK", 16)
    assert len(open_corpus(split, DROPPING, str(tmp_path / "cache"))) == 200
    assert len(opened) == 1


def test_threads_that_open_at_once_build_once(tmp_path):
    readings, opened = Readings(seconds=0.1), []
    work = [
        threading.Thread(target=lambda: opened.append(open_corpus(readings.split, DROPPING, str(tmp_path))))
        for _ in range(3)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert readings.count == 1
    assert [texts(corpus.source) for corpus in opened] == [["a house", "end"]] * 3


# Prepares 40 blocks of 16 pairs with some processes; the text is read by these, or by the one that starts them.
BLOCKS = """
import os, resource, sys
from jformer.data import preparation
from jformer.data.corpus import open_corpus
from tests.data.test_corpus import DROPPING, WORDS, many
from jformer.data.sources.split import Split

folder, cores, reads = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
os.sched_getaffinity = lambda _: range(cores)
preparation.BLOCK = 16
open_corpus(Split("train", "text 1", many, 637 if reads else 0, seekable=reads), WORDS, folder)
assert (resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > 0) == (cores > 1)
"""


def many(counts, first=0):
    for i in range(first, 637):
        counts["odd"] += i % 2
        if kills := os.environ.get("KILLS"):  # the place where those that read are killed
            time.sleep(0.001)
            if i == int(kills):
                os.kill(os.getpid(), signal.SIGKILL)
        yield Pair(f"{i // 2} house" if i % 50 else "", f"Haus {i % 7}" + " zu lang" * (i % 11 == 0))


def prepared(folder, cores, reads, kills=""):
    command = [sys.executable, "-c", BLOCKS, str(folder), str(cores), str(reads)]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"KILLS": kills}, timeout=60, check=False).returncode
    found = [path for path in folder.iterdir() if path.is_dir() and not path.suffix]
    return code, {path.name: path.read_bytes() for path in found[0].iterdir()} if found else {}


@pytest.mark.slow
def test_processes_and_kills_leave_the_arrays_as_they_are(tmp_path):
    code, expected = prepared(tmp_path / "one", 1, True)
    assert (code, len(expected)) == (0, 7)
    assert json.loads(expected["counts.json"])["odd"] == 318
    assert prepared(tmp_path / "reading", 3, True) == (0, expected)
    assert prepared(tmp_path / "read to", 2, False) == (0, expected)
    killed, folder = -signal.SIGKILL, tmp_path / "killed"
    assert prepared(folder, 1, True, kills="400") == (killed, {})
    assert len(list(folder.glob("*.tmp/*.npz"))) == 25
    assert prepared(folder, 2, False, kills="500") == (killed, {})  # the process that starts the others
    assert len(list(folder.glob("*.tmp/*.npz"))) >= 27
    assert prepared(folder, 2, True, kills="600") == (killed, {})  # each of those that it starts, and then itself
    for damage in ("cut", "emptied"):
        DAMAGES[damage](min(folder.glob("*.tmp/*.npz")), np.random.default_rng(0))
        assert prepared(folder, 1, True)[0] == 1  # which is named
        assert len(list(folder.glob("*.tmp/*.npz"))) == 39  # all others are kept
    assert prepared(folder, 2, True) == (0, expected)
    assert not [path for path in folder.iterdir() if path.suffix in (".tmp", ".new")]


def test_processes_that_end_at_once_are_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "BLOCK", 16)
    monkeypatch.setattr(preparation, "_as_sent", lambda make: bytes(2**20))  # more than a pipe holds
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(sys, "executable", "false")
    found = open_corpus(Split("train", "text 1", many, 637, seekable=True), WORDS, str(tmp_path))
    assert found.counts["examples read"] == 637


CHILD = """
import os, sys, time
from jformer.data.corpus import open_corpus
from jformer.data.encoders import (PairEncoder, Side)
from jformer.data.sources.split import (Pair, Split)
from jformer.data.tokenizers.lists import ByteTokenizer

def read(counts):
    print("reading", flush=True)
    yield Pair("a house", "ein Haus")
    {inside}
    yield Pair("end", "Ende")

encoder = PairEncoder(Side(ByteTokenizer("identity"), 10), Side(ByteTokenizer("identity"), 12), "drop")
print(len(open_corpus(Split("train", "text 1", read), encoder, sys.argv[1])))
"""


def child(folder, inside):
    command = [sys.executable, "-c", CHILD.format(inside=inside), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_that_open_at_once_build_once(tmp_path):
    children = [child(tmp_path, "time.sleep(0.3)") for _ in range(2)]
    said = sorted(process.communicate(timeout=60)[0].split() for process in children)
    assert said == [["2"], ["reading", "2"]]


def test_a_cache_half_built_by_a_killed_process_is_not_found(tmp_path):
    killed = child(tmp_path, "os.kill(os.getpid(), 9)")
    assert killed.communicate(timeout=60)[0].split() == ["reading"]
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("*.tmp"))
    readings = Readings()
    corpus = open_corpus(readings.split, DROPPING, str(tmp_path))
    assert (readings.count, texts(corpus.source)) == (1, ["a house", "end"])
    assert not list(tmp_path.glob("*.tmp"))
