"""WMT14 English to German, byte by byte: the base model without subwords; other tokenizers are an override.

Paper:    Neural Machine Translation of Rare Words with Subword Units (Sennrich et al. 2016) for words and subwords;
          ByT5 (Xue et al. 2022) for bytes.
Data:     that of configs/wmt14_en_de_base.py, as bytes; sequences are some five times as long, and so is an update.
Model:    that of configs/wmt14_en_de_base.py. --config.data.tokenizer=char or word, or bpe with data.vocab_size.
Command:  python -m jformer.main --config=configs/wmt14_en_de_bytes.py --workdir=runs/wmt14_bytes
          --config.data.dir=PATH/tensorflow_datasets
Expected: not trained here yet. At toy size, as a language model: experiments/papers/tokenizer_choice.py.
"""

from ml_collections import ConfigDict

from jformer.recipes import wmt14_en_de_base


def get_config() -> ConfigDict:
    """Return the run."""
    config = wmt14_en_de_base.get_config()
    config.data.update(tokenizer="byte", vocab_size=260, tokens_per_update=125_000)
    config.data.update(max_source_length=1_024, max_target_length=1_024)
    config.decode.update(max_extra_length=250)
    return config
