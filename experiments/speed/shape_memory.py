"""How does the memory of a process grow with the shapes of its updates, and what is it made of?

Trains by the real loop and asks the kernel what the process holds: when another shape of batch is to be compiled, what
it held at most while the one before was compiled, at most in the updates since, and then. Nothing compiled before is
used. What it is made of comes by differences: after imports, before the first update, at the end, and after each of
what was there is given back. On the CPU, Linux.

Command:  python -m experiments.speed.shape_memory --config=configs/multi30k_raw.py --config.data.dir=PATH/multi30k
          [--updates=40] [--config.data.batching=packed] [--config.model.dtype=bfloat16] [--smoke]
"""

import contextlib
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from absl import flags
from etils import epath

from experiments.measure import commit, processor_name, resident
from experiments.runs import flags_of, small_run
from jformer import main as front
from jformer.training import loop
from jformer.training.log import TrainingLog
from jformer.training.malloc import give_back_freed_memory, keep_freed_memory


def held(field: str = "VmRSS") -> int:
    """Return MiB that this process holds; of VmHWM, at most since `forget_peak`."""
    return int(resident(field=field))


def forget_peak() -> None:
    """Let the kernel count the peak from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def show(name: object, *cells: object) -> None:
    """Print a row."""
    print(f"{name!s:<44}" + "".join(f"{cell!s:>12}" for cell in cells), flush=True)


class Watched(TrainingLog):
    """The log of a run, which prints what the process holds when a new shape comes and at the end."""

    compiling = 0  # MiB at most while the newest shape was compiled
    newest = ""  # rows and lengths of its batches

    @contextlib.contextmanager
    def timing(self, step: int, shapes: Any) -> Iterator[bool]:
        """Note the peak of compiling, and before it what the updates of the earlier shapes took."""
        new = shapes not in self._compiled
        if new:
            self.tell(step - 1)
        with super().timing(step, shapes) as first:
            yield first
            if new:
                self.compiling = held("VmHWM")
                forget_peak()
        if new:
            self.newest = " x ".join(map(str, dict.fromkeys(size for shape in shapes for size in shape[1:])))

    def tell(self, step: int) -> None:
        """Print a row for the newest shape, or what was held before any."""
        jax.block_until_ready(self._pending)
        if self._compiled:
            name = f"{len(self._compiled)} shapes, the newest {self.newest}, {step} updates"
            show(name, self.compiling, held("VmHWM"), held())
        else:
            show("opened: before the first update", "", held("VmHWM"), held())
        forget_peak()

    def __exit__(self, *error: object) -> None:
        self.tell(self._config.train.num_steps)
        super().__exit__(*error)  # type: ignore[arg-type]


def main() -> None:
    """Train and print the table in MiB."""
    options = flags.FlagValues()
    flags.DEFINE_integer("updates", 40, "Updates; with buckets all shapes should come.", flag_values=options)
    flags.DEFINE_bool("smoke", False, "Only see that the command works, on few pairs.", flag_values=options)
    rest = options(sys.argv, known_only=True)
    ending: dict[str, object] = {"train.num_steps": options.updates, "train.checkpoint_every": options.updates}
    ending |= {
        "train.log_every": options.updates,
        "train.eval_every": 0,
        "train.patience": 0,
        "data.test": "()",
        "evaluate.scores": "()",
    }
    if options.smoke:
        rest += ["--config=configs/quickstart.py"]
        ending = {**small_run(3), "data.num_buckets": 2}
    keep_freed_memory()  # as the command does
    imported = held()
    with tempfile.TemporaryDirectory() as folder:
        given = [f"--workdir={folder}/run", f"--config.data.cache_dir={folder}/cache"]
        config = front.configure(*front.read_flags([*rest, *given, *flags_of(ending)]))
        jax.config.update("jax_enable_compilation_cache", False)
        print(f"{commit()}, {processor_name()}, jax {jax.__version__}, {config.model.dtype}, {config.data.batching}")
        show("MiB", "compiling", "updating", "then")
        show("imports", "", "", imported)
        with mock.patch.object(loop, "TrainingLog", Watched):
            loop.train(config, epath.Path(folder) / "run")
    show("the run has ended", "", "", held())
    give_back_freed_memory()
    show("freed memory given back", "", "", held())
    jax.clear_caches()
    gc.collect()
    give_back_freed_memory()
    show("programs forgotten", "", "", held())


if __name__ == "__main__":
    main()
