"""Names in tweets and comments (WNUT-17), from scratch: a small BERT that tags the first piece of each word.

Data:     train.conll, dev.conll and test.conll of WNUT-17 (Derczynski et al. 2017): 3,394 + 1,009 + 1,287 sentences,
          a word, a TAB and its tag a line; no name of the test set occurs in a training sentence.
Model:    2 layers, d_model 96, 4 heads, relative positions; 4,000 subwords, no pretraining.
Command:  python -m jformer.main --config=configs/wnut17_tag.py --workdir=runs/wnut17_tag --config.data.dir=PATH/wnut17
Expected: F1 of test spans 0.064 ± 0.043 (three seeds; person 0.12, others near 0), a minute of one CPU core.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("bert_base")
    config.task = "tag"
    config.model.update(num_layers=2, d_model=96, d_ff=192, num_heads=4, positions="relative")
    config.model.update(dropout=0.3, attention_dropout=0.0)
    config.model.head.update(pooler=False, transform=False, num_segments=0)
    config.data.update(source="conll", train="train", valid="dev", test=("test=test",), overlong="split")
    config.data.update(tokenizer="bpe", vocab_size=4_000, max_source_length=128, num_buckets=3, tokens_per_update=2_048)
    config.optim.update(schedule="linear", learning_rate=1e-3, warmup=0.05, b2=0.98, label_smoothing=0.0)
    config.train.update(num_steps=1_000, log_every=50, eval_every=100, checkpoint_every=100, keep_last=1, samples=3)
    config.train.update(best_by="span_f1")
    config.evaluate.update(weights="best", during=("span_f1",), during_examples=1_009)
    return config
