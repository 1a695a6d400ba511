"""A run of seconds: reverse short sequences, with dropout on. The config file of the tests that train."""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("transformer_tiny")
    config.model.update(num_layers=1, d_model=16, d_ff=32, num_heads=2, dropout=0.1)
    config.model.execution.unroll = 1
    config.data.update(source="generated", name="reverse", num_pairs=600, tokenizer="char", num_buckets=1)
    config.data.update(tokens_per_update=1_024)
    config.optim.update(schedule="constant", learning_rate=3e-3, warmup=5)
    config.train.update(num_steps=40, log_every=5, eval_every=20, checkpoint_every=10, keep_last=2, samples=0)
    config.decode.update(beam_size=2, batch_size=128, max_extra_length=5)
    config.evaluate.update(scores=("bleu",))
    config.mesh.update(data=1)
    return config
