"""WMT14 English to German, the base model with rotary positions; other kinds are an override.

Paper:    RoFormer (Su et al. 2021), which compares it with the base model on this data; Table 3 E of the 2017 paper for
          learned positions, which it finds as good as sinusoidal ones.
Data:     that of configs/wmt14_en_de_base.py.
Model:    that of configs/wmt14_en_de_base.py with rotary positions, or
          --config.model.positions=learned, relative, alibi, transformer_xl.
Command:  python -m jformer.main --config=configs/wmt14_en_de_rotary.py --workdir=runs/wmt14_rotary
          --config.data.dir=PATH/tensorflow_datasets
Expected: BLEU no worse than the base model's; not trained here yet. At toy size: experiments/papers/positions.py.
"""

from ml_collections import ConfigDict

from configs import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.model.update(positions="rotary")
    return config
