import pytest

from jformer.errors import UserError
from jformer.inference.output_file import lines_to_keep, open_output


def test_what_an_empty_line_ends_is_an_answer_of_conll(tmp_path):
    answers, settings = tmp_path / "answers.conll", {"mode": "predict", "decode.outputs": "conll"}
    whole = "Ada\tB-person\nsleeps\tO\n\n\n"  # and the answer to an empty line
    with open_output(answers, False, settings) as file:
        file.write(whole + "in\tO\nLon")
    assert lines_to_keep(answers, settings) == 2
    assert answers.read_text() == whole


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000], ids=["empty", "cut", "nested too deep"])
def test_a_record_that_cannot_be_read_is_refused(tmp_path, content):
    answers = tmp_path / "answers.txt"
    with open_output(answers, False, {"mode": "predict"}) as file:
        file.write("one\n")
    assert lines_to_keep(answers, {"mode": "predict"}) == 1
    (tmp_path / "answers.txt.settings.json").write_text(content)
    with pytest.raises(UserError, match="does not say how"):
        lines_to_keep(answers, {"mode": "predict"})
