"""Runs that were not trained, in memory and in a directory: what searches, scorers and exports need."""

import dataclasses

import jax
import numpy as np

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import load_config, resolve, save_config
from jformer.data.tokenizers import learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained
from jformer.models import ModelConfig, build_model
from jformer.tasks.build import build_task
from tests.conftest import draw_params

CHARS = learn("char", ["abcdefgh "], 99, "identity", False)
# Of a model that writes something: tied logits of an untrained one would repeat its input.
MODEL = {"num_layers": 1, "d_model": 32, "d_ff": 48, "num_heads": 4, "tied_output": False}
ROWS = CHARS.vocab_size + 6  # those past the vocabulary must never be written
TEXTS = ["the cat sat", "", "on the mat and the hat", "xyz?", "a", "that that that that"]


def draw(config, seed=0):
    """Return a model whose every parameter is drawn, so that each of them matters to the output."""
    model, rng = build_model(config), np.random.default_rng(seed)
    drawn = lambda x: np.float32(x + 0.3 * rng.standard_normal(x.shape))  # noqa: E731
    return model, jax.tree.map(drawn, draw_params(model, seed))


def write_run(directory, fields, seed=0):
    """Write the run of a translator with these fields of its model, and return its directory."""
    tokenizer = learn("bpe", TEXTS * 4, 60, "identity", False)
    fields = {**fields, "vocab_size": tokenizer.vocab_size + 6, "tied_output": False}  # rows that are never written
    decoding = DecodeConfig(beam_size=3, batch_size=4, max_extra_length=6)
    settings = resolve({"data": {"max_source_length": 32}})
    settings = dataclasses.replace(settings, model=ModelConfig(**fields), decode=decoding)
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(directory / "tokenizer", "shared")
    save_config(settings, directory / "config.json")
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(1, {"params": draw(settings.model, seed)[1]}, {"step": 1}, None)
    checkpoints.close()
    return directory


def settings_of(workdir, **decode):
    """Return the settings of a run with some options of decoding."""
    saved = load_config(workdir / "config.json")
    return dataclasses.replace(saved, decode=dataclasses.replace(saved.decode, **decode))


def predictor(
    model,
    params,
    task="translate",
    tokenizers=(CHARS, CHARS),
    data=None,
    copies=0,
    mesh=None,
    prepare=True,
    evaluate=None,
    **decode,
):
    """Return the Predictor of a model: an ensemble with so many copies of itself, with these options of decoding."""
    options = {"data": {"dir": "nowhere", **(data or {})}, "evaluate": evaluate or {}}
    config = resolve({"task": task, "model": {"family": model.config.family}, **options})
    config = dataclasses.replace(config, decode=DecodeConfig(**decode))
    run = Trained(config=config, task=build_task(config), tokenizers=tokenizers, model=model, params=params)
    return Predictor(run, [run] * copies, mesh, prepare)
