"""WMT14 English to German, the base row of Table 3, scored on newstest2013 as there; its other rows are overrides.

Paper:    Attention Is All You Need (2017), Table 3: perplexity 4.92 and BLEU 25.8; with one head 5.29 and 24.9.
Data:     that of configs/wmt14_en_de_base.py; its validation split is newstest2013.
Model:    that of configs/wmt14_en_de_base.py. A row: --config.model.num_heads=1, and so on by the fields of
          jformer.config.presets.PRESETS; row D's smoothing is --config.optim.label_smoothing.
Command:  python -m jformer.main --config=configs/wmt14_en_de_table3.py --workdir=runs/table3_a_h1
          --config.model.num_heads=1 --config.data.dir=PATH/tensorflow_datasets
Expected: the paper's; not trained here yet. At toy size: table3.py and depth_and_heads.py of experiments/papers.
"""

from ml_collections import ConfigDict

from jformer.recipes import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.data.update(test=("newstest2013=validation",))
    return config
