"""Spans and their F1 against seqeval's, over random pairs; skipped, and said so, where there is no seqeval."""

import numpy as np
import pytest

from jformer.tasks.span_scores import span_scores

metrics = pytest.importorskip("seqeval.metrics", reason="parity with seqeval needs it: pip install seqeval==1.2.2")

TAGS = ["O", "O", *(f"{place}-{kind}" for place in "BI" for kind in ("x", "y", "z"))]
SCORES = {"span_f1": "f1_score", "span_precision": "precision_score", "span_recall": "recall_score"}


@pytest.mark.filterwarnings("ignore")  # seqeval warns where there is nothing to divide by
def test_scores_of_1000_random_pairs_are_those_of_seqeval():
    """Tags without order: spans that begin with I-, that change their type, that touch; a third of them is right."""
    rng = np.random.default_rng(0)
    for _ in range(1_000):
        lengths = rng.integers(1, 12, rng.integers(1, 6))
        wanted = [rng.choice(TAGS, n).tolist() for n in lengths]
        found = [[t if rng.random() < 0.5 else str(rng.choice(TAGS)) for t in tags] for tags in wanted]
        ours = span_scores(found, wanted)
        for name, theirs in SCORES.items():
            expected = getattr(metrics, theirs)(wanted, found, average="micro", zero_division=0)
            assert ours[name]["score"] == pytest.approx(expected, abs=1e-12), (found, wanted)
        report = metrics.classification_report(wanted, found, output_dict=True, zero_division=0)
        for kind, score in ours["span_f1"].get("by_group", {}).items():
            assert score == pytest.approx(report.get(kind, {"f1-score": 0.0})["f1-score"], abs=1e-12)
