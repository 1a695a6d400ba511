"""Multi30k English to German, text only, as Wu et al. 2021 trained their Transformer-Tiny.

Paper:    Good for Misconceived Reasons (ACL 2021): test_2016 BLEU 41.02, tokenised and lower-cased.
Data:     train, val and test_2016_flickr of github.com/multi30k/dataset (data/task1/tok, the lc.norm.tok files).
Model:    4 + 4 layers, d_model 128, d_ff 256, 4 heads, dropout 0.3, Post-LN, one shared embedding.
Command:  python -m jformer.main --config=configs/multi30k_tiny.py --workdir=runs/multi30k_tiny
          --config.data.dir=PATH/multi30k
Expected: BLEU 40.8, mean of three seeds: 41.13, 40.50 and 40.79 after 5,607, 6,741 and 7,308 updates, where patience
          ends them (--config.model.dtype=bfloat16); an update takes 0.84 s on 2 CPU cores, in float32 1.13 s.
          Pre-LN in updates of half the size: 41.11, mean of two seeds; with R-Drop 41.62, mean of three
          (experiments/papers/README.md).
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("transformer_tiny")
    config.data.update(source="files", source_language="en", target_language="de")
    config.data.update(train="train.lc.norm.tok", valid="val.lc.norm.tok", test=("test=test_2016_flickr.lc.norm.tok",))
    config.data.update(tokenizer="bpe", vocab_size=10_000, tokens_per_update=2 * 4_096)
    config.optim.update(schedule="inverse_square_root", learning_rate=5e-3, warmup=2_000)
    # An epoch is 63 updates: validated and saved once an epoch, stopped after 10 without a better loss.
    config.train.update(num_steps=8_000, log_every=63, eval_every=63, checkpoint_every=63, patience=10)
    config.evaluate.update(weights="average", average_last=10, tokenize="none")
    config.decode.update(beam_size=5, length_penalty=1.0, length_offset=0.0)  # fairseq divides by the length itself
    return config
