"""What a run keeps of its course: rows, answers to validation examples, and what it said."""

import contextlib
import time
from collections.abc import Callable, Mapping

from etils.epath import Path

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.storage import writing
from jformer.training.rows import Sample, read_sample
from jformer.training.trackers import Tracker, open_tracker
from jformer.training.writers import AppendedFile, JsonlWriter, TensorBoardWriter


class Record:
    """The files of a run, and the services that get its rows, TensorBoard among them.

    The run continues without a service that fails, and without training.log. Rows and answers are the run's own: a disk
    that does not take them ends it with a UserError, and a resumed run writes them again.
    """

    def __init__(self, workdir: Path, config: Config, step: int, say: Callable[[str], None]) -> None:
        """Open all of it, dropping what comes after a step: a killed run wrote it, and its restart repeats it.

        `say` is called with what a person should know. Raises UserError for a damaged file, a full disk, and a service
        that cannot be reached.
        """
        path, samples = workdir / "metrics.jsonl", workdir / "samples.jsonl"
        self.rows = JsonlWriter.truncate_after(path, step)  # in metrics.jsonl
        JsonlWriter.truncate_after(samples, step, read_sample)
        self._say = say
        self._trackers: dict[str, Tracker] = {
            name: open_tracker(name, workdir, config) for name in config.train.trackers
        }
        with writing(workdir / "tensorboard"):
            self._trackers["TensorBoard"] = TensorBoardWriter(workdir / "tensorboard", step + 1)
        self._metrics, self._samples = JsonlWriter(path), JsonlWriter(samples)
        self._text: AppendedFile | None = AppendedFile(workdir / "training.log")

    def write(self, row: Mapping[str, object]) -> None:
        """Add a row."""
        self._metrics.write(row)
        self._tell(lambda tracker: tracker.write(row))
        self.rows += 1

    def write_sample(self, step: int, number: int, sample: Sample) -> None:
        """Add a sample; those of a step are counted from 1."""
        self._samples.write({"step": step, "sample": number, **sample._asdict()})

    def write_line(self, text: str) -> None:
        """Add a line that was said."""
        if not self._text:
            return
        try:
            self._text.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
        except UserError as error:
            self._text.close()
            self._text = None
            self._say(f"training.log gets no further lines: {error.__cause__}")

    def keep(self) -> None:
        """Make sure that all of it outlives this process."""
        for file in self._files():
            file.keep()
        self._tell(lambda tracker: tracker.keep())

    def close(self, failed: bool = False) -> None:
        """Keep all of it and close the files; the services are told whether the run failed."""
        self._tell(lambda tracker: tracker.close(failed))
        with contextlib.ExitStack() as closing:
            for file in self._files():
                closing.callback(file.close)

    def _files(self) -> list[JsonlWriter | AppendedFile]:
        return [self._metrics, self._samples, *([self._text] if self._text else [])]

    def _tell(self, send: Callable[[Tracker], None]) -> None:
        """Send something to every service; the run continues without one that fails."""
        for name, tracker in list(self._trackers.items()):
            try:
                send(tracker)
            except Exception as error:  # they raise of many kinds, and none is worth a run
                del self._trackers[name]
                self._say(f"{name} failed and gets no further rows; metrics.jsonl has all of them: {error}")
