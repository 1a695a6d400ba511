"""Multi30k English to German from raw text, scored by sacreBLEU's own tokenization (13a), cased.

Data:     train, val and test_2016_flickr of github.com/multi30k/dataset (data/task1/raw).
Model:    that of configs/multi30k_tiny.py.
Command:  python -m jformer.main --config=configs/multi30k_raw.py --workdir=runs/multi30k_raw
          --config.data.dir=PATH/multi30k
Expected: BLEU 39.72, chrF 64.15, TER 46.00 after 5,733 updates, where patience ends it (--config.model.dtype=auto,
          bfloat16, seed 0); 73 minutes on one CPU core.
"""

from ml_collections import ConfigDict

from jformer.recipes import multi30k_tiny


def get_config() -> ConfigDict:
    """Return the run."""
    config = multi30k_tiny.get_config()
    config.data.update(train="train", valid="val", test=("test=test_2016_flickr",))
    config.evaluate.update(tokenize="13a", scores=("bleu", "chrf", "ter"))
    return config
