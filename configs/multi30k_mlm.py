"""Masked words of Multi30k's English captions: a BERT of four layers.

Paper:    BERT (Devlin et al. 2019), without the prediction of next sentences.
Data:     train, val and test_2016_flickr of github.com/multi30k/dataset (data/task1/tok, the lc.norm.tok.en files).
Model:    4 layers, d_model 128, 4 heads, Post-LN, learned positions; 15 % of the tokens chosen.
Command:  python -m jformer.main --config=configs/multi30k_mlm.py --workdir=runs/multi30k_mlm
          --config.data.dir=PATH/multi30k
Expected: 43 % of the masked pieces right on test_2016, perplexity 25, in 24 minutes on one busy CPU core.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("bert_base")
    config.model.update(num_layers=4, d_model=128, d_ff=512, num_heads=4, max_length=128, attention_dropout=0.0)
    config.data.update(source="text", train="train.lc.norm.tok.en", valid="val.lc.norm.tok.en")
    config.data.update(test=("test=test_2016_flickr.lc.norm.tok.en",), tokenizer="bpe", vocab_size=5_000)
    config.data.update(max_source_length=128, num_buckets=3, tokens_per_update=4_096)
    config.optim.update(schedule="linear", learning_rate=2e-3, warmup=0.2, weight_decay=0.01)
    config.train.update(num_steps=1_000, log_every=100, eval_every=250, checkpoint_every=250)
    return config
