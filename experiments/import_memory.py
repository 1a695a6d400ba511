"""What does it take to import a published model's directory: how much memory beside its parameters, how many seconds?

A directory with the names and shapes of BART-large (406 million parameters, float32) and a vocabulary of words is
written here, its numbers all the same; `python -m jformer.hf import` reads it in a process of its own. Held: the
largest resident size of that process (ru_maxrss), JAX and our program in it: the first row, a small layer, is theirs.

Command:  python -m experiments.import_memory [--layers=12] [--width=1024] [--smoke]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from experiments.measure import ROOT, commit, processor_name, smoke_sizes

LAYERS = flags.DEFINE_integer("layers", 12, "Of the encoder, and as many of the decoder.")
WIDTH = flags.DEFINE_integer("width", 1_024, "Numbers of a token; feed-forward layers have four times as many.")
VOCABULARY = flags.DEFINE_integer("vocabulary", 50_265, "Words.")


def write_model(directory: Path, layers: int, width: int, vocabulary: int) -> int:
    """Write a directory as Transformers would, and return how many parameters it has."""
    import tokenizers

    from jformer.checkpoints.hf import tables, tensors
    from jformer.checkpoints.hf.bart import BART
    from jformer.checkpoints.hf.families import model_config, table_of
    from jformer.models import build_model, init_params

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


def imported(directory: Path, workdir: Path) -> tuple[float, float]:
    """Import a directory in a process of its own and return the seconds that took and the MiB that it held."""
    command = [sys.executable, "-m", "jformer.hf", "import", str(directory), f"--workdir={workdir}"]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with {status}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main(argv: Sequence[str]) -> None:
    """Print a row for a model of one small layer, and one for that of the flags."""
    del argv
    smoke_sizes(layers=1, width=64, vocabulary=100)
    print(f"{commit()}, {processor_name()}")
    print(f"{'parameters':>12}{'their size':>13}{'held':>12}{'held / size':>13}{'more / size':>13}{'seconds':>9}")
    least = 0.0
    for sizes in ((1, 64, 100), (LAYERS.value, WIDTH.value, VOCABULARY.value)):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model").mkdir()
            count = write_model(Path(folder, "model"), *sizes)
            seconds, held = imported(Path(folder, "model"), Path(folder, "run"))
        size, least = count * 4 / 2**20, least or held
        more = (held - least) / size
        print(
            f"{count:>12,}{size:>9,.0f} MiB{held:>8,.0f} MiB{held / size:>13.2f}{more:>13.2f}{seconds:>9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
