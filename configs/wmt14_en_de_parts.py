"""WMT14 English to German, the base model without residuals; other parts are removed by overrides.

Paper:    Attention Is All You Need (2017), section 3; Attention is not all you need (Dong et al. 2021).
Data:     that of configs/wmt14_en_de_base.py.
Model:    that of configs/wmt14_en_de_base.py without residuals; put them back for the others, such as
          --config.model.residual=True with model.attention_scale=off, model.positions=none or model.d_ff=1.
Command:  python -m jformer.main --config=configs/wmt14_en_de_parts.py --workdir=runs/wmt14_parts
          --config.data.dir=PATH/tensorflow_datasets
Expected: it does not learn; not trained here yet. At toy size: experiments/papers/residual_and_scaling.py.
"""

from ml_collections import ConfigDict

from configs import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.model.update(residual=False)
    return config
