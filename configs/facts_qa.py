"""Questions about invented people, answered by a span of two to six sentences or by none: a small encoder from scratch.

Data:     generated: 100,000 questions train, 500 valid, 1,000 test; 15 % have no answer; splits share no whole name.
Model:    3 layers, d_model 64, 4 heads, rotary positions; words as tokens.
Command:  python -m jformer.main --config=configs/facts_qa.py --workdir=runs/facts_qa
Expected: exact match 99.2 ± 1.8 % (three seeds), 10 minutes on a CPU core.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("bert_base")
    config.task = "qa"
    config.model.update(num_layers=3, d_model=64, d_ff=256, num_heads=4, max_length=96, dropout=0.0)
    config.model.update(attention_dropout=0.0, positions="rotary", norm="pre", init="glorot")
    config.data.update(
        source="experiments.sources.facts:open_split",
        num_pairs=100_000,
        tokenizer="word",
        vocab_size=2_000,
        max_source_length=96,
    )
    config.data.update(num_buckets=4, tokens_per_update=4_096)
    config.optim.update(schedule="linear", learning_rate=2e-3, warmup=0.05, label_smoothing=0.0, b2=0.98)
    config.train.update(num_steps=6_000, log_every=100, eval_every=500, checkpoint_every=500, best_by="exact_match")
    config.evaluate.update(weights="best", during=("exact_match", "f1"))
    return config
