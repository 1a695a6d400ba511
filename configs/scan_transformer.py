"""SCAN, commands into actions: the Transformer of Csordás et al., on the simple split of Lake and Baroni.

Paper:    The Devil is in the Detail (Csordás et al. 2021), whose length splits are others; on the simple split Lake and
          Baroni 2018 have 99.8 %, with an LSTM (Experiment 1).
Data:     generated from the grammar; a random fifth is held out, drawn by us. Other splits: see scan_lstm.py.
Model:    3 + 3 layers, d_model 128, 8 heads, d_ff 256, sinusoidal positions; their dropout of 0.5 is 0.1 here.
Command:  python -m jformer.main --config=configs/scan_transformer.py --workdir=runs/scan_transformer
Expected: not measured here yet.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("transformer_tiny")
    config.model.update(num_layers=3, d_ff=256, num_heads=8, dropout=0.1)
    config.model.update(shared_embedding=False, tied_output=False)
    config.data.update(source="generated", name="scan", tokenizer="word", vocab_shared=False)
    config.data.update(train="simple_train", test=("test=simple_test",), tokens_per_update=1_600)
    config.optim.update(schedule="constant", learning_rate=1e-3, warmup=100, b2=0.999, epsilon=1e-8)
    config.optim.update(clip_norm=5.0, label_smoothing=0.0)
    config.train.update(num_steps=2_000, log_every=250, eval_every=0, checkpoint_every=500, samples=0)
    config.evaluate.update(scores=())
    config.decode.update(beam_size=1, max_extra_length=60, batch_size=256)
    return config
