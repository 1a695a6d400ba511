"""Tiny Shakespeare, character by character: a GPT-2 of four layers.

Paper:    Language Models are Unsupervised Multitask Learners (Radford et al. 2019) is the model, at toy size.
Data:     input.txt of Tiny Shakespeare (1.1 MB, public domain); lines 0-90 % train, 90-95 % valid, 95-100 % test.
Model:    4 layers, d_model 128, 4 heads, contexts of 128 characters.
Command:  python -m jformer.main --config=configs/shakespeare_gpt.py --workdir=runs/shakespeare_gpt
          --config.data.dir=PATH/tinyshakespeare
Expected: 2.51 bits per character on the test text (1.60 nats on the valid text).
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("gpt2")
    config.model.update(num_layers=4, d_model=128, d_ff=512, num_heads=4, max_length=256)
    config.model.update(dropout=0.1, attention_dropout=0.0)
    config.data.update(source="text", document="file", tokenizer="char", overlong="split")
    config.data.update(train="input[:90%]", valid="input[90%:95%]", test=("test=input[95%:]",))
    config.data.update(max_target_length=128, num_buckets=1, tokens_per_update=32 * 128)
    config.optim.update(optimizer="adamw", schedule="cosine", learning_rate=3e-3, warmup=0.05, weight_decay=0.1)
    config.train.update(num_steps=2_000, log_every=100, eval_every=500, checkpoint_every=500, samples=2)
    config.decode.update(beam_size=1, max_extra_length=120, batch_size=8)
    return config
