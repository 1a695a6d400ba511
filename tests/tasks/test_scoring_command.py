"""Scores by a user's command: exact, never made twice, and each fault in one line that quotes the command."""

import contextlib
import dataclasses
import json
import shlex
import sys
from collections import Counter

import pytest

from jformer import plugins
from jformer.config import resolve
from jformer.data.sources.split import Pair
from jformer.errors import UserError
from jformer.parallel import processes
from jformer.tasks.build import build_task
from jformer.tasks.scoring_command import Segment, check_commands, segment_scores
from jformer.tasks.sums import Sum

# Characters shared with the first reference, in percent of the longer text; without one, minus the missing ones.
OVERLAP = """
import collections, json, sys
with open(sys.argv[1] + "/seen", "a") as seen:
    for line in sys.stdin:
        seen.write(line)
        record = json.loads(line)
        answer, references = record["answer"], record["references"]
        if references:
            both = (collections.Counter(answer) & collections.Counter(references[0])).total()
            print(json.dumps({"score": 100 * both / max(len(answer), len(references[0]), 1)}))
        else:
            print(len(answer) - len(record["source"]))
"""
SEGMENTS = [Segment("ein Hut", "a hat", ("a hat", "hats")), Segment("ja", "no", ("yes",)), Segment("«ß»", "x")]


def overlap(answer, reference):
    both = (Counter(answer) & Counter(reference)).total()
    return 100 * both / max(len(answer), len(reference), 1)


def config_of(folder, script, *arguments, **evaluate):
    """Return a config with the script as command, allowed to run."""
    (folder / "overlap.py").write_text(script)
    command = shlex.join([sys.executable, "-S", str(folder / "overlap.py"), *arguments])
    plugins.allow(command)
    return resolve({"evaluate": {"command": command, **evaluate}, "data": {"dir": "x", "cache_dir": str(folder)}})


def test_no_text_is_scored_twice_until_the_script_changes(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    config = config_of(tmp_path, OVERLAP, str(tmp_path))
    waits = []
    monkeypatch.setattr(processes, "working_elsewhere", lambda: waits.append(1) or contextlib.nullcontext())
    assert segment_scores(config, "overlap", [*SEGMENTS, SEGMENTS[0]]) == [100.0, 0.0, -2.0, 100.0]
    assert waits  # the other processes must not take it for stuck
    assert [json.loads(line) for line in seen.read_text().splitlines()] == [
        {"source": source, "answer": answer, "references": [*references]} for source, answer, references in SEGMENTS
    ]
    assert segment_scores(config, "overlap", [Segment("ein", "a", ("b",)), *SEGMENTS[::-1]]) == [0, -2, 0, 100]
    assert len(seen.read_text().splitlines()) == 4
    config_of(tmp_path, OVERLAP + "\n", str(tmp_path))
    assert segment_scores(config, "overlap", SEGMENTS) == [100, 0, -2]
    assert len(seen.read_text().splitlines()) == 7
    config = config_of(tmp_path, OVERLAP, str(tmp_path), "p" * 300)  # longer than the name of a file can be
    assert segment_scores(config, "overlap", SEGMENTS) == [100, 0, -2]


def test_a_task_has_the_mean_beside_its_own_scores(tmp_path):
    config = config_of(tmp_path, OVERLAP, str(tmp_path))
    pairs = [Pair("ein Hut", "a hat"), Pair("ja", "yes")]
    sums = dict.fromkeys(("loss", "nll", "correct"), Sum(1.0, 1.0))
    found = build_task(config).score(["a hat", "yet"], pairs, sums)
    assert found["overlap"]["segments"] == [100.0, overlap("yet", "yes")]
    assert found["overlap"]["score"] == sum(found["overlap"]["segments"]) / 2
    assert found["overlap"]["signature"] == config.evaluate.command
    assert found["exact_match"]["score"] == 0.5


def test_lines_of_a_command_end_at_line_feeds_alone(tmp_path):
    line = json.dumps({"score": 1, "text": "a\u2028b\x85"}, ensure_ascii=False).encode()
    config = config_of(tmp_path, READ + f"sys.stdout.buffer.write({line!r} + b'\\r\\n' + b'2\\n3')")
    assert segment_scores(config, "overlap", SEGMENTS) == [1, 2, 3]


READ = "import sys\nn = len(sys.stdin.readlines())\n"
FAULTS = {
    "import sys\nsys.exit('no model\\nhere\\n')": "ended with exit status 1; it wrote: here",
    "raise ValueError('no model')": "ended with exit status 1; it wrote: ValueError: no model",
    READ + "print(1)": "it wrote 1 numbers for 3 texts, not one for each",
    READ + "print('Loading', 1, 2, sep='\\n')": "line 1 of its output is 'Loading', not a finite number",
    READ + "print(1, 'nan', 2, sep='\\n')": "line 2 of its output is 'nan', not a finite number",
    READ + "print(1, 2, '1e999', sep='\\n')": "line 3 of its output is '1e999', not a finite number",
    READ + "print(1, 2, '{\"score\": true}', sep='\\n')": "line 3 of its output is '{\"score\": true}', not",
    READ + "import time\nprint('slow', file=sys.stderr, flush=True)\ntime.sleep(9)": "took longer than "
    "evaluate.command_seconds=0.5 for 3 texts: raise it, or set 0; it wrote: slow",
}


@pytest.mark.parametrize("script", FAULTS)
def test_a_command_that_fails_is_one_line(tmp_path, script):
    config = config_of(tmp_path, script, command_seconds=0.5 if "sleep" in script else 60.0)
    with pytest.raises(UserError) as error:
        segment_scores(config, "overlap", SEGMENTS)
    assert str(error.value).startswith(f"evaluate.command={config.evaluate.command!r}")
    assert FAULTS[script] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_command_that_is_missing_or_only_in_a_saved_config_is_refused(tmp_path):
    config = resolve({"evaluate": {"command": "no-such-metric --x"}, "data": {"dir": "x", "cache_dir": str(tmp_path)}})
    with pytest.raises(UserError, match="comes from a saved config, so it is not run: if you trust it, name it again"):
        segment_scores(config, "no-such-metric", SEGMENTS)
    named = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, command="python sub/step.py"))
    with pytest.raises(UserError, match="no score may be named 'step': rename its file"):
        check_commands(named)
    plugins.allow("no-such-metric --x")
    with pytest.raises(UserError, match="cannot be started: there is no program 'no-such-metric'"):
        segment_scores(config, "no-such-metric", SEGMENTS)


def test_a_broken_cache_is_named(tmp_path):
    (tmp_path / "scores.sqlite").write_text("not a table, but a text that is long enough" * 9)
    config = config_of(tmp_path, READ + "print(1)")
    with pytest.raises(UserError, match=r"scores.sqlite: cannot be used as a cache of scores \(.*\): delete it"):
        segment_scores(config, "overlap", SEGMENTS[:1])


@pytest.mark.parametrize(("task", "family"), [("classify", "encoder"), ("lm", "decoder")])
def test_a_task_without_texts_to_score_refuses_a_command(task, family):
    source, head = {"classify": "labelled", "lm": "text"}[task], {"pooling": "mean"} if task == "classify" else {}
    model, data = {"family": family, "head": head}, {"dir": "x", "source": source}
    config = resolve({"task": task, "model": model, "data": data, "evaluate": {"command": "comet"}})
    with pytest.raises(UserError, match=f"evaluate.command='comet': task='{task}' has no answers that are texts with"):
        build_task(config)
