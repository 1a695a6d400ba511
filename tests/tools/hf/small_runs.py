"""Small runs with the tokenizers that imported ones have, random weights, and texts that use a part of the vocabulary.

A vocabulary learns from LINES and FURTHER; of both, LINES alone are the corpus of the tests.
"""

import base64
import dataclasses
import io
import json

import jax
import numpy as np
import sentencepiece
from etils.epath import Path

from jformer.checkpoints import weights
from jformer.config import default_config, resolve
from jformer.data.tokenizers import LabelTokenizer, learn
from jformer.data.tokenizers.pretrained import FastTokenizer, PiecesTokenizer
from jformer.models import ExecutionConfig, build_model, init_params
from jformer.tools.hf.convert import ORIGIN

LINES = ["the cat sat on the mat", "a hat and a cat", "what did the cat eat?", "rats", "the mat of the hat, that one"]
FURTHER = [
    "zebras quickly jump over fuzzy vexing dogs",
    "I know 1234567890 things: xylophones & more!",
    "Größe überall",
]
DECODE = {"beam_size": 1, "length_penalty": 0.0, "max_length": 8, "max_extra_length": 8, "no_repeat_ngram": 1}
SIZES = {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2}


class Arrays:
    """Tensors in memory, read as those of a directory are."""

    def __init__(self, arrays):
        self.arrays = arrays

    def shapes(self):
        return {name: array.shape for name, array in self.arrays.items()}

    def read(self, name, take=np.asarray):
        return np.asarray(take(self.arrays[name]), np.float32)


def write_run(directory, preset, task, tokenizers, decode=None, data=None, seed=0, **model):
    """Write a run of a preset with random weights, and return its directory.

    One that writes texts writes tokens of LINES, as if it had learned from them: the others have a low bias. The seeds
    were chosen so that answers to LINES end early or are empty, which few do.
    """
    values = default_config(preset)
    values.model.update({**SIZES, **model})
    values.update(task=task)
    values.data.update(
        {"source": "files", "max_source_length": 24, "max_target_length": 24, "overlong": "drop", **(data or {})}
    )
    values.decode.update(decode or {})
    values.mesh.update(data=1)  # one device is the quickest to compile for
    config = resolve(values)
    sized = dataclasses.replace(config.model, execution=ExecutionConfig(unroll=1))
    params = jax.device_get(init_params(build_model(sized), jax.random.key(0)))  # JAX compiles each sum it makes
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: leaf + rng.standard_normal(leaf.shape).astype(np.float32), params)
    if "bias" in params.get("head", {}) and task == "translate":
        target = tokenizers[1]
        known = {i for ids in target.encode(LINES) for i in ids} | {target.symbols.eos}
        unlikely = np.array([i not in known for i in range(len(params["head"]["bias"]))])
        params["head"]["bias"] -= 40 * unlikely.astype(np.float32)
    weights.write_run(Path(directory), config, tokenizers, params)
    return Path(directory)


def marian(directory, spare=3):
    """Return a run with the pieces of two sentencepiece models, padding as the last id, and `spare` rows past it."""
    models = [_pieces([*LINES, *FURTHER]), _pieces([line[::-1] for line in (*LINES, *FURTHER)])]
    both = {piece for _, found in models for piece in found}
    ids = {piece: i for i, piece in enumerate(["</s>", "<unk>", *sorted(both - {"</s>", "<unk>"}), "<pad>"])}
    pad = ids["<pad>"]
    symbols = {"pad": pad, "bos": pad, "eos": 0, "unk": 1}
    tokenizers = tuple(
        PiecesTokenizer(
            base64.b64encode(processor.serialized_model_proto()).decode(), ids, symbols, ["</s>", "<unk>", "<pad>"]
        )
        for processor, _ in models
    )
    decode = {**DECODE, "forbid": ("h", "z")}
    run = write_run(directory, "marian", "translate", tokenizers, decode, vocab_size=len(ids) + spare,
                    target_vocab_size=len(ids) + spare, seed=21, head={"bias": True})  # fmt: skip
    (run / ORIGIN).write_text(json.dumps({"model_type": "marian"}))
    return run


def learned(directory):
    """Return a run of Marian's shape with subwords that jformer learned itself."""
    shared = learn("bpe", [*LINES, *FURTHER], 70, "identity", False)
    rows = {"vocab_size": shared.vocab_size, "target_vocab_size": shared.vocab_size}
    run = write_run(directory, "marian", "translate", (shared, shared), DECODE, **rows, head={"bias": True})
    (run / ORIGIN).write_text(json.dumps({"model_type": "marian"}))
    return run


def several(directory, place="source"):
    """Return a run of two languages, with subwords that jformer learned itself."""
    shared = learn("bpe", [*LINES, *FURTHER], 72, "identity", False, controls=["__de__", "__en__"])
    rows = {"vocab_size": shared.vocab_size, "target_vocab_size": shared.vocab_size}
    data = {"language_symbols": place}
    run = write_run(directory, "marian", "translate", (shared, shared), DECODE, data, **rows, head={"bias": True})
    (run / ORIGIN).write_text(json.dumps({"model_type": "marian"}))
    return run


def nllb(directory):
    """Return a run with unigram pieces of the `tokenizers` library and a language in front of either side."""
    content, ids = _unigram()
    around = {"pad": 1, "bos": 2, "eos": 2, "unk": 3}
    sides = tuple(FastTokenizer(content, {**around, "before": [ids[each]]}) for each in ("eng_Latn", "deu_Latn"))
    rows = {"vocab_size": len(ids) + 1, "target_vocab_size": len(ids) + 1}
    run = write_run(directory, "bart_base", "translate", sides, DECODE, **rows, seed=6, norm="pre",
                    embedding_norm=False, max_length=32, head={"bias": True})  # fmt: skip
    (run / ORIGIN).write_text(json.dumps({"model_type": "m2m_100"}))
    return run


def bart(directory):
    """Return a run whose sources and targets begin with `<s>`, which a decoder reads after `</s>`."""
    content, ids = _unigram()
    tokenizer = FastTokenizer(content, {"pad": 1, "bos": 2, "eos": 2, "unk": 3, "before": [0]})
    rows = {"vocab_size": len(ids), "target_vocab_size": len(ids)}
    return write_run(directory, "bart_base", "translate", (tokenizer, tokenizer), DECODE, **rows, seed=2, max_length=32,
                     head={"bias": True})  # fmt: skip


def t5(directory):
    """Return a run of T5 1.1's shape, whose decoder begins with padding, with a prefix of every source."""
    content, ids = _unigram()
    sides = tuple(FastTokenizer(content, {"pad": 1, "bos": 1, "eos": 2, "unk": 3}, each) for each in ("a mat: ", ""))
    rows = {"vocab_size": len(ids) + 2, "target_vocab_size": len(ids) + 2}
    return write_run(directory, "t5_1_1_small", "translate", sides, DECODE, **rows, seed=75, d_k=6, d_v=6)


def bert(directory, task="classify", numbers=None):
    """Return a run of an encoder with WordPiece: it knows two labels, gives `numbers`, or finds answers (task "qa")."""
    import tokenizers

    fast = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = tokenizers.normalizers.BertNormalizer()
    fast.pre_tokenizer, fast.decoder = tokenizers.pre_tokenizers.BertPreTokenizer(), tokenizers.decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=150, special_tokens=specials, show_progress=False)
    fast.train_from_iterator([*LINES, *FURTHER], trainer)
    text = FastTokenizer(fast.to_str(), {"pad": 0, "bos": 2, "eos": 3, "unk": 1, "noise": [4]})
    labels = numbers or LabelTokenizer("label", "identity", ["no", "yes"])
    sides = (text, labels if task == "classify" else text)
    if task == "embed":
        head = {"vectors": True, "pooling": "mean", "pooler": False, "transform": False, "num_segments": 2}
        data = {"max_source_length": 12, "max_target_length": 12}
        return write_run(directory, "bert_base", task, sides, {"normalize": True}, data, vocab_size=text.vocab_size,
                         head=head, max_length=32)  # fmt: skip
    classes = {
        "num_classes": 1 if numbers else 2,
        **({"pooling": "none", "pooler": False} if task == "qa" else {"pooler": True}),
    }
    data = {"source": {"classify": "labelled", "qa": "squad"}[task], "max_source_length": 32}
    data |= {"labels": "number"} if numbers else {}
    head = {"transform": True, "num_segments": 2, **classes}
    run = write_run(directory, "bert_base", task, sides, None, data, vocab_size=text.vocab_size, head=head,
                    max_length=32)  # fmt: skip
    (run / ORIGIN).write_text(json.dumps({"model_type": "bert"}))
    return run


def _unigram():
    """Return a tokenizer.json with languages, one of them no special token, and its ids.

    sentencepiece finds the pieces: the trainer of `tokenizers` finds others each time.
    """
    import tokenizers

    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    processor, found = _pieces([*LINES, *FURTHER])
    scored = [(piece, processor.get_score(i)) for i, piece in enumerate(found) if piece not in specials]
    fast = tokenizers.Tokenizer(tokenizers.models.Unigram([*((each, 0.0) for each in specials), *scored], unk_id=3))
    fast.pre_tokenizer, fast.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    fast.add_special_tokens([*specials, "fra_Latn", "eng_Latn", "<mask>"])
    fast.add_tokens(["deu_Latn"])
    return fast.to_str(), fast.get_vocab()


def _pieces(lines):
    """Return a sentencepiece model of the lines, and its pieces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=70, model_type="unigram", hard_vocab_limit=False,
        bos_id=-1, pad_id=-1, eos_id=0, unk_id=1, minloglevel=2, num_threads=1,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return processor, [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
