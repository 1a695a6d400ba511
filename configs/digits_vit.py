"""Handwritten digits of 8 x 8 pixels, classified by a Vision Transformer of four layers.

Paper:    An Image is Worth 16x16 Words (Dosovitskiy et al. 2021) is the model; its sizes are for far larger images.
Data:     scikit-learn's digits, 1,257 + 180 + 360 images (pip install -e ".[experiments]"), written as arrays by
          python -m experiments.papers.export_digits --output=PATH/digits
Model:    4 layers, d_model 64, 4 patches of 4 x 4 pixels, class token, Pre-LN.
Command:  python -m jformer.main --config=configs/digits_vit.py --workdir=runs/digits_vit --config.data.dir=PATH/digits
Expected: test accuracy 0.982, mean of three seeds, in half a minute each on one CPU core.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("vit_s16")
    config.model.update(num_layers=4, d_model=64, d_ff=256, num_heads=4, dropout=0.2, activation_dropout=0.0)
    config.model.vision.update(image_size=8, patch_size=4, channels=1)
    config.data.update(tokens_per_update=64 * 64)
    config.optim.update(learning_rate=2e-3, warmup=0.1, weight_decay=0.05, label_smoothing=0.1)
    config.train.update(num_steps=1_000, log_every=100, eval_every=200, checkpoint_every=200)
    config.evaluate.update(weights="best")
    return config
