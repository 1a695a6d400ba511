"""Parts of speech of generated English sentences, whose words have up to three of them, with a bidirectional LSTM.

Data:     generated: 5,000 sentences train, 500 valid, 1,000 test; splits share no sentence.
Model:    1 bidirectional LSTM layer, 64 features each way; words as tokens.
Command:  python -m jformer.main --config=configs/parts_of_speech_lstm.py --workdir=runs/parts_of_speech
Expected: 99.85 % of tags, mean of three seeds, in two minutes; the most frequent tag of each word is right for 86.24 %.
"""

from ml_collections import ConfigDict

from jformer.recipes import wnut17_lstm


def get_config() -> ConfigDict:
    """Return the run."""
    config = wnut17_lstm.get_config()
    config.model.update(d_model=64, dropout=0.1)
    config.model.recurrent.update(embedding_size=64)
    config.data.update(source="experiments.sources.parts_of_speech:open_split", num_pairs=5_000, test=("test",))
    config.data.update(train="train", valid="valid", tokenizer="word", vocab_size=500, num_buckets=2)
    config.data.update(tokens_per_update=1_024, max_source_length=48)
    config.optim.update(learning_rate=1e-2)
    config.train.update(num_steps=200, log_every=50, eval_every=100, checkpoint_every=100, best_by="macro_f1")
    config.evaluate.update(during=("macro_f1",))
    return config
