"""What does it take to import a published model's directory: how much memory beside its parameters, how many seconds?

A directory with the names and shapes of BART-large (406 million parameters, float32) and a vocabulary of words is
written here, its numbers all the same; `python -m jformer.hf import` reads it in a process of its own, and in several,
which share it out. Held: the largest resident size of a process (ru_maxrss), JAX and our program in it, as the rows of
a small layer show; pages of the file that are mapped while a tensor is read count, too.

Command:  python -m experiments.speed.import_memory [--layers=12] [--width=1024] [--processes=8] [--smoke]
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from experiments.measure import ROOT, commit, processor_name, smoke_sizes

LAYERS = flags.DEFINE_integer("layers", 12, "Of the encoder, and as many of the decoder.")
WIDTH = flags.DEFINE_integer("width", 1_024, "Numbers of a token; feed-forward layers have four times as many.")
PROCESSES = flags.DEFINE_integer("processes", 8, "Of the last row, which share the model out.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 50_265, "Words.")


def write_model(directory: Path, layers: int, width: int, vocabulary: int) -> int:
    """Write a directory as Transformers would, and return how many parameters it has."""
    import tokenizers

    from jformer.models import build_model, init_params
    from jformer.tools.hf import name_tables as tables
    from jformer.tools.hf import tensors
    from jformer.tools.hf.bart import BART
    from jformer.tools.hf.families import model_config, table_of

    fields = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "vocab_size": vocabulary,
              "d_model": width, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
              "decoder_start_token_id": 2}  # fmt: skip
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": layers, f"{side}_ffn_dim": 4 * width, f"{side}_attention_heads": width // 64}
    model = model_config(BART, fields, "translate")
    shapes = jax.eval_shape(lambda: init_params(build_model(model), jax.random.key(0)))
    same = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0.01), leaf.shape), shapes)
    written = (
        (name, np.ascontiguousarray(array))
        for name, array in tables.to_tensors(table_of(BART, model, "translate"), same)
    )
    size = tensors.write(directory, written)
    (directory / "config.json").write_text(json.dumps(fields))
    words = {word: i for i, word in enumerate(("<s>", "<pad>", "</s>", "<unk>"))}
    words |= {f"word{i}": i for i in range(len(words), vocabulary)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    fast.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    fast.save(str(directory / "tokenizer.json"))
    return size // 4


def imported(directory: Path, workdir: Path, processes: int) -> tuple[float, float]:
    """Import a directory in so many processes; return the seconds that took and the MiB that one held at most."""
    command = [sys.executable, "-m", "jformer.hf", "import", str(directory), f"--workdir={workdir}"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = [f"--coordinator=127.0.0.1:{server.getsockname()[1]}", f"--processes={processes}"]
    start = time.perf_counter()
    started = [
        subprocess.Popen(
            [*command, *place, f"--process={i}"] if processes > 1 else command, cwd=ROOT, stdout=subprocess.DEVNULL
        )
        for i in range(processes)
    ]
    held = 0.0
    for process in started:
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"{' '.join(command)} ended with {status}")
        held = max(held, usage.ru_maxrss / 1024)
    return time.perf_counter() - start, held


def main(argv: Sequence[str]) -> None:
    """Print a row for a model of one small layer, and one for that of the flags."""
    del argv
    smoke_sizes(layers=1, width=64, vocabulary=100, processes=2)
    print(f"{commit()}, {processor_name()}")
    columns = ("processes", "parameters", "their size", "held by one", "held / size", "more / size", "seconds")
    print("".join(f"{name:>13}" for name in columns))
    least: dict[int, float] = {}
    for sizes in ((1, 64, 100), (LAYERS.value, WIDTH.value, VOCABULARY.value)):
        for processes in (1, PROCESSES.value):
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "model").mkdir()
                with ProcessPoolExecutor(
                    1, get_context("spawn")
                ) as other:  # what it holds counts for our children, too
                    count = other.submit(write_model, Path(folder, "model"), *sizes).result()
                seconds, held = imported(Path(folder, "model"), Path(folder, "run"), processes)
            size = count * 4 / 2**20
            more = (held - least.setdefault(processes, held)) / size
            row = (f"{size:,.0f} MiB", f"{held:,.0f} MiB", f"{held / size:.2f}", f"{more:.2f}", f"{seconds:.1f}")
            print(f"{processes:>13}{count:>13,}" + "".join(f"{cell:>13}" for cell in row), flush=True)


if __name__ == "__main__":
    app.run(main)
