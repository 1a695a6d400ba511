"""Division modulo 97 from half of its table: grokking, the other half answered long after the first is known.

Paper:    Grokking: Generalization Beyond Overfitting on Small Algorithmic Datasets (Power et al. 2022), Figures 1, 2:
          the validation accuracy rises to 100 %, well after that of training.
Data:     generated: 9,312 equations `a / b =`, one half to train with, the other half to validate.
Model:    2 layers, d_model 128, 4 heads, Post-LN, sinusoids, no dropout, no biases. The answer is read after the last
          position of an encoder; the paper's model reads leftwards only.
Command:  python -m jformer.main --config=configs/modular_division.py --workdir=runs/modular_division
Expected: accuracy 99.97 % on the other half, mean of three seeds, 99 % from about update 3,500 on (of its own half:
          1,000), in 19 to 24 minutes on two CPU cores.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("bert_base")
    config.task = "classify"
    config.model.update(num_layers=2, d_model=128, d_ff=512, num_heads=4, max_length=8, activation="relu", bias=False)
    config.model.update(positions="sinusoidal", embedding_scale="input", init="glorot", embedding_norm=False)
    config.model.update(dropout=0.0, attention_dropout=0.0)
    config.model.head.update(pooling="last", pooler=False, transform=False, num_segments=0)
    config.data.update(source="experiments.sources.modular_division:open_split", tokenizer="word", vocab_size=103)
    config.data.update(max_source_length=8, num_buckets=1, tokens_per_update=512 * 6, test=("valid=valid",))
    config.optim.update(optimizer="adamw", schedule="constant", learning_rate=1e-3, warmup=10, weight_decay=1.0)
    config.optim.update(b1=0.9, b2=0.98, epsilon=1e-8, clip_norm=0.0, label_smoothing=0.0)
    config.train.update(num_steps=6_000, log_every=100, eval_every=100, checkpoint_every=100, keep_last=1, samples=0)
    return config
