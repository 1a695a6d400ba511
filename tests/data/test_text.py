import doctest
import gzip
import random
from collections import Counter

import pytest

from jformer.data import text
from jformer.data.file_digests import digest
from jformer.data.text import admit, decode, read_lines
from jformer.errors import UserError


def write(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path):
    counts = Counter()
    return list(read_lines(path, counts)), counts


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("content", ["a\nb\n\nc", "a\nb\n\nc\n", "\n", ""])
def test_lines_that_keep_their_ends_are_the_file(tmp_path, name, content):
    path = write(tmp_path / name, content.encode())
    assert list(read_lines(path, Counter(), keepends=True)) == content.splitlines(keepends=True)


def test_a_range_of_lines_is_read_and_counted_alone(tmp_path):
    path = write(tmp_path / "a", "\ufeffa\r\nb\nc\r\nd\n\0\n".encode())
    for first, last, lines, counts in [
        (1, 3, ["b", "c"], {text.CARRIAGE_RETURNS_REMOVED: 1}),
        (0, 1, ["a"], {text.BOMS_REMOVED: 1, text.CARRIAGE_RETURNS_REMOVED: 1}),
        (2, 2, [], {}),
    ]:
        met = Counter()
        assert list(read_lines(path, met, first, last)) == lines
        assert met == counts
    with pytest.raises(UserError, match=r"a:5: NUL"):
        list(read_lines(path, Counter(), first=3))


def test_unusual_separators_never_shift_lines(tmp_path):
    """Where str.splitlines breaks is content, but for the carriage return of a CRLF."""
    rng = random.Random(0)
    lines = []
    for number in range(200):
        characters = [*str(number), *rng.choices("ab \r\v\f\x1c\x1d\x1e\x85\u2028\u2029", k=6)]
        lines.append("".join(characters) + ".")
    got, counts = read(write(tmp_path / "a", "\n".join(lines).encode()))
    assert got == lines
    odd = [line for line in lines if len(line.splitlines()) > 1]
    assert counts == {text.SEPARATORS_KEPT: len(odd)}
    assert len(odd) > 100


def test_a_byte_order_mark_and_carriage_returns_of_crlf_are_removed_and_counted(tmp_path):
    lines, counts = read(write(tmp_path / "a", "\ufeffone\r\n\ufefftwo\r\n\r\nthree".encode()))
    assert lines == ["one", "\ufefftwo", "", "three"]
    assert counts == {text.BOMS_REMOVED: 1, text.BOMS_KEPT: 1, text.CARRIAGE_RETURNS_REMOVED: 3}


def test_one_carriage_return_goes_and_others_stay():
    counts = Counter()
    assert admit("a\rb\r\r", counts) == "a\rb\r"
    assert counts == {text.CARRIAGE_RETURNS_REMOVED: 1, text.SEPARATORS_KEPT: 1}


def test_a_crlf_within_a_text_is_one_line_break():
    counts = Counter()
    assert admit("a\r\nb\r\n", counts, lines=True) == "a\nb\n"
    assert admit("a\r\nb", counts) == "a  b"
    assert counts == {text.CARRIAGE_RETURNS_REMOVED: 2, text.LINE_FEEDS_REPLACED: 1}


def test_a_line_feed_within_a_text_becomes_a_space():
    counts = Counter()
    assert admit("a\nb\n", counts) == "a b "
    assert counts == {text.LINE_FEEDS_REPLACED: 1}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"caf\xe9", "invalid UTF-8, byte 0xe9 at offset 3"),
        (b"\xff\xfeh\x00", "invalid UTF-8, byte 0xff at offset 0"),
        (b"\xed\xa0\x80", "invalid UTF-8"),
        (b"ab\x00c", "NUL character at offset 2"),
    ],
)
def test_bad_text_is_refused_by_file_and_line(tmp_path, bad, message):
    path = write(tmp_path / "a.gz", b"fine\n\n" + bad + b"\nfine\n")
    with pytest.raises(UserError, match=rf"a\.gz:3: {message}"):
        read(path)


@pytest.mark.parametrize(
    ("bad", "replaced"),
    [(b"caf\xe9", "caf\ufffd"), (b"ab\x00c\x00", "ab\ufffdc\ufffd"), (b"\xff\xfeh\x00", "\ufffd\ufffdh\ufffd")],
)
def test_bad_text_can_be_replaced_counted_and_told(tmp_path, bad, replaced):
    path = write(tmp_path / "a.gz", b"fine\n\n" + bad + b"\n\xef\xbf\xbd\n")
    counts, told = Counter(), []
    lines = list(read_lines(path, counts, invalid="replace", warn=lambda *each: told.append(each)))
    assert lines == ["fine", "", replaced, "\ufffd"]
    assert counts == {text.INVALID_REPLACED: 1}
    assert [number for number, _ in told] == [3]
    assert told[0][1].startswith(("invalid UTF-8, byte 0x", "NUL character at offset 2"))


def test_decode_leaves_the_place_to_the_caller():
    assert decode("ä".encode()) == "ä"
    with pytest.raises(ValueError, match="offset 1"):
        decode(b"a\x80")


@pytest.mark.parametrize(
    "damage", [lambda gz: b"plain", lambda gz: gz[:-12], lambda gz: gz[:12] + b"\xff\xff" + gz[14:]]
)
def test_a_damaged_gzip_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "a.gz"
    path.write_bytes(damage(gzip.compress(bytes(range(256)) * 9)))
    with pytest.raises(UserError, match=r"a\.gz: not a complete gzip file"):
        digest(path)


def test_a_line_that_a_small_compressed_file_unpacks_to_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LONGEST_UNPACKED", 10_000)
    path = write(tmp_path / "a.gz", b"fine\n" + b"a" * 10_001 + b"\nfine\n")
    with pytest.raises(UserError, match=r"a\.gz:2: a line of more than 10,000 bytes in a compressed file; unpack"):
        read(path)
    for content in (b"a" * 10_000, b"a" * 10_000 + b"\n"):
        assert read(write(tmp_path / "a.gz", content))[0] == ["a" * 10_000]
    assert read(write(tmp_path / "a.txt", b"a" * 10_001))[0] == ["a" * 10_001]


def test_pieces_are_joined_as_their_language_is_written():
    assert doctest.testmod(text).failed == 0
    joined = {language: text.join_pieces(["ไป OK", "", "ดี。", "好", "x"], language) for language in ("th", "de", "")}
    assert joined == {"th": "ไป OKดี。好x", "de": "ไป OK ดี。好 x", "": "ไป OK ดี。好 x"}


def test_an_unreadable_file_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="missing: No such file"):
        digest(tmp_path / "missing")
