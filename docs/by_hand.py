"""The page of the site on attention by hand: the numbers of docs/walkthrough.md, step by step, and a page to look into.

What is looked into is drawn by the parts of --mode=explore, of weights that need no model: the embeddings are queries,
keys and values.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jformer.inference.answers import Attended, AttentionWeights, Part
from jformer.models.layers.dot_product import attend
from jformer.tools.pages.explorer import Shown, explorer_page

WORDS = ("The", "cat", "sat")
EMBEDDINGS = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1]], np.float32)
SCALES = {  # what the scores are multiplied by → what it is called
    4**-0.5: "scores divided by √4, as the paper does",
    1.0: "scores as they are: the larger they get, the nearer to all or nothing",
    0.0: "scores of 0: every position takes as much of each",
}
TITLE = '"The cat sat" by hand'
EXPLORER = "by_hand_explorer.html"


def computed(scale: float, causal: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return outputs [t, 4], weights [t, s] and the mask [t, s] of the three words, by the attention of our models."""
    x = jnp.asarray(EMBEDDINGS)[None, :, None]  # one sentence, one head
    whole = np.ones((3, 3), bool)
    mask = np.tril(whole) if causal else whole
    output, weights = attend(x, {"k": x, "v": x}, mask=jnp.asarray(mask)[None, None], scale=scale)
    return np.asarray(output[0, :, 0]), np.asarray(weights[0, 0]), mask


def explorer() -> str:
    """Return the page to look into: for each scale the weights without a mask, and with that of a decoder."""
    shown = []
    for scale, name in SCALES.items():
        parts = []
        for part, causal in ((Part.ENCODER_SELF, False), (Part.DECODER_SELF, True)):
            _, weights, mask = computed(scale, causal)
            parts.append(AttentionWeights(part, weights[None, None], mask, WORDS, WORDS))
        shown.append(Shown(Attended(f"{' '.join(WORDS)} ({name})", "", encoder=parts[0], decoder=parts[1])))
    return explorer_page(TITLE, shown)


def by_hand_page() -> str:
    """Return the page in Markdown: every step with its numbers, and below it the page to look into."""
    output, weights, _ = computed(4**-0.5, causal=False)
    scores = EMBEDDINGS @ EMBEDDINGS.T
    first = " ".join(f"{number:.4f}" for number in output[0])
    taken = " + ".join(
        f"{share:.4f} · [{' '.join(f'{number:g}' for number in row)}]"
        for share, row in zip(weights[0], EMBEDDINGS, strict=True)
    )
    return f"""# {TITLE}

Every word has four numbers, which are its query, its key and its value at once. The words are those of [the
walkthrough](walkthrough.md#attention-by-hand), which explains each step and computes it line by line.

{_table(("", "1", "2", "3", "4"), EMBEDDINGS, "g")}

**Scores.** The product of a word's query with each key: how much they have in common.

{_table(("", *WORDS), scores, "g")}

**Scaled.** Divided by √4, the root of the key size (section 3.2.1 of Vaswani et al. 2017).

{_table(("", *WORDS), scores / 2, "g")}

**Weights.** Softmax of each row: positive numbers that add up to 1.

{_table(("", *WORDS), weights, ".4f")}

**Output.** The mean of the values by these weights. For "The" it is {taken} = [{first}].

{_table(("", "1", "2", "3", "4"), output, ".4f")}

## Look into it

Point at a weight, or go to the heat map with Tab and use the arrow keys. *Example* changes what the scores are divided
by; *Attention* has the mask of a decoder, under which no word takes anything of a later one. It is the page that
`--mode=explore` writes of a trained model ([alone in a window]({EXPLORER})).

<iframe src="{EXPLORER}" title="Attention of three words, to look into" style="width: 100%; height: 60em"></iframe>
"""


def _table(head: Sequence[str], rows: np.ndarray, form: str) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for word, row in zip(WORDS, rows, strict=True):
        lines.append(f"| {word} | " + " | ".join(format(float(number), form) for number in row) + " |")
    return "\n".join(lines)
