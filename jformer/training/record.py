"""What a run keeps of its course: rows, answers to validation examples, and what it said."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from etils.epath import Path

from jformer.config.options import Config
from jformer.data.sources.split import Pair
from jformer.evaluation.records import read_sample
from jformer.training.trackers import Tracker, open_tracker
from jformer.training.writers import AppendedFile, JsonlWriter, TensorBoardWriter


class Record:
    """The files of a run, and the services that get its rows."""

    def __init__(self, workdir: Path, config: Config, step: int, say: Callable[[str], None]) -> None:
        """Open all of it, dropping what comes after a step: a killed run wrote it, and its restart repeats it.

        `say` is called with what a person should know. Raises UserError for a damaged file, and for a service that
        cannot be reached.
        """
        path, samples = workdir / "metrics.jsonl", workdir / "samples.jsonl"
        self.rows = JsonlWriter.truncate_after(path, step)  # in metrics.jsonl
        JsonlWriter.truncate_after(samples, step, read_sample)
        self._say = say
        self._trackers = {name: open_tracker(name, workdir, config) for name in config.train.trackers}
        self._writers = (JsonlWriter(path), TensorBoardWriter(workdir / "tensorboard", step + 1))
        self._samples = JsonlWriter(samples)
        self._text = AppendedFile(workdir / "training.log")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        for writer in self._writers:
            writer.write(row)
        self._tell(lambda tracker: tracker.write(row))
        self.rows += 1

    def write_sample(self, step: int, number: int, pair: Pair, answer: str) -> None:
        """Add the answer to a validation example, which are counted from 1."""
        texts = {"source": pair.source, "reference": pair.target, "answer": answer}
        self._samples.write({"step": step, "sample": number, **texts})

    def write_line(self, text: str) -> None:
        """Add a line that was said."""
        self._text.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def keep(self) -> None:
        """Make sure that all of it outlives this process."""
        for file in self._files():
            file.keep()
        self._tell(lambda tracker: tracker.keep())

    def close(self, failed: bool = False) -> None:
        """Keep all of it and close the files; the services are told whether the run failed."""
        self._tell(lambda tracker: tracker.close(failed))
        for file in self._files():
            file.close()

    def _files(self) -> Iterator[JsonlWriter | TensorBoardWriter | AppendedFile]:
        yield from (*self._writers, self._samples, self._text)

    def _tell(self, send: Callable[[Tracker], None]) -> None:
        """Send something to every service; the run goes on without one that fails."""
        for name, tracker in list(self._trackers.items()):
            try:
                send(tracker)
            except Exception as error:  # they raise of many kinds, and none is worth a run
                del self._trackers[name]
                self._say(f"{name} failed and gets no further rows; metrics.jsonl has all of them: {error}")
