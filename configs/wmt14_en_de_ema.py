"""WMT14 English to German, the base model with a moving average of its parameters beside them.

Paper:    Attention Is All You Need (2017), section 6.1, averages the last 5 checkpoints; Training Tips for the
          Transformer Model (Popel and Bojar 2018), section 4.10, measures what that is worth.
Data:     that of configs/wmt14_en_de_base.py.
Model:    that of configs/wmt14_en_de_base.py. Score the same run with --mode=evaluate
          --config.evaluate.weights=last, best, average or ema.
Command:  python -m jformer.main --config=configs/wmt14_en_de_ema.py --workdir=runs/wmt14_ema
          --config.data.dir=PATH/tensorflow_datasets
Expected: not trained here yet. At toy size: experiments/papers/averaging.py.
"""

from ml_collections import ConfigDict

from configs import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.train.update(ema_decay=0.9999)
    config.evaluate.update(weights="ema")
    return config
