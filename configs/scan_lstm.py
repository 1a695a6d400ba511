"""SCAN, commands into actions: the overall-best recurrent model of Lake and Baroni, on their simple split.

Paper:    Generalization without Systematicity (Lake and Baroni 2018): 99.7 % of the test commands right (Experiment 1),
          without dropout 99.8 %; 13.8 % of the length split's (Experiment 2), where their best network has 20.8 %.
Data:     generated from the grammar; the simple split is a random fifth held out, drawn by us. Another split:
          --config.data.train=length_train "--config.data.test=('test=length_test',)", or jump_train and jump_test.
Model:    an LSTM encoder-decoder of 2 + 2 layers of 200, dropout 0.5, without attention.
Command:  python -m jformer.main --config=configs/scan_lstm.py --workdir=runs/scan_lstm
Expected: 99.79 ± 0.40 % of the simple split's test commands (three seeds, the average of the last five checkpoints),
          32 to 59 minutes of a CPU core; of the length split's 14.6 %, of the jump split's 0.23 % (one seed each).
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("seq2seq_sutskever")
    config.model.update(num_layers=2, d_model=200, dropout=0.5)
    config.model.recurrent.reverse_source = False
    config.data.update(source="experiments.sources.scan:open_split", tokenizer="word", vocab_shared=False)
    config.data.update(train="simple_train", test=("test=simple_test",), tokens_per_update=1_600)
    config.optim.update(schedule="constant", learning_rate=1e-3, warmup=0, b2=0.999, epsilon=1e-8, clip_norm=5.0)
    config.train.update(num_steps=8_000, log_every=250, eval_every=0, checkpoint_every=1_000, samples=0)
    config.evaluate.update(weights="average", scores=())
    config.decode.update(beam_size=1, max_extra_length=60, batch_size=256)
    return config
