"""Do word vectors of jformer.skipgram know which words are alike, and do analogies hold, as well as gensim's?

A generated text has things of several kinds in two forms (a pear is, many pears are), each with colours and verbs of
its own kind, so that who is alike and which analogies hold is known. Measured: how often the nearest word is of the
same kind and form, and how often the word nearest to b - a + c is the right one (3CosAdd, Mikolov et al. 2013).
gensim learns from the same lines, with the same sizes, in an environment of its own.

Command:  python -m experiments.papers.word_vectors [--seeds=3] [--gensim=PYTHON] [--smoke]
          (gensim: python3.11 -m venv G && G/bin/pip install gensim, then --gensim=G/bin/python)
"""

import dataclasses
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from experiments.measure import smoke_sizes
from experiments.papers.things import SIZES, analogies, generated, neighbours, read
from jformer.tools.skipgram import learn, write

SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds of the vectors.", lower_bound=1)
GENSIM = flags.DEFINE_string("gensim", "", "A Python that has gensim; empty = without it.")
LINES = flags.DEFINE_integer("lines", 3_000, "Of the generated text.")

THEIRS = """
import sys
from gensim.models import Word2Vec
source, target, seed = sys.argv[1:]
lines = [line.split() for line in open(source)]
model = Word2Vec(lines, vector_size=64, window=4, negative=5, min_count=5, epochs=10, sample=1e-3, sg=1, hs=0,
                 seed=int(seed), workers=2)
model.wv.save_word2vec_format(target)
"""


def main(_: Sequence[str]) -> None:
    """Print a row for each library and seed."""
    smoke_sizes(seeds=1)
    print(f"{'':10}{'seed':>6}{'neighbours':>12}{'analogies':>11}{'seconds':>9}")
    with tempfile.TemporaryDirectory() as folder:
        text, vectors = Path(folder) / "text", Path(folder) / "vectors"
        text.write_text("\n".join(generated(LINES.value, np.random.default_rng(0))) + "\n")
        for seed in range(SEEDS.value):
            for library in ("jformer", *["gensim"] * bool(GENSIM.value)):
                began = time.monotonic()
                if library == "jformer":
                    write(vectors, *learn([text], dataclasses.replace(SIZES, seed=seed), say=lambda line: None))
                else:
                    subprocess.run([GENSIM.value, "-c", THEIRS, text, vectors, str(seed)], check=True)
                seconds, found = time.monotonic() - began, read(vectors)
                alike, held = neighbours(found), analogies(found, 500, np.random.default_rng(1))
                print(f"{library:10}{seed:6}{alike:12.1%}{held:11.1%}{seconds:9.1f}", flush=True)


if __name__ == "__main__":
    app.run(main)
