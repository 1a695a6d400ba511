"""A corpus of web pages: one point of a scaling law, GPT-2 small; other sizes and lengths are overrides.

Paper:    Scaling Laws for Neural Language Models (Kaplan et al. 2020): models of 768 to 1.5 billion parameters without
          embeddings on WebText2, half a million tokens an update, contexts of 1,024.
Data:     your own copy of OpenWebText (github.com/jcpeterson/openwebtext): train.txt, valid.txt and test.txt, documents
          separated by empty lines; BPE of 50,000.
Model:    12 layers, d_model 768. Other points: model.num_layers, d_model, d_ff, num_heads and train.num_steps.
Command:  python -m jformer.main --config=configs/webtext_gpt.py --workdir=runs/webtext_gpt
          --config.data.dir=PATH/openwebtext
Expected: not trained here yet. At toy size: experiments/papers/scaling_law.py.
"""

from ml_collections import ConfigDict

from jformer.config import default_config


def get_config() -> ConfigDict:
    """Return the run."""
    config = default_config("gpt2")
    config.model.update(dtype="bfloat16")
    config.model.execution.update(remat="full")
    config.data.update(source="text", document="paragraph", tokenizer="bpe", vocab_size=50_000)
    config.data.update(train="train", valid="valid", test=("test",), max_target_length=1_024)
    config.data.update(batching="packed", packed_length=1_024, tokens_per_update=2**19, row_multiple=32)
    config.train.update(num_steps=250_000, eval_every=2_500, checkpoint_every=2_500)
    return config
