"""Sequences of numbers to reverse: the recurrent model of JoeyNMT's tutorial, with the attention of Luong et al. 2015.

Paper:    none; joeynmt.readthedocs.io, "Tutorial": best dev BLEU 95.42, greedy, at update 7,000 of 5 epochs.
Data:     generated as the tutorial says: 50,000 sequences of 1 to 25 numbers from 0 to 49 train, 1,000 of 1 to 30 valid
          and as many test; the draws are our own.
Model:    an LSTM of 64 features for each direction of the encoder and for the decoder, embeddings of 16, general
          attention with input feeding, dropout 0.1.
Command:  python -m jformer.main --config=configs/reverse_numbers_luong.py --workdir=runs/reverse_numbers_luong
Expected: dev BLEU 95.38 ± 3.46 (96.99, 94.61, 94.55 with seeds 0, 1, 2), in seven minutes on a CPU, and on another one
          95.45 ± 4.03 (97.30, 94.75, 94.30); nearly all errors are beyond 25 numbers.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("luong_tiny")
    config.model.update(num_layers=1, d_model=64, dropout=0.1, shared_embedding=False, tied_output=False)
    config.model.recurrent.update(bidirectional=True, embedding_size=16, reverse_source=False, bridge="zeros")
    config.data.update(source="experiments.sources.reverse_numbers:open_split", num_pairs=50_000, tokenizer="word")
    config.data.update(test=("valid", "test"), num_buckets=1, tokens_per_update=24 * 26)  # 24 of 25 numbers and an end
    # As there: AdamW without momentum, and clipping at 1 of a loss of whole sentences, which have 14 tokens on average.
    config.optim.update(optimizer="adamw", schedule="constant", learning_rate=1e-3, warmup=0, b1=0.0, b2=0.999)
    config.optim.update(epsilon=1e-8, clip_norm=1 / 14, label_smoothing=0.0)
    config.train.update(num_steps=10_000, log_every=500, eval_every=1_000, checkpoint_every=1_000, best_by="bleu")
    config.evaluate.update(weights="best", scores=("bleu",), during=("bleu",), during_examples=1_000)
    config.decode.update(beam_size=1, max_extra_length=5, batch_size=256)
    return config
