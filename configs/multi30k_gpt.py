"""Multi30k's English captions, one after the other: a GPT-2 of two layers.

Paper:    Language Models are Unsupervised Multitask Learners (Radford et al. 2019) is the model, at toy size.
Data:     train, val and test_2016_flickr of github.com/multi30k/dataset (data/task1/tok, the lc.norm.tok.en files).
Model:    2 layers, d_model 128, 4 heads; BPE of 2,000.
Command:  python -m jformer.main --config=configs/multi30k_gpt.py --workdir=runs/multi30k_gpt
          --config.data.dir=PATH/multi30k
Expected: 1.37 bits per character of test_2016, mean of 2 seeds.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("gpt2")
    config.model.update(num_layers=2, d_model=128, d_ff=512, num_heads=4, max_length=256)
    config.model.update(dropout=0.0, attention_dropout=0.0)
    config.data.update(source="text", train="train.lc.norm.tok.en", valid="val.lc.norm.tok.en")
    config.data.update(test=("test=test_2016_flickr.lc.norm.tok.en",), tokenizer="bpe", vocab_size=2_000)
    config.data.update(
        max_target_length=256, batching="packed", packed_length=256, tokens_per_update=1_024, row_multiple=4
    )
    config.optim.update(optimizer="adamw", schedule="cosine", learning_rate=3e-3, warmup=0.1, weight_decay=0.1)
    config.train.update(num_steps=500, log_every=100, eval_every=125, checkpoint_every=125, samples=0)
    config.decode.update(beam_size=1)
    return config
