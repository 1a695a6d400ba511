"""WMT14 English to German, the base model with Pre-LN and without warm-up.

Paper:    On Layer Normalization in the Transformer Architecture (Xiong et al. 2020): Pre-LN needs no warm-up.
Data:     that of configs/wmt14_en_de_base.py.
Model:    that of configs/wmt14_en_de_base.py but Pre-LN; the rate falls linearly from the base recipe's peak, ours.
Command:  python -m jformer.main --config=configs/wmt14_en_de_pre_ln.py --workdir=runs/wmt14_pre_ln
          --config.data.dir=PATH/tensorflow_datasets
Expected: BLEU like the base model's; not trained here yet. With --config.model.norm=post it should fail to learn.
          At toy size: experiments/papers/pre_vs_post_ln.py.
"""

from ml_collections import ConfigDict

from configs import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.model.update(norm="pre")
    config.optim.update(schedule="linear", learning_rate=7e-4, warmup=0)
    return config
