"""Dates, times, money, measures and numbers, English to German: a corpus made on the spot, learned in minutes.

Data:     generated in the package from CLDR (Babel), about 100,000 pairs; nothing is downloaded.
Model:    2 + 2 layers, d_model 128, Pre-LN.
Command:  python -m jformer.main --config=configs/quickstart.py --workdir=runs/quickstart
Expected: exact match on the test set at least 0.99, in 2 to 6 minutes on 2 CPU cores.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("transformer_tiny")
    config.model.update(num_layers=2, d_ff=512, norm="pre", dropout=0.0)
    config.data.update(source="generated", name="quickstart", train="train", valid="valid", test=("test",))
    config.data.update(tokenizer="bpe", vocab_size=500, split_digits=True, num_buckets=3, tokens_per_update=640)
    config.optim.update(schedule="cosine", learning_rate=2e-3, warmup=0.08)
    config.train.update(num_steps=4_500, log_every=100, eval_every=900, checkpoint_every=900, keep_last=1)
    config.decode.update(beam_size=1, batch_size=256)
    return config
