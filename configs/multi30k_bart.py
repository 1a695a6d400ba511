"""Multi30k's English captions, restored from masked spans: a BART of three and three layers.

Paper:    BART (Lewis et al. 2020), section 2.2: text infilling, 30 % in spans of Poisson length 3.
Data:     train, val and test_2016_flickr of github.com/multi30k/dataset (data/task1/tok, the lc.norm.tok.en files).
Model:    3 + 3 layers, d_model 128, 4 heads, Post-LN, learned positions.
Command:  python -m jformer.main --config=configs/multi30k_bart.py --workdir=runs/multi30k_bart
          --config.data.dir=PATH/multi30k
Expected: not measured yet.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("bart_base")
    config.model.update(num_layers=3, d_model=128, d_ff=512, num_heads=4, max_length=128)
    config.data.update(source="text", train="train.lc.norm.tok.en", valid="val.lc.norm.tok.en")
    config.data.update(test=("test=test_2016_flickr.lc.norm.tok.en",), tokenizer="bpe", vocab_size=5_000)
    config.data.update(max_target_length=128, num_buckets=3, tokens_per_update=4_096)
    config.optim.update(optimizer="adam", schedule="linear", learning_rate=2e-3, warmup=1 / 3)
    config.train.update(num_steps=600, log_every=100, eval_every=200, checkpoint_every=200)
    return config
