"""Names in tweets and comments (WNUT-17) with a bidirectional LSTM (Huang et al. 2015).

Data:     as for wnut17_tag.py.
Model:    1 bidirectional LSTM layer, 128 features each way; 4,000 subwords, no pretraining. Word vectors (Lample et
          al. 2016): --config.data.tokenizer=word --config.train.source_vectors=FILE (128 features); their CRF:
          --config.model.head.crf=True.
Command:  python -m jformer.main --config=configs/wnut17_lstm.py --workdir=runs/wnut17_lstm
          --config.data.dir=PATH/wnut17
Expected: F1 of test spans 0.087 ± 0.015 (three seeds; person 0.13, location 0.16), a minute of one CPU core; with the
          CRF 0.10 ± 0.03.
"""

from ml_collections import ConfigDict

from jformer.config import default_config
from jformer.recipes import wnut17_tag


def get_config() -> ConfigDict:
    """Return the run."""
    config = wnut17_tag.get_config()
    config.model = default_config("lstm_medium").model
    config.model.update(family="encoder", num_layers=1, d_model=128, dropout=0.4, dtype="float32")
    config.model.recurrent.update(cell="lstm", bidirectional=True, embedding_size=128)
    config.optim.update(learning_rate=5e-3)
    config.train.update(num_steps=400, eval_every=100, checkpoint_every=100)
    return config
