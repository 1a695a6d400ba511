import gc
import json
import math
import struct

import pytest
from etils import epath
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jformer.config import resolve
from jformer.errors import LOST, UserError
from jformer.integrity import without_digest
from jformer.training.record import AppendedFile, JsonlWriter, Record, TensorBoardWriter
from tests import small_run
from tests.faults.full_disk import no_file_above


def write_rows(path, *rows):
    writer = JsonlWriter(path)
    for row in rows:
        writer.write(row)
    writer.close()


def rows_of(path):
    return [without_digest(json.loads(line), "here") for line in path.read_text(encoding="utf-8").splitlines()]


def read_events(folder):
    """Read TensorBoard's files: length, checksum, message, checksum."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def test_every_row_is_on_disk_before_the_next(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    for step in range(3):
        writer.write({"step": step, "split": "train", "loss": 0.5})
        assert rows_of(path)[-1] == {"step": step, "split": "train", "loss": 0.5}
    writer.close()


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, {"step": 1, "split": "train", "loss": math.nan, "perplexity": math.inf, "note": "é"})
    assert "NaN" not in path.read_text(encoding="utf-8")
    assert rows_of(path) == [{"step": 1, "split": "train", "loss": None, "perplexity": None, "note": "é"}]


def test_a_resumed_run_appends_after_the_rows_of_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "split": split} for step in (10, 20, 30) for split in ("train", "valid")]
    write_rows(path, *rows)
    JsonlWriter.truncate_after(path, 20)
    write_rows(path, {"step": 30, "split": "train", "loss": 1.0})
    assert rows_of(path) == [*rows[:4], {"step": 30, "split": "train", "loss": 1.0}]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_half_written_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, {"step": 1, "split": "train"})
    with path.open("ab") as file:
        file.write('{"step": 2, "note": "é'.encode()[:-1])
    JsonlWriter.truncate_after(path, 5)
    write_rows(path, {"step": 2, "split": "train"})
    assert [row["step"] for row in rows_of(path)] == [1, 2]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"step": 2', '"step" 2', "is not a row of metrics"),
        ('"loss": 0.5', '"loss": 0.6', "is damaged: its content does not"),
    ],
)
def test_a_damaged_line_within_is_named(tmp_path, old, new, said):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, *({"step": step, "split": "train", "loss": 0.25 * step} for step in (1, 2, 3)))
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=rf"metrics\.jsonl:2 {said}"):
        JsonlWriter.truncate_after(path, 5)


def test_the_rows_that_are_left_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, *({"step": step, "split": "train"} for step in (1, 2, 3)))
    assert JsonlWriter.truncate_after(path, 2) == 2


def test_nothing_to_truncate_is_no_error(tmp_path):
    assert JsonlWriter.truncate_after(tmp_path / "metrics.jsonl", 5) == 0
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_every_number_and_forgets_repeated_steps(tmp_path):
    writer = TensorBoardWriter(tmp_path, purge_step=7)
    writer.write({"step": 7, "split": "valid", "loss": 0.5, "note": "text"})
    writer.close()
    events = list(read_events(tmp_path))
    scalars = {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}
    assert scalars == {("valid/loss", 7): 0.5}
    assert [e.step for e in events if e.session_log.status == SessionLog.START] == [7]


def test_rows_that_have_no_room_are_refused_by_the_name_of_their_file_and_once(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with no_file_above(400):
        with pytest.raises(
            UserError, match=r"metrics\.jsonl: could not be written \(File too large\); free some space"
        ):
            for step in range(20):
                writer.write({"step": step, "split": "train", "loss": 0.5})
        writer.close()
    assert JsonlWriter.truncate_after(tmp_path / "metrics.jsonl", 20) == step


def test_curves_that_have_no_room_are_an_error_where_they_are_written(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    with no_file_above(4_000), pytest.raises(OSError, match="File too large"):
        for step in range(1_000):
            writer.write({"step": step, "split": "train", "loss": 0.5})


@pytest.mark.slow
def test_curves_that_have_no_room_when_they_are_kept_are_told_once(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    with no_file_above(100):
        for step in range(10):
            writer.write({"step": step, "split": "train", "loss": 0.5})
        with pytest.raises(OSError, match="File too large"):
            writer.keep()
        del writer
        gc.collect()  # Python would write what is left once more, and print what that raises


def test_what_stands_in_the_place_of_a_file_or_a_folder_is_to_be_moved(tmp_path):
    moved = "; move it away, or make it readable and writable"
    (tmp_path / "training.log").mkdir()
    with pytest.raises(UserError, match=f"/training.log: Is a directory{moved}"):
        AppendedFile(epath.Path(tmp_path / "training.log"))
    (tmp_path / "tensorboard").touch()
    with pytest.raises(UserError, match=f"/tensorboard: Not a directory{moved}"):
        Record(epath.Path(tmp_path), resolve(small_run.get_config()), 0, print)


def test_a_bucket_that_cannot_be_reached_for_a_moment_ends_a_run_that_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("jformer.training.record.in_bucket", lambda path: True)

    def refuse(*given):
        raise LookupError("503 Service Unavailable")  # a bucket's errors are its own

    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.write({"step": 1})
    monkeypatch.setattr(type(tmp_path), "write_text", refuse)
    with pytest.raises(
        UserError, match=r"metrics.jsonl: could not be written now \(503 Service Unavailable\)"
    ) as caught:
        writer.keep()
    assert caught.value.code == LOST
    writer.close()  # and says nothing again
