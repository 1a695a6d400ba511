"""WMT14 English to German, the base model of the paper.

Paper:    Attention Is All You Need (2017), Table 2: newstest2014 BLEU 27.3 after 100,000 updates.
Data:     wmt14_translate/de-en of TFDS, joint BPE of 37,000.
Model:    6 + 6 layers, d_model 512, Post-LN, dropout 0.1; last 5 checkpoints averaged, beam 4, alpha 0.6.
Variants: --config.model.positions=rotary (Su et al. 2021) or another; --config.train.ema_decay=0.9999 with
          --config.evaluate.weights=ema (Popel and Bojar 2018); --config.model.residual=False (Dong et al. 2021); Pre-LN
          without warm-up (Xiong et al. 2020): --config.model.norm=pre --config.optim.schedule=linear
          --config.optim.learning_rate=7e-4 --config.optim.warmup=0
Command:  python -m jformer.main --config=configs/wmt14_en_de_base.py --workdir=runs/wmt14_base
          --config.data.dir=PATH/tensorflow_datasets
Expected: the paper's; not trained here yet.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("transformer_base")
    config.model.update(dtype="bfloat16")  # of activations; parameters and the optimizer stay float32
    config.data.update(source="tfds", name="wmt14_translate/de-en", source_language="en", target_language="de")
    config.data.update(train="train", valid="validation", test=("test",))
    config.data.update(tokenizer="bpe", vocab_size=37_000, tokens_per_update=25_000)
    config.data.update(row_multiple=32)  # the same updates on 1, 2, 4, 8, 16 or 32 devices
    config.optim.update(schedule="noam", learning_rate=1.0, warmup=4_000, clip_norm=0.0)
    config.train.update(num_steps=100_000, eval_every=1_500, checkpoint_every=1_500)
    config.evaluate.update(weights="average", average_last=5)
    config.decode.update(beam_size=4, length_penalty=0.6)
    return config
