"""The directory of a run that was not trained: what searches, scorers and exports need."""

import dataclasses
import itertools

import jax

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import load_config, resolve, save_config
from jformer.data.tokenizers import learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.models import ModelConfig, build_model, init_params

TEXTS = ["the cat sat", "", "on the mat and the hat", "xyz?", "a", "that that that that"]


def draw(config, seed=0):
    """Return a model whose every parameter is drawn, so that each of them matters to the output."""
    model, numbers = build_model(config), itertools.count(seed)
    params = init_params(model, jax.random.key(seed))
    noise = lambda x: 0.3 * jax.random.normal(jax.random.key(next(numbers)), x.shape)  # noqa: E731
    return model, jax.tree.map(lambda x: x + noise(x), params)


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
