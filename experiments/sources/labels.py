"""Texts with several labels, and pairs of texts with a number, made up by templates: for task classify.

subjects   what a text is about (none, one or several of SUBJECTS); its clauses mention a subject or deny one
likeness   how many of five things two sentences agree on, 0 to 5, in whatever words and voice
"""

from experiments.sources.templates import Draws, dealt, one
from jformer.data.data_config import SourceConfig
from jformer.data.sources.generated import open_built
from jformer.data.sources.split import Pair, Split

SUBJECTS = {
    "food": ("bread", "soup", "dinner", "cheese"),
    "money": ("wages", "debts", "prices", "taxes"),
    "music": ("songs", "drums", "concerts", "choirs"),
    "sport": ("races", "matches", "swimming", "football"),
    "travel": ("trains", "hotels", "flights", "harbours"),
    "weather": ("rain", "storms", "frost", "sunshine"),
}
TOLD = ("we talked about {}", "she wrote of {}", "the news was full of {}", "he did not forget {}")
DENIED = ("nobody spoke of {}", "there was no word of {}", "he did not care for {}", "she wrote of no {}")
MOST_CLAUSES = 4

SAME = {  # what is said → the words that say it
    "who": (
        ("boy", "lad"),
        ("physician", "doctor"),
        ("infant", "baby"),
        ("attorney", "lawyer"),
        ("instructor", "teacher"),
    ),
    "how": (("quick", "fast"), ("sad", "unhappy"), ("large", "big"), ("silent", "quiet"), ("weary", "tired")),
    "does": (("purchased", "bought"), ("fixed", "mended"), ("selected", "chosen"), ("discovered", "found")),
    "many": (("two", "a pair of"), ("twelve", "a dozen"), ("six", "half a dozen"), ("countless", "very many")),
    "what": (
        ("bicycles", "bikes"),
        ("pictures", "images"),
        ("stones", "rocks"),
        ("automobiles", "cars"),
        ("ships", "boats"),
    ),
}
ACTIVE, PASSIVE = "the {how} {who} has {does} {many} {what}", "{many} {what} were {does} by the {how} {who}"


def open_subjects(config: SourceConfig, split: str) -> Split:
    """Open one split of texts with their subjects, of data.labels=several."""
    return open_built(config, split, subjects)


def open_likeness(config: SourceConfig, split: str) -> Split:
    """Open one split of pairs of sentences with how alike they are, of data.labels=number."""
    return open_built(config, split, likeness)


def subjects(num_pairs: int) -> dict[str, list[Pair]]:
    """Return texts and the subjects that they are about, in alphabetical order, separated by commas."""
    return dealt(num_pairs, _draw_subjects)


def likeness(num_pairs: int) -> dict[str, list[Pair]]:
    """Return pairs of sentences, separated by a TAB, and how many things they agree on."""
    return dealt(num_pairs, _compared)


def _draw_subjects(draws: Draws) -> Pair:
    clauses, labels = [], set()
    for _ in range(1 + int(next(draws) * MOST_CLAUSES)):
        subject = one(draws, [*SUBJECTS])
        tells = next(draws) < 0.5
        clauses.append(one(draws, TOLD if tells else DENIED).format(one(draws, SUBJECTS[subject])))
        labels |= {subject} if tells else set()
    return Pair(" and ".join(clauses), ",".join(sorted(labels)))


def _compared(draws: Draws) -> Pair:
    """Draw what two sentences say: of each thing the same or another, more often the same in some pairs than others."""
    alike, both = next(draws), []
    for key, things in SAME.items():
        first = second = one(draws, things)
        if next(draws) > alike:
            second = one(draws, [thing for thing in things if thing != first])
        both.append((key, first, second))
    said = [{key: one(draws, pair[side]) for key, *pair in both} for side in (0, 1)]
    sentences = [one(draws, (ACTIVE, PASSIVE)).format(**words) for words in said]
    return Pair("\t".join(sentences), str(sum(first == second for _, first, second in both)))
