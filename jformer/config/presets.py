"""Named models as rows: what a preset sets over the defaults of ModelConfig, and its paper's training options.

Literal dicts and nothing else; a row lists only what differs. `jformer.config.default_config` applies both.
"""

from typing import Any

# Sizes that many papers share: heads of size 64 and a feed-forward four times as wide as the model.
_WIDTH_384 = {"d_model": 384, "d_ff": 1536, "num_heads": 6}
_WIDTH_768 = {"d_model": 768, "d_ff": 3072, "num_heads": 12}
_WIDTH_1024 = {"d_model": 1024, "d_ff": 4096, "num_heads": 16}
_BIG = {**_WIDTH_1024, "dropout": 0.3}

_BERT = {
    "family": "encoder",
    "positions": "learned",
    "activation": "gelu",
    "attention_dropout": 0.1,
    "norm_epsilon": 1e-12,
    "embedding_scale": "none",
    "embedding_norm": True,
    "init": "bert",
    "head": {"pooler": True, "transform": True, "num_segments": 2},
}
_GPT2 = {
    "family": "decoder",
    "norm": "pre",
    "norm_epsilon": 1e-5,
    "positions": "learned",
    "max_length": 1024,
    "activation": "gelu_tanh",
    "attention_dropout": 0.1,
    "embedding_scale": "none",
    "init": "gpt2",
}
_GPT3 = {**_GPT2, "max_length": 2048}
_LLAMA = {
    "family": "decoder",
    "norm": "pre",
    "norm_type": "rmsnorm",
    "positions": "rotary",
    "activation": "swiglu",
    "bias": False,
    "dropout": 0.0,
    "embedding_scale": "none",
    "tied_output": False,
    "init": "gpt2",
}
_TINYLLAMA = {**_LLAMA, "num_kv_heads": 4, "norm_epsilon": 1e-5}
_T5_BLOCK = {
    "norm": "pre",
    "norm_type": "rmsnorm",
    "attention_scale": "one",
    "positions": "relative",
    "bias": False,
    "output_dropout": True,
    "init": "t5",
}
_T5 = {**_T5_BLOCK, "attention_dropout": 0.1, "activation_dropout": 0.1, "embedding_scale": "output"}
_T5_1_1 = {**_T5_BLOCK, "activation": "geglu_tanh", "dropout": 0.0, "embedding_scale": "none", "tied_output": False}
_BART = {
    "norm_epsilon": 1e-5,
    "positions": "learned",
    "max_length": 1024,
    "activation": "gelu",
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "embedding_scale": "none",
    "embedding_norm": True,
    "init": "bert",
}
_RNNSEARCH = {"cell": "gru", "bidirectional": True, "attention": "additive", "bridge": "dense"}
_LUONG = {"cell": "lstm", "attention": "general", "input_feeding": True, "reverse_source": True, "bridge": "copy"}
_LSTM = {"family": "decoder", "num_layers": 2, "tied_output": False, "recurrent": {"cell": "lstm"}}
_APART = {"shared_embedding": False, "tied_output": False}
_VIT = {
    "family": "vit",
    "norm": "pre",
    "positions": "learned",
    "activation": "gelu",
    "activation_dropout": 0.1,
    "embedding_scale": "none",
    "init": "vit",
}

PRESETS: dict[str, dict[str, Any]] = {
    # Wu et al. 2021, for corpora of some ten thousand pairs.
    "transformer_tiny": {"num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4, "dropout": 0.3},
    "transformer_small": {"d_ff": 1024, "num_heads": 4, "dropout": 0.3},
    # Vaswani et al. 2017, Table 3: the defaults are its base row.
    "transformer_base": {},
    "transformer_big": _BIG,
    "table3_a_h1": {"num_heads": 1},
    "table3_a_h4": {"num_heads": 4},
    "table3_a_h16": {"num_heads": 16},
    "table3_a_h32": {"num_heads": 32},
    "table3_b_dk16": {"d_k": 16},
    "table3_b_dk32": {"d_k": 32},
    "table3_c_n2": {"num_layers": 2},
    "table3_c_n4": {"num_layers": 4},
    "table3_c_n8": {"num_layers": 8},
    "table3_c_d256": {"d_model": 256},
    "table3_c_d1024": {"d_model": 1024},
    "table3_c_ff1024": {"d_ff": 1024},
    "table3_c_ff4096": {"d_ff": 4096},
    "table3_d_dropout0": {"dropout": 0.0},
    "table3_d_dropout2": {"dropout": 0.2},
    "table3_d_smoothing0": {},
    "table3_d_smoothing2": {},
    "table3_e": {"positions": "learned"},
    "table3_big": _BIG,
    # Sutskever et al. 2014, section 3.4: no attention, the source reversed.
    "seq2seq_sutskever": {
        "num_layers": 4,
        "d_model": 1000,
        "dropout": 0.0,
        **_APART,
        "recurrent": {"cell": "lstm", "reverse_source": True, "bridge": "copy"},
    },
    # Bahdanau et al. 2015, appendix A.2.3; their GRU's reset acts before the product with the state, ours after it.
    "rnnsearch_50": {
        "num_layers": 1,
        "d_model": 1000,
        "dropout": 0.0,
        **_APART,
        "recurrent": {**_RNNSEARCH, "embedding_size": 620, "readout_size": 500},
    },
    # Luong et al. 2015, section 4.1, with global attention.
    "luong_global": {"num_layers": 4, "d_model": 1000, "dropout": 0.2, **_APART, "recurrent": _LUONG},
    # For corpora of some ten thousand pairs, beside transformer_tiny.
    "rnnsearch_tiny": {
        "num_layers": 1,
        "d_model": 160,
        "dropout": 0.3,
        "recurrent": _RNNSEARCH,
    },
    "luong_tiny": {"num_layers": 2, "d_model": 160, "dropout": 0.3, "recurrent": _LUONG},
    # Zaremba et al. 2014, section 4.1: language models of Penn Treebank's 10,000 words.
    "lstm_medium": {**_LSTM, "d_model": 650, "dropout": 0.5},
    "lstm_large": {**_LSTM, "d_model": 1500, "dropout": 0.65},
    # Devlin et al. 2019, section 3. A classifier reads the pooler, a masked language model the transform.
    "bert_base": {**_BERT, **_WIDTH_768, "num_layers": 12},
    "bert_large": {**_BERT, **_WIDTH_1024, "num_layers": 24},
    # Radford et al. 2019, Table 2.
    "gpt2": {**_GPT2, **_WIDTH_768, "num_layers": 12},
    "gpt2_medium": {**_GPT2, **_WIDTH_1024, "num_layers": 24},
    "gpt2_large": {**_GPT2, "num_layers": 36, "d_model": 1280, "d_ff": 5120, "num_heads": 20},
    "gpt2_xl": {**_GPT2, "num_layers": 48, "d_model": 1600, "d_ff": 6400, "num_heads": 25},
    # Brown et al. 2020, Table 2.1, to count with: there every second layer's attention is sparse, which adds no
    # parameters. XL is printed with 24 heads of 128, which do not fit 2048; its 1.3B parameters are those of 16.
    "gpt3_small": {**_GPT3, **_WIDTH_768, "num_layers": 12},
    "gpt3_medium": {**_GPT3, **_WIDTH_1024, "num_layers": 24},
    "gpt3_large": {**_GPT3, "num_layers": 24, "d_model": 1536, "d_ff": 6144, "num_heads": 16},
    "gpt3_xl": {**_GPT3, "num_layers": 24, "d_model": 2048, "d_ff": 8192, "num_heads": 16},
    "gpt3_2_7b": {**_GPT3, "num_layers": 32, "d_model": 2560, "d_ff": 10240, "num_heads": 32},
    "gpt3_6_7b": {**_GPT3, "num_layers": 32, "d_model": 4096, "d_ff": 16384, "num_heads": 32},
    "gpt3_13b": {**_GPT3, "num_layers": 40, "d_model": 5140, "d_ff": 20560, "num_heads": 40, "d_k": 128, "d_v": 128},
    "gpt3_175b": {**_GPT3, "num_layers": 96, "d_model": 12288, "d_ff": 49152, "num_heads": 96},
    # Touvron et al. 2023, Table 2; Zhang et al. 2024 (TinyLlama), Table 2, with four heads of keys and values.
    "llama_7b": {**_LLAMA, "num_layers": 32, "d_model": 4096, "d_ff": 11008, "num_heads": 32},
    "tinyllama_1b": {**_TINYLLAMA, "num_layers": 22, "d_model": 2048, "d_ff": 5632, "num_heads": 32},
    # Raffel et al. 2020, sections 2.1 and 3.7.
    "t5_small": _T5,
    "t5_base": {**_T5, **_WIDTH_768, "num_layers": 12},
    "t5_large": {**_T5, **_WIDTH_1024, "num_layers": 24},
    # The same authors' later release. It was pre-trained without dropout, as here; set all three to 0.1 to fine-tune.
    "t5_1_1_small": {**_T5_1_1, "num_layers": 8, "d_ff": 1024, "num_heads": 6, "d_k": 64, "d_v": 64},
    "t5_1_1_base": {**_T5_1_1, "num_layers": 12, "d_model": 768, "num_heads": 12},
    "t5_1_1_large": {**_T5_1_1, "num_layers": 24, "d_model": 1024, "d_ff": 2816, "num_heads": 16},
    # Lewis et al. 2020, section 2.1; dropout as in the released models.
    "bart_base": {**_BART, **_WIDTH_768},
    "bart_large": {**_BART, **_WIDTH_1024, "num_layers": 12},
    # Tiedemann and Thottingal 2020: the models of OPUS-MT, made with Marian, whose bias of the logits is left out.
    "marian": {"norm_epsilon": 1e-5, "activation": "silu"},
    # Dosovitskiy et al. 2021, Table 1, and Table 3: no dropout of queries, keys, values. S/16: Touvron et al. 2021.
    "vit_s16": {**_VIT, **_WIDTH_384, "num_layers": 12},
    "vit_b16": {**_VIT, **_WIDTH_768, "num_layers": 12},
    "vit_l16": {**_VIT, **_WIDTH_1024, "num_layers": 24},
}

_MLM = {
    "task": "mlm",
    "data.source": "text",
    "optim.optimizer": "adamw",
    "optim.schedule": "linear",
    "optim.learning_rate": 1e-4,
    "optim.warmup": 0.01,
    "optim.b2": 0.999,
    "optim.epsilon": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.label_smoothing": 0.0,
}
_LM = {
    "task": "lm",
    "data.source": "text",
    "data.overlong": "split",
    "optim.optimizer": "adamw",
    "optim.schedule": "cosine",
    "optim.warmup": 0.012,
    "optim.b2": 0.95,
    "optim.epsilon": 1e-8,
    "optim.weight_decay": 0.1,
    "optim.label_smoothing": 0.0,
}
_GPT3_LM = {**_LM, "optim.warmup": 0.00125, "optim.final_rate": 0.1}
_LLAMA_LM = {**_LM, "optim.final_rate": 0.1}
_DENOISE = {"task": "denoise", "data.source": "text", "data.overlong": "split", "optim.label_smoothing": 0.0}
_SPANS = {
    **_DENOISE,
    "optim.optimizer": "adafactor",
    "optim.schedule": "t5",
    "optim.learning_rate": 0.01,
    "optim.warmup": 10_000.0,
    "optim.clip_norm": 0.0,
}
_INFILLING = {**_DENOISE, "data.noise": "bart", "data.noise_density": 0.3}
_CLASSIFY_IMAGES = {
    "task": "classify",
    "data.source": "images",
    "data.tokenizer": "image",
    "optim.optimizer": "adamw",
    "optim.schedule": "cosine",
    "optim.learning_rate": 3e-3,
    "optim.warmup": 0.107,
    "optim.b2": 0.999,
    "optim.epsilon": 1e-8,
    "optim.weight_decay": 0.3,
    "optim.label_smoothing": 0.0,
}
_RECURRENT = {"optim.label_smoothing": 0.0, "optim.clip_norm": 5.0}
_LSTM_LM = {"task": "lm", "data.source": "text", "data.overlong": "split", **_RECURRENT}

# Other options that a row's paper sets, as dotted keys. Batch sizes and numbers of updates depend on the machine,
# so the warm-up of a schedule that ends with the run is given as the paper's share of it.
RECIPES: dict[str, dict[str, Any]] = {
    "transformer_big": {"train.num_steps": 300_000},
    "table3_d_smoothing0": {"optim.label_smoothing": 0.0},
    "table3_d_smoothing2": {"optim.label_smoothing": 0.2},
    "table3_big": {"train.num_steps": 300_000},
    # Their papers clip (the large language model at 10) and do not smooth labels; their SGD and Adadelta are not here.
    "seq2seq_sutskever": _RECURRENT,
    "rnnsearch_50": {"optim.label_smoothing": 0.0},
    "luong_global": _RECURRENT,
    "lstm_medium": _LSTM_LM,
    "lstm_large": {**_LSTM_LM, "optim.clip_norm": 10.0},
    # Devlin et al. 2019, appendix A.2: 10,000 of 1,000,000 updates.
    "bert_base": _MLM,
    "bert_large": _MLM,
    # Rates of Brown et al. 2020, Table 2.1; the paper of GPT-2 leaves its training open. Kaplan et al. 2020, section
    # 2.2, warm up for 3,000 of 250,000 updates and decay to 0.
    "gpt2": {**_LM, "optim.learning_rate": 6e-4},
    "gpt2_medium": {**_LM, "optim.learning_rate": 3e-4},
    "gpt2_large": {**_LM, "optim.learning_rate": 2.5e-4},
    "gpt2_xl": {**_LM, "optim.learning_rate": 2e-4},
    # Brown et al. 2020, Table 2.1 and appendix B: 375 million of 300 billion tokens, and a decay to a tenth.
    "gpt3_small": {**_GPT3_LM, "optim.learning_rate": 6e-4},
    "gpt3_medium": {**_GPT3_LM, "optim.learning_rate": 3e-4},
    "gpt3_large": {**_GPT3_LM, "optim.learning_rate": 2.5e-4},
    "gpt3_xl": {**_GPT3_LM, "optim.learning_rate": 2e-4},
    "gpt3_2_7b": {**_GPT3_LM, "optim.learning_rate": 1.6e-4},
    "gpt3_6_7b": {**_GPT3_LM, "optim.learning_rate": 1.2e-4},
    "gpt3_13b": {**_GPT3_LM, "optim.learning_rate": 1e-4},
    "gpt3_175b": {**_GPT3_LM, "optim.learning_rate": 0.6e-4},
    # Touvron et al. 2023, section 2.3 and Table 2: 2,000 updates of 4 million tokens, of a trillion; Zhang et al. 2024,
    # section 2.4: 2,000 of 2 million, of 3 trillion.
    "llama_7b": {**_LLAMA_LM, "optim.learning_rate": 3e-4, "optim.warmup": 0.008},
    "tinyllama_1b": {**_LLAMA_LM, "optim.learning_rate": 4e-4, "optim.warmup": 0.0013},
    # Raffel et al. 2020, section 3.1.2.
    "t5_small": _SPANS,
    "t5_base": _SPANS,
    "t5_large": _SPANS,
    "t5_1_1_small": _SPANS,
    "t5_1_1_base": _SPANS,
    "t5_1_1_large": _SPANS,
    # Lewis et al. 2020, section 5.1.
    "bart_base": _INFILLING,
    "bart_large": _INFILLING,
    # Dosovitskiy et al. 2021, Table 3, the rows trained on ImageNet: 10,000 updates of 4,096 images, of 300 epochs.
    "vit_s16": _CLASSIFY_IMAGES,
    "vit_b16": _CLASSIFY_IMAGES,
    "vit_l16": _CLASSIFY_IMAGES,
}
