"""A run of random weights, for measurements that depend only on the sizes of a model."""

from pathlib import Path

import jax

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import default_config, resolve, save_config
from jformer.config.options import Config
from jformer.data.tokenizers.lists import ListTokenizer
from jformer.data.tokenizers.symbols import NUM_SYMBOLS
from jformer.models import init_params
from jformer.tasks.build import build_sized, build_task


def write_untrained(workdir: Path, size: str, vocabulary: int) -> Path:
    """Write a run of `transformer_SIZE` whose vocabulary is `vocabulary` characters; return its directory."""
    settings: Config = resolve(default_config(f"transformer_{size}"))
    tokenizer = ListTokenizer("char", "identity", [chr(0x4E00 + i) for i in range(vocabulary - NUM_SYMBOLS)])
    (workdir / "tokenizer").mkdir(parents=True)
    tokenizer.save(workdir / "tokenizer", "shared")
    save_config(settings, workdir / "config.json")
    model = build_sized(settings, build_task(settings), (tokenizer, tokenizer))
    checkpoints = Checkpoints(workdir / "checkpoints")
    checkpoints.save(1, {"params": init_params(model, jax.random.key(0))}, {"step": 1}, None)
    checkpoints.close()
    return workdir
