"""Lines on which tokenizers that are alike nearly everywhere differ, and the project's documents to train them on."""

import random
import unicodedata
from pathlib import Path

LINES = 20_000
MARKS = (
    *(
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "</s>",
        "<s>",
        "<pad>",
        "<unk>",
        "<mask>",
        "<|endoftext|>",
        "<extra_id_0>",
        "eng_Latn",
    ),
    *(" ", "  ", "\t", "\u00a0", "\u2028", "\u3000", "\u200d", "\ufeff", "\r", "\x07", "\x85", "▁", "##", "Ġ"),
    *("'s", " n't", " .", "e\u0301", "ﬁ", "Ⅷ", "½", "İ", "ß", "ẞ", "ﷺ", "👩‍👩‍👧", "🇩🇪", "𝕏", "\U0010ffff"),
    *("नमस्ते", "ไทย", "日本語", "مرحبا"),
)
ROOT = Path(__file__).parents[1]


def documents():
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [line for path in paths for line in path.read_text().splitlines() if line.strip()]


def hostile_lines(count=LINES, seed=0):
    """Return lines of documents, of signs of all planes, and of what tokenizers take for their own, in all mixtures."""
    draw, real = random.Random(seed), documents()

    def sign():
        while True:
            code = draw.choice((draw.randrange(1, 0x250), draw.randrange(1, 0x3100), draw.randrange(1, 0x110000)))
            if unicodedata.category(chr(code)) != "Cs":  # lone surrogates are not text
                return chr(code)

    def part():
        kind = draw.random()
        if kind < 0.4:
            line = draw.choice(real)
            begin = draw.randrange(len(line))
            return line[begin : begin + draw.randrange(1, 60)]
        if kind < 0.6:
            return draw.choice(MARKS)
        if kind < 0.7:
            return unicodedata.normalize(draw.choice(("NFC", "NFD", "NFKC", "NFKD")), sign() + sign())
        return "".join(sign() for _ in range(draw.choice((1, 2, 3, 120 if kind > 0.99 else 8))))

    return [draw.choice(("", " ")).join(part() for _ in range(draw.randrange(1, 8))) for _ in range(count)]
