"""The page of a run: what it holds, and in a browser where there is one, that it draws and that texts stay texts."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest
from etils.epath import Path

from jformer.config import default_config, resolve
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.tools.pages import page
from jformer.tools.pages import run_report as report
from tests import browser
from tests.browser import HOSTILE
from tests.stored_run import score, store_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Path(store_run(tmp_path_factory.mktemp("runs") / "small"))


def written(run):
    return report.report(records.saved_config(run), run)


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text)[1])


def test_a_line_is_drawn_for_each_split_that_has_a_figure(run):
    charts = {chart["title"]: chart["lines"] for chart in data_of(written(run))}
    assert charts["loss, nats a token"] == [
        {"run": "small", "split": "train", "steps": [10], "values": [5.0]},
        {"run": "small", "split": "valid", "steps": [10, 20, 30, 40], "values": [4.0, 3.0, 2.5, 2.2]},
    ]
    assert [line["values"] for line in charts["loss without label smoothing, nats a token"]] == [[2.0, 1.5, 1.25, 1.1]]
    (own,) = report.curves({"a": [{"step": 1, "split": "valid", "word_order": 0.5}]})
    assert own["title"] == "word order"  # what has no title
    assert "norm of the gradient" not in charts  # no value is finite
    assert "perplexity" not in charts


def test_long_lines_are_thinned_to_rows_that_are_there_with_the_last(run, monkeypatch):
    monkeypatch.setattr(report, "MOST_POINTS", 3)
    assert data_of(written(run))[0]["lines"][1]["steps"] == [20, 40]


def test_the_worst_answers_come_first_and_right_ones_are_not_shown(run, monkeypatch):
    monkeypatch.setattr(report, "WORST", 7)
    text = written(run)
    assert "100 of 500 answers differ from their reference" in text
    table = text.partition("Worst answers")[2].partition("</table>")[0]
    grades = [float(grade) for grade in re.findall(r"<td>(\d+\.\d)</td></tr>", table)]
    assert len(grades) == 7
    assert grades == sorted(grades)


def test_settings_are_those_that_differ_from_the_default(run):
    text = written(run)
    assert re.search(r">model.d_model</td><td[^>]*>16</td><td[^>]*>512</td>", text)
    assert "model.init<" not in text


def test_a_run_that_still_trains_has_a_page(tmp_path):
    training = Path(store_run(tmp_path / "training", scored=False))
    assert "40 of 40 updates in the rows of metrics.jsonl, not scored yet" in written(training)
    (training / "metrics.jsonl").unlink()
    assert data_of(written(training)) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"one\n", "1 answer to 500 examples: score the run again"), (b"\xff\n", "there are no outputs; score")],
)
def test_answers_that_do_not_fit_leave_the_rest_of_the_page(tmp_path, content, told):
    damaged = Path(store_run(tmp_path / "damaged"))
    (damaged / "outputs" / "test.txt").write_bytes(content)
    text = written(damaged)
    assert "cannot be shown: " in text
    assert told in text
    assert "exact match" in text


def test_a_run_without_answers_has_no_table_of_them(tmp_path):
    scored = Path(store_run(tmp_path / "scored"))
    shutil.rmtree(scored / "outputs")
    assert "Worst answers" not in written(scored)


def test_data_that_has_moved_is_read_where_the_config_given_says(run):
    config = records.saved_config(run)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, name="copy"))
    assert "has changed since the run was scored" in report.report(other, run)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, test=("else=test",)))
    assert "is not a test set of the config, which has else: name data.test" in report.report(other, run)


def test_labels_are_right_or_wrong_as_they_were_scored(tmp_path):
    options = default_config("bert_base")
    options.task, options.data.normalization = "classify", "nfkc"
    config = resolve(options)
    pairs = [Pair("a", "\ufb01ne"), Pair("b", "bad"), Pair("c", "bad")]
    assert report.graded(config, ["fine", "fine", "bad"], pairs) == [(0.0, 2, ("b", "bad", "fine"), "wrong")]


def test_tagged_sentences_are_ranked_by_their_share_of_right_tags():
    config = resolve({"task": "tag", "model": {"family": "encoder"}, "data": {"source": "conll"}})
    pairs = [Pair("a b", "O O"), Pair("c", "B-x"), Pair("d e f", "O B-x O")]
    assert report.graded(config, ["O O", "O", "O B-x B-x"], pairs) == [
        (0.0, 2, ("c", "B-x", "O"), "0 of 1"),
        (2 / 3, 3, ("d e f", "O B-x O", "O B-x B-x"), "2 of 3"),
    ]


def test_spans_are_graded_by_f1_and_one_that_is_right_but_for_an_article_is_right():
    pairs = [Pair("a\tb", "red cat"), Pair("a\tb", "cat"), Pair("a\tb", "", others=())]
    config = dataclasses.replace(resolve({}), task="qa")
    found = report.graded(config, ["cat", "The cat!", "cat"], pairs)
    assert [(number, grade) for _, number, _, grade in found] == [(3, "0.0"), (1, "66.7")]


@pytest.mark.parametrize(
    ("output", "line"),
    [("-", "--mode=report writes a page: name a file"), ("missing/page.html", "cannot be written; name a file in")],
)
def test_a_page_that_cannot_be_written_is_one_line(run, output, line):
    with pytest.raises(UserError, match=line):
        list(report.write_report(records.saved_config(run), run, output))


def test_the_command_writes_the_page_without_jax(run, tmp_path):
    code = "import sys; from jformer.main import main; done = main(sys.argv); sys.exit(done or 'jax' in sys.modules)"
    flags = [f"--workdir={run}", "--mode=report", f"--output={tmp_path}/page.html"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\S+page\.html: \d+ kB; open it in a browser\n", done.stdout)


def sample(step, answer, number=1):
    return {"step": step, "sample": number, "source": f"source {number}", "reference": "right", "answer": answer}


def test_an_answer_stands_at_the_updates_at_which_it_is_another_than_before():
    samples = [sample(10, "a"), sample(10, "x", 2), sample(20, "a"), sample(20, "y", 2), sample(30, "right")]
    first, second = "".join(report.answers_over_updates(samples)).split("source ")[1:]
    assert re.findall(r">(\d+)</td><td[^>]*>(.*?)</td>", first) == [("10", "a"), ("30", "right")]
    assert re.findall(r">(\d+)</td><td[^>]*>(.*?)</td>", second) == [("10", "x"), ("20", "y")]


def test_another_example_of_the_same_number_is_not_mixed_with_the_first():
    samples = [sample(10, "a"), sample(20, "b") | {"source": "source 9"}]
    assert len(report.answers_over_updates(samples)) == 7  # a heading, and for each example two texts and a table


def test_source_and_reference_each_run_in_their_own_direction():
    parts = report.answers_over_updates([sample(10, "a") | {"source": "שלום", "reference": "peace"}])
    assert parts[1:3] == ['<p dir="auto">שלום</p>', '<p dir="auto">→ peace</p>']


@pytest.mark.parametrize("watch", [0.5, float("nan"), float("inf"), -1.0])
def test_a_page_is_watched_in_whole_seconds(run, tmp_path, watch):
    with pytest.raises(UserError, match=r"--watch=.* must be 0 or 1 to 86400 seconds"):
        list(report.write_report(records.saved_config(run), run, str(tmp_path / "page.html"), watch))


def test_of_many_answers_some_are_shown_with_the_last(monkeypatch):
    monkeypatch.setattr(report, "ANSWERS", 3)
    text = "".join(report.answers_over_updates([sample(step, str(step)) for step in range(1, 8)]))
    assert re.findall(r">(\d)</td><td", text) == ["1", "4", "7"]


def test_parameters_have_their_shares_of_the_whole():
    table = report.parameters({"embed": 30, "decoder": 10})[1]
    assert re.findall(r"<td[^>]*>(.*?)</td>", table) == ["embed", "30", "75.0%", "decoder", "10", "25.0%"]


def test_a_watched_page_is_written_until_the_run_is_scored(tmp_path, monkeypatch):
    training = Path(store_run(tmp_path / "run", scored=False))
    config, output = records.saved_config(training), tmp_path / "page.html"
    contents = []

    def sleep(seconds):
        contents.append(output.read_text())
        if len(contents) == 2:
            score(training, config, wrong=0)

    monkeypatch.setattr(report.time, "sleep", sleep)
    said = list(report.write_report(config, training, str(output), watch=10.0))
    assert len(contents) == 2
    assert all('<meta http-equiv="refresh" content="10">' in content for content in contents)
    assert 'http-equiv="refresh' not in output.read_text()
    assert said[0] == f"{output}: open it in a browser; it is written every 10 s until the run is scored"
    assert re.fullmatch(r"\S+page\.html: \d+ kB; open it in a browser", said[1])


def test_a_run_that_trains_on_after_it_was_scored_is_not_over(tmp_path):
    run = Path(store_run(tmp_path / "run"))
    assert report.is_over(run)
    (run / "heartbeat.json").write_text('{"phase": "updating"}')
    assert not report.is_over(run)


def test_the_page_of_two_runs_draws_both_and_texts_stay_texts():
    lines = [{"run": name, "split": "valid", "steps": [1, 2], "values": [3.0, None]} for name in ("a", HOSTILE)]
    charts = [{"title": HOSTILE, "lines": lines}, {"title": "one value", "lines": lines[:1]}]
    drawn = browser.draw(page.page(HOSTILE, [report.CHARTS], report.PROGRAMS, charts))
    assert drawn.console == []
    assert drawn.html.count("<figure>") == 2
    assert "a, valid ends at 3" in drawn.html
    body = drawn.html.partition('<div id="charts">')[2].partition("<script")[0]
    assert "onerror" in body
    assert "<img" not in body


def test_facts_are_words_and_numbers_and_no_notation_of_python():
    run = {"tokens_per_update": 6400, "libraries": {"jax": "0.12.0", "flax": "1.0"}, "data": ["ab", "cd"], "seed": 3}
    assert report.facts(run) == [
        ["tokens per update", "6,400"],
        ["libraries", "jax 0.12.0, flax 1.0"],
        ["data", "ab, cd"],
    ]


LABELS = "() => [...document.querySelectorAll('figure svg text')].map((text) => text.textContent)"


def test_axes_have_round_numbers_and_logarithmic_ones_powers():
    lines = [{"run": "a", "split": "valid", "steps": [100, 2_000, 4_500], "values": [4.8, 1.0, 0.951]}]
    rates = [{"run": "a", "split": "train", "steps": [1, 90_000, 100_000], "values": [2e-3, 3e-8, 0]}]
    peaks = [{"run": "a", "split": "train", "steps": [1, 2, 3], "values": [4.61e11, 4.6e11, 4.65e11]}]
    charts = [{"title": title, "lines": found} for title, found in zip("abc", (lines, rates, peaks), strict=True)]
    with browser.used(page.page("x", [report.CHARTS], report.PROGRAMS, charts)) as tab:
        plain = tab.evaluate(LABELS)
        for box in tab.locator("input[type=checkbox]").all():
            box.check()
        assert tab.inner_text(".readout >> nth=1") == "train ends at 3e-8"  # 0 has no place
        logarithmic = tab.evaluate(LABELS)[:19]
    assert plain == [
        *("1", "2", "3", "4"), *("1000", "2000", "3000", "4000"),
        *("0", "0.0005", "0.001", "0.0015", "0.002"), *("20000", "40000", "60000", "80000", "100000"),
        *("4.6e11", "4.61e11", "4.62e11", "4.63e11", "4.64e11", "4.65e11"), *("1", "2", "3"),
    ]  # fmt: skip
    assert logarithmic == [
        *("1", "2", "3", "4"), *("100", "200", "500", "1000", "2000"),
        *("1e-7", "1e-6", "0.00001", "0.0001", "0.001"), *("1", "10", "100", "1000", "10000"),
    ]  # fmt: skip


def test_smoothed_values_are_means_that_forget():
    lines = [{"run": "a", "split": "valid", "steps": [1, 2, 3], "values": [4.0, 1.0, 1.0]}]
    with browser.used(page.page("x", [report.CHARTS], report.PROGRAMS, [{"title": "loss", "lines": lines}])) as tab:
        tab.fill("input[type=range]", "0.5")
        assert tab.inner_text(".readout") == "valid ends at 1.43"  # (4 / 4 + 1 / 2 + 1) / (1 / 4 + 1 / 2 + 1) = 1.43


def test_nothing_keeps_anybody_out(run):
    assert browser.barriers(written(run)) == []


def test_the_page_fits_a_phone_and_paper(run):
    assert browser.overhang(written(run)) == (0, 0)
    long = 3 * HOSTILE.replace(" ", "_")
    assert browser.overhang(page.page(long, [page.heading(long), page.paragraph(long)])) == (0, 0)


def test_everything_is_reached_and_used_by_keyboard(run):
    with browser.used(written(run)) as tab:
        assert len(browser.tabbed(tab)) > 5
        browser.go_to(tab, "figure svg")
        before = tab.inner_text("figure >> nth=0")
        tab.keyboard.press("ArrowLeft")
        assert tab.inner_text("figure >> nth=0") != before
        browser.go_to(tab, "input[type=checkbox]")
        tab.keyboard.press("Space")
        assert tab.is_checked("input[type=checkbox] >> nth=0")


def test_as_many_runs_as_there_are_can_be_drawn():
    steps = list(range(1, 1_001))
    lines = [{"run": str(i), "split": "valid", "steps": steps, "values": steps} for i in range(150)]
    drawn = browser.draw(page.page("many", [report.CHARTS], report.PROGRAMS, [{"title": "loss", "lines": lines}]))
    assert drawn.console == []
    assert drawn.html.count("<path") == 150
    assert "143 others" in drawn.html


def test_a_page_of_its_own_never_makes_a_run_fail(run, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = records.saved_config(copy)
    assert report.write_own(config, copy).endswith(f"as a page: {copy}/report.html")
    assert "<title>Run run</title>" in (copy / "report.html").read_text()
    monkeypatch.setattr(report, "report", lambda *_: 1 / 0)
    assert report.write_own(config, copy) == f"{copy}/report.html is not written (ZeroDivisionError: division by zero)"


def test_a_number_that_is_written_in_another_way_is_right():
    config = resolve(
        {"task": "classify", "model": {"family": "encoder"}, "data": {"source": "labelled", "labels": "number"}}
    )
    pairs = [Pair("a", "4.2"), Pair("b", "5.0"), Pair("c", "1")]
    assert [number for _, number, *_ in report.graded(config, ["3.97", "5", "1.0"], pairs)] == [1]
