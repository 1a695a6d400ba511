import pytest

from jformer.data.vocabularies import VocabularySpec
from jformer.errors import UserError
from tests.tasks.conftest import make_task


def test_limits_are_those_of_each_side_and_one_vocabulary_reads_both(make):
    made = make("prefix_lm", max_source_length=20, max_target_length=8, overlong="cut")
    assert made.task.vocabularies == {"shared": VocabularySpec("char", ("source", "target"))}
    assert (made.corpus.source.lengths.max(), made.corpus.target.lengths.max()) == (20, 8)
    assert max(shape.target_length for shape in made.batches.plan.shapes) == 28
    assert {shape.source_length for shape in made.batches.plan.shapes} == {0}


def test_two_vocabularies_are_refused():
    with pytest.raises(UserError, match=r"both texts: it needs data\.vocab_shared=True"):
        make_task("prefix_lm", vocab_shared=False)
