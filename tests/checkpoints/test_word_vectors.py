import gzip
import struct

import numpy as np
import pytest

from jformer.checkpoints import word_vectors
from jformer.checkpoints.word_vectors import match, read_vectors
from jformer.errors import UserError
from tests.data.test_text import write

SYMBOLS = ["<pad>", "<s>", "</s>", "<unk>"]
ENTRIES = [("the", [0.5, -0.25, 0.1]), ("house", [1e-3, 2.0, 3.5]), ("Straße", [7.0, -0.0, 1e-30]), ("中文", [0, 0, 1])]
FORMATS = ["GloVe text", "word2vec text", "word2vec binary", "word2vec binary without line feeds"]


def encode(entries, form):
    """Return a file's bytes as the programs that the form is named after write them."""
    lines = [token.encode() + b" " + " ".join(map(repr, values)).encode() for token, values in entries]
    if form == "GloVe text":
        return b"".join(line + b"\n" for line in lines)
    header = f"{len(entries)} {len(entries[0][1])}\n".encode()
    if form == "word2vec text":
        return header + b"".join(line + b" \n" for line in lines)
    end = b"" if form.endswith("without line feeds") else b"\n"
    return header + b"".join(token.encode() + b" " + pack(values) + end for token, values in entries)


def pack(values):
    return struct.pack(f"<{len(values)}f", *values)


def refused(path, content, wanted=("the",), size=3):
    """Return the one line with which a file is refused."""
    with pytest.raises(UserError) as error:
        read_vectors(write(path, content), wanted, size)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("name", ["a.vec", "a.bin", "a.txt.gz"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_same_vectors_whatever_the_files_name(tmp_path, form, name):
    file = read_vectors(write(tmp_path / name, encode(ENTRIES, form)), [token for token, _ in ENTRIES], 3)
    assert form.startswith(file.format)
    assert (file.rows, file.duplicates) == (4, 0)
    assert list(file.found) == [token for token, _ in ENTRIES]
    for token, values in ENTRIES:
        assert file.found[token].dtype == np.float32
        np.testing.assert_array_equal(file.found[token], np.array(values, np.float32))


@pytest.mark.parametrize("form", FORMATS)
def test_only_wanted_vectors_are_kept(tmp_path, form):
    file = read_vectors(write(tmp_path / "a", encode(ENTRIES, form)), {"Straße", "Haus"}, 3)
    assert list(file.found) == ["Straße"]
    assert file.rows == 4


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_vector_of_a_token_wins_and_the_others_are_counted(tmp_path, form):
    entries = [*ENTRIES, ("the", [9, 9, 9]), ("house", [9, 9, 9]), ("the", [9, 9, 9])]
    file = read_vectors(write(tmp_path / "a", encode(entries, form)), ["the", "Straße"], 3)
    assert file.found["the"].tolist() == pytest.approx([0.5, -0.25, 0.1])
    assert (file.rows, file.duplicates) == (7, 2)


@pytest.mark.parametrize("form", FORMATS)
def test_entries_may_lie_anywhere_across_the_chunks_of_a_stream(tmp_path, monkeypatch, form):
    rng = np.random.default_rng(0)
    entries = [(f"{'x' * (i % 9)}{i}", rng.normal(size=3).tolist()) for i in range(300)]
    path = write(tmp_path / "a", encode(entries, form))
    for chunk in (128, 131, 1000):
        monkeypatch.setattr(word_vectors, "_CHUNK", chunk)
        found = read_vectors(path, [token for token, _ in entries], 3).found
        np.testing.assert_array_equal(list(found.values()), np.array([v for _, v in entries], np.float32))


@pytest.mark.parametrize("layout", [b"{} \n", b"{}\r\n", b"{}\n"])
@pytest.mark.parametrize("cut", [0, 1])
def test_text_lines_may_end_as_writers_end_them(tmp_path, layout, cut):
    lines = [layout.replace(b"{}", line) for line in (b"the 1 2 3", b"a -1 .5 1e1")]
    content = b"".join(lines)[: -cut or None]  # the last line feed may be missing
    for header in (b"", b"2 3\n"):
        found = read_vectors(write(tmp_path / "a", header + content), ["a", "the"], 3).found
        assert found["a"].tolist() == [-1, 0.5, 10]
        assert found["the"].tolist() == [1, 2, 3]


def test_tokens_may_hold_spaces_and_numbers_and_text_that_is_no_utf8(tmp_path):
    lines = [b". . . 1 2 3", b"at name@domain.com 4 5 6", b"in 2004 7 8 9", b"\xff\xfe 1 1 1", b"2 3 4 5", b" 6 6 6"]
    wanted = [". . .", "at name@domain.com", "in 2004", "2", "at"]
    found = read_vectors(write(tmp_path / "a", b"\n".join(lines)), wanted, 3).found
    assert {token: vector[0] for token, vector in found.items()} == {
        ". . .": 1, "at name@domain.com": 4, "in 2004": 7, "2": 3,
    }  # fmt: skip


@pytest.mark.parametrize("value", [0.0, 1.0, struct.unpack("<f", b"\n \n ")[0], struct.unpack("<f", b"1 \x802")[0]])
def test_binary_is_recognised_whatever_its_first_vector_looks_like(tmp_path, value):
    """Zeros, line feeds and spaces among the bytes of the first vector; the rest is ordinary."""
    values = [value, 0.3, -0.1, 0.7, 0.2]
    path = write(tmp_path / "a", encode([("</s>", values), ("the", [1, 2, 3, 4, 5])], "word2vec binary"))
    file = read_vectors(path, ["</s>", "the"], 5)
    assert file.format == "word2vec binary"
    np.testing.assert_array_equal(file.found["</s>"], np.array(values, np.float32))


@pytest.mark.parametrize(
    "first", [b"the 0.1 0.2 abc", "the 0 0 0\né 1 1 1".encode(), "né 1 2 3".encode(), b"\xff\x80 1 2 3"]
)
def test_text_is_recognised_even_where_its_first_entry_is_odd(tmp_path, first):
    path = write(tmp_path / "a", b"%d 3\n" % (2 + first.count(b"\n")) + first + b"\nhouse 1 2 3\n")
    if b"abc" in first:
        with pytest.raises(UserError, match=r"a:2 is not a word vector"):
            read_vectors(path, ["house"], 3)
    else:
        assert read_vectors(path, ["house"], 3).format == "word2vec text"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [1, 2, 4, 512])
def test_vectors_of_another_size_are_refused(tmp_path, form, size):
    message = refused(tmp_path / "a", encode(ENTRIES, form), size=size)
    assert message == (
        f":1 has vectors of 3 numbers, the model's are of {size}: use a file with vectors of {size}, or set "
        "model.d_model (of a recurrent model, model.recurrent.embedding_size) to 3"
    )


def test_a_header_that_tells_another_size_than_its_entries_have_is_refused(tmp_path):
    message = refused(tmp_path / "a", b"1 3\nthe 1 2 3 4\n")
    assert message.startswith(":2 has vectors of 4 numbers, the model's are of 3")


@pytest.mark.parametrize("content", [b"", b"\n", b"The house is small.\n", b"3 3\n", b"\x93NUMPY\1\0 x y z", b"0 3\n"])
def test_a_file_without_word_vectors_is_refused(tmp_path, content):
    assert " is not a word vector: use a file in GloVe, word2vec or fastText" in refused(tmp_path / "a", content)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"the 1 zwei 3", "could not convert string to float: 'zwei'; "),
        (b"the 1 \xff 3", "could not convert string to float: '�'; "),
        (b"the 1 2 nan", "number 3 of the vector is nan; "),
        (b"the -inf 2 3", "number 1 of the vector is -inf; "),
        (b"the 1 1e39 3", "number 2 of the vector is inf; "),
        (b"the 1 2", "2 numbers, not 3; the file is damaged or cut short"),
        (b"", "0 numbers, not 3; the file is damaged or cut short"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path, line, message):
    content = b"a 1 2 3\n" + line + b"\nb 1 2 3\n"
    assert refused(tmp_path / "a", content).startswith(f":2: {message}")
    assert refused(tmp_path / "a", b"3 3\n" + content).startswith(f":3: {message}")


def test_a_bad_number_of_the_first_vector_is_not_taken_for_another_size(tmp_path):
    assert refused(tmp_path / "a", b"the zwei 2 3\n").startswith(":1: could not convert string to float: 'zwei'; ")


def test_a_bad_number_is_refused_by_file_and_entry_of_a_binary_file(tmp_path):
    content = encode([("a", [0.1, 2, 3]), ("the", [1, float("nan"), 3])], "word2vec binary")
    assert refused(tmp_path / "a", content).startswith(", entry 2: number 2 of the vector is nan; ")


@pytest.mark.parametrize("cut", [1, 5, 12, 14])
def test_a_binary_file_that_ends_within_an_entry_is_refused(tmp_path, cut):
    content = encode(ENTRIES, "word2vec binary without line feeds")[:-cut]
    assert refused(tmp_path / "a", content).startswith(", entry 4 ends within its vector; the file is damaged or cut")


@pytest.mark.parametrize("form", FORMATS[1:])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_with_more_or_fewer_vectors_than_its_header_says_is_refused(tmp_path, form, change):
    content = encode(ENTRIES, form).replace(b"4 3\n", f"{4 - change} 3\n".encode(), 1)
    assert refused(tmp_path / "a", content).startswith(f": 4 vectors, but its first line says {4 - change}; ")


def test_a_damaged_gzip_file_is_refused(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(encode(ENTRIES, "word2vec text"))[:-9])
    with pytest.raises(UserError, match="not a complete gzip file"):
        read_vectors(path, ["the"], 3)


def test_words_match_as_they_are_and_then_lower_cased(tmp_path):
    entries = [("house", [1, 1, 1]), ("House", [2, 2, 2]), ("dog", [3, 3, 3]), ("STRASSE", [4, 4, 4])]
    path = write(tmp_path / "a", encode(entries, "GloVe text"))
    matched = match([*SYMBOLS, "zebra", "House", "Dog", "house", "DOG", "Strasse"], path, 3)
    assert matched.ids.tolist() == [5, 6, 7, 8]
    assert matched.ids.dtype == np.int32
    assert matched.vectors.dtype == np.float32
    assert matched.vectors.shape == (4, 3)
    assert matched.vectors[:, 0].tolist() == [2, 3, 1, 3]
    assert matched.coverage == (
        f"4 of 6 words (66.7%) have vectors in {path}: 2 as they are, 2 lower-cased; "
        "GloVe text, 4 vectors, 0 duplicates left out"
    )


def test_only_pieces_that_begin_a_word_match_without_their_sign(tmp_path):
    entries = [("house", [1, 1, 1]), ("s", [2, 2, 2]), ("▁the", [3, 3, 3]), ("the", [4, 4, 4]), ("▁", [5, 5, 5])]
    path = write(tmp_path / "a", encode(entries, "GloVe text"))
    matched = match([*SYMBOLS, "▁", "▁House", "s", "the", "▁the", "house", "▁zebra"], path, 3)
    assert matched.ids.tolist() == [5, 8]
    assert matched.vectors[:, 0].tolist() == [1, 4]
    assert matched.coverage.startswith(f"2 of 3 words (66.7%) have vectors in {path}: 1 as they are, 1 lower-cased;")


@pytest.mark.parametrize("sign", ["", "▁"])
def test_symbols_never_match(tmp_path, sign):
    entries = [(token, [1, 1, 1]) for token in [*SYMBOLS, "the"]]
    matched = match([*SYMBOLS, f"{sign}the"], write(tmp_path / "a", encode(entries, "GloVe text")), 3)
    assert matched.ids.tolist() == [4]
    assert matched.coverage.startswith("1 of 1 words")


@pytest.mark.parametrize("tokens", [["zebra", "Hund"], ["▁zebra", "the"], ["▁"], []])
def test_a_file_without_a_vector_for_any_token_is_refused(tmp_path, tokens):
    path = write(tmp_path / "a", encode([*ENTRIES, ("<unk>", [1, 1, 1])], "word2vec text"))
    with pytest.raises(UserError, match=r"a: none of its 5 vectors is for one of the [0-2] words of the vocabulary; "):
        match([*SYMBOLS, *tokens], path, 3)
