"""Answers word by word: how inputs become pieces of whole words, and how what a model says of each word is read.

Letters in shapes: b inputs, s positions, v classes.
"""

from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jformer.data.aligned import WORDS_CUT, encode_chunks
from jformer.data.corpus import ExampleEncoder
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import NUM_SYMBOLS, Tokenizer
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.search import Decoded
from jformer.inference.answers import EMPTY, SPLIT, UNKNOWN, Hypotheses, Output, Piece, Request, TaggedWord
from jformer.models.batch import Batch
from jformer.tasks.crf import Tags, best_tags


def pieces_of_words(encoder: ExampleEncoder, requests: Sequence[Request], counts: Counter[str]) -> list[list[Piece]]:
    """Return the pieces of every request, none for one without words.

    What is over the model's limit is split between words, whatever decode.overlong says: a word that is left out would
    get no tag. Of a word that is over the limit alone, the first tokens are read.
    """
    groups, side = list[list[Piece]](), encoder.source
    texts = [request.text.split() for request in requests]
    for request, words, chunks in zip(requests, texts, encode_chunks(side, texts), strict=True):
        counts[EMPTY] += not chunks
        counts[SPLIT] += len(chunks) > 1
        counts[UNKNOWN] += any(side.symbols.unk in chunk.ids for chunk in chunks)
        counts[WORDS_CUT] += sum(chunk.cut for chunk in chunks)
        remaining = iter(words)
        groups.append(
            [
                Piece(ids, request.line, words=[next(remaining) for _ in starts], starts=starts)
                for ids, starts, _ in chunks
            ]
        )
    return groups


def marks(piece: Piece) -> list[int]:
    """Return what stands for the unknown target of a piece: any class where a word begins, or a window's marks.

    Of a piece that is answered as a whole it is nothing.
    """
    if piece.window:
        return list(piece.window.marks)
    marked = [0] * len(piece.ids) if piece.starts else []
    for start in piece.starts:
        marked[start] = NUM_SYMBOLS
    return marked


def tagged_pair(encoder: ExampleEncoder, text: str, tags: str) -> tuple[Sequence[int], Sequence[int], bool]:
    """Return the sequences of a text and of its tags as training has them, and whether they are cut at the limit."""
    parts = encoder.encode([Pair(text, tags)], Counter())
    return (*parts[0], len(parts) > 1) if parts else (encoder.source.encode([""])[0], [], False)


def likeliest_tags(logits: Float[Array, "b s *v"], batch: Batch, options: DecodeConfig) -> Decoded:
    """Return three hypotheses of every row: tags, the bits of their log-probabilities, and those given the tag before.

    The score of all is the log-probability of all tags of the row. With a CRF, whose logits are of pairs [v+1 v+1], the
    tags are likeliest together, else each by itself.
    """
    if logits.ndim == 4:
        found = best_tags(logits, batch)
    else:
        log_probs = jax.nn.log_softmax(logits)
        best = log_probs.max(axis=-1)  # [b s]
        found = Tags(log_probs.argmax(axis=-1), best, best, (best * batch["weights"]).sum(axis=1))
    bits = (lax.bitcast_convert_type(x, jnp.int32) for x in (found.shares, found.follows))
    tokens = jnp.stack([found.tags.astype(jnp.int32) + NUM_SYMBOLS, *bits], axis=1)  # [b 3 s]
    scores = jnp.repeat(found.log_probs[:, None], tokens.shape[1], axis=1)  # [b 3]
    return Decoded(tokens, scores, jnp.full_like(tokens[..., 0], tokens.shape[-1]), jnp.ones(len(scores), bool))


def read_tags(hypotheses: Hypotheses, tokenizer: Tokenizer, piece: Piece) -> list[Output]:
    """Return the tags of a piece's words."""
    (ids, log_prob), *others = hypotheses
    shares, follows = (np.exp(np.array(bits, np.int32).view(np.float32)).tolist() for bits, _ in others)
    tags = [
        TaggedWord(word, tokenizer.decode([ids[start]]), shares[start], follows[start])
        for word, start in zip(piece.words, piece.starts, strict=True)
    ]
    text = " ".join(tag.tag for tag in tags)
    return [Output(text, tuple(ids[start] for start in piece.starts), log_prob=log_prob, tags=tuple(tags))]
