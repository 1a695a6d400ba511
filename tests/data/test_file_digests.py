import errno
import hashlib
import os
import time
from collections import Counter

import pytest
from etils import epath

from jformer.data import file_digests, text
from jformer.data.file_digests import digest
from jformer.data.text import read_lines
from jformer.errors import UserError
from tests.data.test_text import write


@pytest.fixture
def hashed(tmp_path, monkeypatch):
    """Let every file count as large, remember in a folder of this test, and return the files that were hashed."""
    found = []
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(file_digests, "here", lambda: epath.Path(tmp_path / "here"))
    monkeypatch.setattr(file_digests, "LARGE", 0)
    monkeypatch.setattr(file_digests, "SETTLED", 0.0)
    whole = file_digests._hashed
    monkeypatch.setattr(file_digests, "_hashed", lambda path: found.append(path.name) or whole(path))
    return found


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("content", [b"", b"\n", b"one", b"one\n", b"one\ntwo", b"one\n\ntwo\n\n"])
def test_digest_counts_the_lines_that_are_read(tmp_path, name, content):
    path = write(tmp_path / name, content)
    counts = Counter()
    lines = list(read_lines(path, counts))
    assert lines == content.decode().removesuffix("\n").split("\n")[: len(lines)]
    assert digest(path)[:2] == (hashlib.sha256(content).hexdigest(), len(lines))
    assert len(lines) == content.count(b"\n") + (not content.endswith(b"\n") and content != b"")
    assert not counts


@pytest.mark.parametrize("stride", [1, 3, 1000])
def test_lines_are_read_from_any_line_of_a_file_larger_than_a_chunk(tmp_path, monkeypatch, stride):
    for module in (file_digests, text):
        monkeypatch.setattr(module, "STRIDE", stride)
    content = [f"{'x' * (i * 7919 % 900)}{i}" for i in range(6_000)]
    path = write(tmp_path / "a", "\n".join(content).encode())
    sha256, lines, starts = digest(path)
    assert (sha256, lines) == (hashlib.sha256(path.read_bytes()).hexdigest(), 6_000)
    assert len(starts) == -(-6_000 // stride)
    for first in (0, 1, 2_999, 3_000, 5_999, 6_000):
        assert list(read_lines(path, Counter(), first, 5_999, starts=starts)) == content[first:5_999]
        assert list(read_lines(path, Counter(), first, starts=starts)) == content[first:]
    with pytest.raises(UserError, match="a:4001: "):
        list(
            read_lines(
                write(path, path.read_bytes().replace(b"x4000\n", b"x400\xff\n")), Counter(), 4_000, starts=starts
            )
        )


def test_a_large_file_is_hashed_once_until_anything_about_it_changes(tmp_path, hashed):
    path = write(tmp_path / "a", b"one\n")
    first = digest(path)
    assert digest(path) == digest(path) == first
    assert hashed == ["a"]
    before = path.stat()
    time.sleep(0.02)  # the file system's clock is coarser than ours
    path.write_bytes(b"two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps the times does
    assert digest(path) == (hashlib.sha256(b"two\n").hexdigest(), 1, (0,)) != first
    moved = path.rename(tmp_path / "b")
    assert digest(moved)[0] == hashlib.sha256(b"two\n").hexdigest()
    assert hashed == ["a", "a", "b"]


def test_what_changed_a_moment_ago_is_not_remembered(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(file_digests, "SETTLED", 60.0)
    path = write(tmp_path / "a", b"one\n")
    assert digest(path) == digest(path)
    assert hashed == ["a", "a"]


def test_a_file_is_hashed_where_nothing_can_be_remembered(tmp_path, hashed, monkeypatch):
    def fail(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_digests, "replace_content", fail)
    assert digest(write(tmp_path / "a", b"one\n"))[1] == 1
    assert hashed == ["a"]


def test_small_files_are_always_hashed(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(file_digests, "LARGE", 5)
    path = write(tmp_path / "a", b"one\n")
    assert digest(path) == digest(path)
    assert hashed == ["a", "a"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"sha256": "0", "lines": 7, "digest": "0"}'])
def test_what_was_remembered_and_is_damaged_is_not_believed(tmp_path, hashed, damage):
    path = write(tmp_path / "a", b"one\n")
    first = digest(path)
    (remembered,) = (tmp_path / "home/.cache/jformer/hashed").iterdir()
    remembered.write_bytes(damage)
    assert digest(path) == digest(path) == first
    assert hashed == ["a", "a"]


@pytest.mark.parametrize("folder", ["", "hashed"])
def test_a_folder_that_others_can_write_to_is_not_believed(tmp_path, hashed, folder):
    path = write(tmp_path / "a", b"one\n")
    for expected, place in ((1, "home/.cache/jformer"), (3, "here")):  # then in the temporary folder, then nowhere
        (tmp_path / place / "hashed").mkdir(parents=True, exist_ok=True)
        (tmp_path / place / folder).chmod(0o777)
        assert digest(path) == digest(path)
        assert len(hashed) == expected


def test_a_group_may_write_to_the_folder_around(tmp_path, hashed):
    path, around = write(tmp_path / "a", b"one\n"), tmp_path / "home/.cache/jformer"
    before = os.umask(0o002)
    try:
        around.mkdir(parents=True)
        assert digest(path) == digest(path)
        assert hashed == ["a"]
        around.joinpath("hashed").chmod(0o770)
        assert digest(path) == digest(path)
    finally:
        os.umask(before)
    assert hashed == ["a", "a"]  # now remembered in the temporary folder
    assert [(tmp_path / "here" / name).stat().st_mode & 0o777 for name in ("", "hashed")] == [0o700] * 2
