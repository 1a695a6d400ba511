"""WMT14 English to German, the big model of the paper.

Paper:    Attention Is All You Need (2017), Table 2: newstest2014 BLEU 28.4 after 300,000 updates.
Data:     that of configs/wmt14_en_de_base.py.
Model:    6 + 6 layers, d_model 1024, d_ff 4096, 16 heads, dropout 0.3; last 20 checkpoints averaged.
Command:  python -m jformer.main --config=configs/wmt14_en_de_big.py --workdir=runs/wmt14_big
          --config.data.dir=PATH/tensorflow_datasets
Expected: the paper's; not trained here yet.
"""

from ml_collections import ConfigDict

from jformer.config.presets import PRESETS
from jformer.recipes import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.model.update(PRESETS["transformer_big"])
    config.train.update(num_steps=300_000)
    config.evaluate.update(average_last=20)
    return config
