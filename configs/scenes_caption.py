"""Pictures of two or three shapes, described in a sentence: the encoder reads patches, the decoder writes words.

Data:     generated: 60,000 pictures of 32 x 32 pixels, 1,000 others for testing.
Model:    2 + 2 layers, d_model 128, 16 patches of 8 x 8 pixels, Pre-LN.
Command:  python -m jformer.main --config=configs/scenes_caption.py --workdir=runs/scenes_caption
Expected: exact match 0.996 ± 0.001 on the test set (three seeds), in 6 minutes on one CPU core with bfloat16
          (--config.model.dtype=auto takes it where it is quicker).
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("transformer_tiny")
    config.task = "caption"
    config.model.update(num_layers=2, d_ff=512, norm="pre", dropout=0.0)
    config.model.vision.update(image_size=32, patch_size=8, channels=3)
    config.data.update(
        source="experiments.sources.scenes:open_split", num_pairs=60_000, tokenizer="word", max_target_length=32
    )
    config.data.update(num_buckets=1, tokens_per_update=64 * 32 * 32)  # a pixel counts as a token
    config.optim.update(schedule="cosine", learning_rate=2e-3, warmup=0.08, label_smoothing=0.0)
    config.train.update(num_steps=5_000, log_every=100, eval_every=500, checkpoint_every=500, keep_last=1)
    config.evaluate.update(during=("exact_match",))
    config.decode.update(beam_size=1, batch_size=256)
    return config
