"""The page of a run: what it holds, and in a browser where there is one, that it draws and that texts stay texts."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from etils.epath import Path

from jformer.errors import UserError
from jformer.evaluation import page, report
from tests import browser
from tests.stored_run import store_run

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Path(store_run(tmp_path_factory.mktemp("runs") / "small"))


def data_of(text):
    return json.loads(re.search(r'id="data">(.*?)</script>', text)[1])


def test_a_line_is_drawn_for_each_split_that_has_a_figure(run):
    charts = {chart["title"]: chart["lines"] for chart in data_of(report.report(run))}
    assert charts["loss, nats a token"] == [
        {"run": "small", "split": "train", "steps": [10], "values": [5.0]},
        {"run": "small", "split": "valid", "steps": [10, 20, 30, 40], "values": [4.0, 3.0, 2.5, 2.2]},
    ]
    assert charts["norm of the gradient"][0]["values"] == [None]
    assert "perplexity" not in charts


def test_long_lines_are_thinned_to_rows_that_are_there_with_the_last(run, monkeypatch):
    monkeypatch.setattr(report, "MOST_POINTS", 3)
    assert data_of(report.report(run))[0]["lines"][1]["steps"] == [20, 40]


def test_the_worst_answers_come_first_and_right_ones_are_not_shown(run, monkeypatch):
    monkeypatch.setattr(report, "WORST", 7)
    text = report.report(run)
    assert "100 of 500 answers differ from their reference" in text
    table = text.partition("Worst answers")[2].partition("</table>")[0]
    grades = [float(grade) for grade in re.findall(r"<td>(\d+\.\d)</td></tr>", table)]
    assert len(grades) == 7
    assert grades == sorted(grades)


def test_settings_are_those_that_differ_from_the_default(run):
    text = report.report(run)
    assert '<td class="text">model.d_model</td><td class="text">16</td><td>512</td>' in text
    assert "model.init<" not in text


def test_a_run_that_still_trains_has_a_page(tmp_path):
    training = Path(store_run(tmp_path / "training", scored=False))
    assert "40 of 40 updates in the rows of metrics.jsonl, not scored yet" in report.report(training)
    (training / "metrics.jsonl").unlink()
    assert data_of(report.report(training)) == []


def test_data_that_has_gone_leaves_the_rest_of_the_page(tmp_path):
    moved = Path(store_run(tmp_path / "moved"))
    shutil.rmtree(moved / "outputs")
    text = report.report(moved)
    assert "cannot be shown" in text
    assert "exact match" in text


@pytest.mark.parametrize(
    ("output", "line"),
    [("-", "--mode=report writes a page: name a file"), ("missing/page.html", "cannot be written; name a file in")],
)
def test_a_page_that_cannot_be_written_is_one_line(run, output, line):
    with pytest.raises(UserError, match=line):
        report.write_report(run, output)


def test_the_command_writes_the_page_without_jax(run, tmp_path):
    code = "import sys; from jformer.main import main; done = main(sys.argv); sys.exit(done or 'jax' in sys.modules)"
    flags = [f"--workdir={run}", "--mode=report", f"--output={tmp_path}/page.html"]
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"\S+page\.html: \d+ kB; open it in a browser\n", done.stdout)


def test_the_page_of_two_runs_draws_both_and_texts_stay_texts():
    lines = [{"run": name, "split": "valid", "steps": [1, 2], "values": [3.0, None]} for name in ("a", HOSTILE)]
    charts = [{"title": HOSTILE, "lines": lines}, {"title": "one value", "lines": lines[:1]}]
    drawn = browser.draw(page.drawn(HOSTILE, [report.CHARTS], "report", charts, page.STYLE))
    assert drawn.console == []
    assert drawn.html.count("<figure>") == 2
    assert "a, valid ends at 3" in drawn.html
    body = drawn.html.partition('<div id="charts">')[2].partition("<script")[0]
    assert "onerror" in body
    assert "<img" not in body
