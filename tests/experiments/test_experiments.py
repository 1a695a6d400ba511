"""Every experiment file says what it asks and can be swept; what its conclusions say of made-up results is right."""

import ast
import dataclasses
import math
import re
from pathlib import Path

import pytest

from experiments.papers import gradient_norms, scaling_law, scan, table3
from experiments.papers.contrasts import means, versus
from jformer.tools.sweep import Trial
from jformer.tools.sweep.experiment import load_experiment

ROOT = Path(__file__).parents[2]
NAMES = ("averaging", "batch_invariance", "depth_and_heads", "grokking", "positions", "pre_vs_post_ln")
OTHERS = ("deep_encoder", "multi30k_ablation", "residual_and_scaling", "scaling_law", "scan", "six_directions",
          "table3", "tokenizer_choice", "two_directions")  # fmt: skip
FILES = [ROOT / "experiments" / "papers" / f"{name}.py" for name in (*NAMES, *OTHERS)]


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # BASE is a path from there


def defines(path, name):
    """Return whether a file has a variable of its own."""
    targets = [node.targets[0] for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def made_up(name, value):
    """Return trials of all arms and seeds of an experiment, each with value(arm, overrides, seed) as its metrics."""
    experiment = load_experiment(ROOT / "experiments" / "papers" / f"{name}.py")
    trials = []
    for trial in experiment.planned():
        metrics = value(trial.arm, trial.overrides, trial.seed)
        found = {"state": "complete", "value": metrics.get(experiment.metric), "metrics": metrics}
        trials.append(dataclasses.replace(trial, **found))
    return trials, list(experiment.conclude(trials))


def test_no_experiment_is_left_out_here():
    found = {path for path in (ROOT / "experiments").rglob("*.py") if defines(path, "METRIC")}
    assert found == set(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_its_docstring_asks_a_question_and_names_claim_design_and_command(path):
    title, _, rest = ast.get_docstring(ast.parse(path.read_text())).partition("\n\n")
    assert title.endswith("?")
    sections = dict(re.findall(r"^(\w+): +(.+?)(?=^\w+:|\Z)", rest, re.DOTALL | re.MULTILINE))
    assert list(sections) == ["Claim", "Design", "Command"]
    command = " ".join(sections["Command"].split())
    assert command.startswith(
        f"python -m jformer.sweep --experiment=experiments/papers/{path.name} --workdir=runs/{path.stem} --workers=2"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_arm_resolves_to_a_run_of_its_own_whose_metric_it_will_have(path):
    experiment = load_experiment(path)  # refuses what no run can be made of, and equal arms
    configs = [experiment.config(arm) for arm in experiment.arms.values()]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
    split = experiment.metric.partition("/")[0]
    for config in configs:
        assert split in config.data.test_splits() or (split == "valid" and config.train.eval_every)
        assert not config.train.eval_every or config.train.num_steps % config.train.eval_every == 0
    assert len(experiment.seeds) > 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_conclusions_can_be_asked_for_before_anything_is_known(path):
    experiment = load_experiment(path)
    assert list(experiment.conclude([])) == []
    assert all("\n" not in line for line in experiment.conclude(experiment.planned()))


def test_a_difference_is_over_the_seeds_that_both_arms_have():
    rows = [("a", 0, 3.0), ("a", 1, 5.0), ("a", 2, 9.0), ("b", 0, 1.0), ("b", 1, 2.0), ("b", 2, None)]
    trials = [Trial("", arm, {}, seed, value=value) for arm, seed, value in rows]
    line = "a minus b: +2.500 ± 6.353, p = 0.13 (unadjusted), 2 seeds"  # t of one degree: 12.71 * 0.5
    assert versus(trials, "a", "b") == [line]
    assert versus(trials, "a", "c") == []
    assert means(trials) == {"a": pytest.approx(17 / 3), "b": 1.5}
    trials[5] = dataclasses.replace(trials[5], state="failed")
    assert versus(trials, "a", "b") == [f"{line}; 1 of 3 seeds of b failed"]
    assert versus(trials, "a", "a") == ["a minus a: +0.000 ± 0.000, p = 1 (unadjusted), 3 seeds"]


def test_ranks_of_table_3_agree_with_themselves_and_with_nothing_when_turned_round():
    for sign in (1, -1):
        _, lines = made_up("table3", lambda arm, *_, sign=sign: {"valid/perplexity": 10 + sign * table3.PAPER[arm]})
        assert f"all rows: Spearman's rho {sign:+.2f}" in lines[0]
        assert "19 rows" in lines[0]
        assert "15 rows" in lines[1]


def test_table_3_is_the_papers_at_an_eighth_of_its_width_and_half_its_depth():
    paper = {"model.num_layers": 6, "model.d_model": 512, "model.d_ff": 2048, "model.num_heads": 8, "model.d_k": 64}
    assert {key: table3.TABLE[key] for key in paper} == {
        key: value // {"model.num_layers": 2, "model.num_heads": 1}.get(key, 8) for key, value in paper.items()
    }
    assert (table3.PAPER["base"], table3.PAPER["C N 2"], table3.PAPER["E learned positions"]) == (4.92, 6.11, 4.92)
    changed = {**table3.TABLE, **table3.ROWS["A h 32"]}
    assert changed["model.num_heads"] * changed["model.d_k"] == changed["model.d_model"]


def test_a_power_law_that_is_there_is_found_again():
    def metrics(arm, overrides, seed):
        return {"valid/loss": 30 * scaling_law.flops(overrides) ** -0.1}

    _, lines = made_up("scaling_law", metrics)
    assert len(lines) == 4
    assert all("b = 0.1000 ± 0.0000" in line for line in lines)
    assert re.search(r"loss = 30 · C\^-b .* 12 points, off by 0.0% at most", lines[-1])  # three cost as much as others


def test_the_frontier_leaves_out_what_something_cheaper_beats():
    assert scaling_law.frontier([(4, 1.5), (1, 3.0), (2, 2.0), (3, 2.5)]) == [(1, 3.0), (2, 2.0), (4, 1.5)]


def test_the_farthest_seed_tells_how_far_devices_are_apart():
    def metrics(arm, overrides, seed):
        value = 2.0 * (1 + 1e-6 * seed * (arm == "4 devices"))
        return dict.fromkeys(("valid/loss", "train/loss", "train/grad_norm"), value)

    _, lines = made_up("batch_invariance", metrics)
    assert "4 devices: valid/loss within 2.0e-06 of one device, 3 seeds" in lines
    assert "2 devices: train/grad_norm within 0.0e+00 of one device, 3 seeds" in lines
    assert len(lines) == 5 * 3


def test_what_warm_up_is_worth_is_told_for_each_norm_and_depth():
    def metrics(arm, overrides, seed):
        needed = overrides["model.norm"] == "post" and not overrides["optim.warmup"]
        return {"valid/loss": 1 + seed + needed * overrides["model.num_layers"]}

    _, lines = made_up("pre_vs_post_ln", metrics)
    assert lines[0].startswith(
        "post, no warm-up, 2 layers minus post, warm-up, 2 layers: +2.000 (3 seeds, no interval)"
    )
    assert lines[1].startswith("pre, no warm-up, 2 layers minus pre, warm-up, 2 layers: +0.000 ± 0.000")
    assert lines[6].startswith("post, no warm-up, 12 layers minus post, warm-up, 12 layers: +12.000 (3 seeds")


def test_gradients_of_last_layers_are_fitted_over_depth(tmp_path, monkeypatch):
    import numpy as np

    def norms(norm, depth):
        last = 1.0 if norm == "post" else depth**-0.5
        return {stack: np.tile(np.geomspace(0.5 * last, last, depth), (3, 1)) for stack in gradient_norms.STACKS}

    found = {(norm, depth): norms(norm, depth) for norm in gradient_norms.NORMS for depth in gradient_norms.DEPTHS}
    lines = list(gradient_norms.conclude(found))
    assert "decoder, pre: last layer 1 · L^-b with b = 0.50 ± 0.00; of 12 layers the last has 2.00 times" in lines[3]
    gradient_norms.write(tmp_path / "layers.csv", found)
    rows = (tmp_path / "layers.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 2 * 3 * sum(gradient_norms.DEPTHS)
    assert rows[1] == "post,2,encoder,1,0,0.5"
    assert math.isclose(float(rows[-1].rpartition(",")[2]), 12**-0.5, rel_tol=1e-4)


def test_answers_to_scan_are_counted_by_length_and_by_what_is_wrong_with_them():
    one = [("A B", "A B"), ("A B", "A C"), ("A", "A B C"), ("", "A B C"), ("A B C D", "A B C"), ("A B C", "A B C")]
    other = [("A B", "A B"), ("A B C", "A B D")]
    line = scan.by_length("an arm", [one, other])
    assert (line.label, line.x, line.y) == ("an arm", [2, 3], [0.75, 0.125])
    assert scan.mistakes([one, other]) == "of 5 wrong ones 40% only end too soon, 20% only go on too long"
    assert scan.mistakes([[("A", "A")]]).startswith("of 0 wrong ones")
    assert (scan.cut("A B C D", "A B"), scan.cut("A", "A B")) == ("A B", "A")


def test_a_run_of_scan_alone_is_an_arm_of_its_own(tmp_path):
    (tmp_path / "results.json").touch()
    assert scan.scored_runs(tmp_path) == {tmp_path.name: [tmp_path]}
