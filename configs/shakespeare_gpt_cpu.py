"""Tiny Shakespeare, character by character, in two minutes on a CPU: the small row of nanoGPT's README.

Paper:    none; github.com/karpathy/nanoGPT, README, "I only have a macbook": validation loss 1.88 after 2,000 updates.
Data:     input.txt of Tiny Shakespeare (1.1 MB, public domain); the first 90 % of its characters train, the last valid.
Model:    4 layers, d_model 128, 4 heads, contexts of 64 characters, no dropout, no biases.
Command:  python -m jformer.main --config=configs/shakespeare_gpt_cpu.py --workdir=runs/shakespeare_gpt_cpu
          --config.data.dir=PATH/tinyshakespeare
Expected: loss 1.907 ± 0.032 over all of the last 10 % (seeds 0, 1, 2), the logarithm of the perplexity. nanoGPT's own
          code gives 1.911 ± 0.014 there: its 1.88 is an estimate from 20 batches. 1.790 ± 0.027 is reached with
          --config.optim.learning_rate=3e-3.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("gpt2")
    config.model.update(num_layers=4, d_model=128, d_ff=512, num_heads=4, max_length=64, bias=False)
    config.model.update(activation="gelu", dropout=0.0, attention_dropout=0.0)
    config.data.update(source="text", document="file", share_of="characters", tokenizer="char")
    config.data.update(train="input[:90%]", valid="input[90%:]", test=("valid=input[90%:]",))
    config.data.update(overlong="split", piece_start="previous", max_target_length=64)
    config.data.update(num_buckets=1, tokens_per_update=12 * 64, row_multiple=1)
    config.optim.update(optimizer="adamw", schedule="cosine", learning_rate=1e-3, warmup=0.05, final_rate=0.1)
    config.optim.update(weight_decay=0.1, b1=0.9, b2=0.99, epsilon=1e-8, clip_norm=1.0, label_smoothing=0.0)
    config.train.update(num_steps=2_000, log_every=250, eval_every=250, checkpoint_every=250, samples=2)
    config.decode.update(beam_size=1, max_extra_length=120, batch_size=8)
    return config
