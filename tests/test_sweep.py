"""A sweep trains every variant and seed once, loses nothing to a kill, and its report says what the results say."""

import copy
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from script_loader import load_script
from tiny_recipe import TINY, write_recipe

from hkt_hf.training.evaluation import across_seeds
from hkt_hf.training.report import read_results, summary_table
from hkt_hf.training.sweep import load_sweep

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
SHIPPED = sorted((SCRIPTS.parent / "configuration" / "sweeps").glob("*.yaml"))
SWEEP = {
    "recipe": "tiny.yaml",
    "baseline": "MHA",
    "seeds": [0, 1],
    "variants": {"HKT, stride 1": ["model.level_stride=1"], "MHA": ["model.num_levels=1", "model.hybrid=false"]},
}


def write_sweep(folder, **changes):
    content = copy.deepcopy(TINY)
    content["training"] |= {"max_steps": 4, "eval_steps": 2, "save_steps": 2, "logging_steps": 2}
    write_recipe(folder / "tiny.yaml", content)
    return write_recipe(folder / "small.yaml", SWEEP | changes)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(path):
    sweep = load_sweep(path)
    assert sweep.baseline == "MHA" and "HKT" in sweep.variants
    assert len({run.name for run in sweep.runs}) == len(sweep.runs)


def test_all_variants_of_a_seed_come_before_the_next_seed(tmp_path):
    sweep = load_sweep(write_sweep(tmp_path))
    assert [run.name for run in sweep.runs] == ["hkt-stride-1-seed0", "mha-seed0", "hkt-stride-1-seed1", "mha-seed1"]
    assert [run.recipe.seed for run in sweep.runs] == [0, 0, 1, 1]
    assert sweep.runs[0].recipe.model["level_stride"] == 1 and sweep.runs[1].recipe.model["num_levels"] == 1


def test_wider_mha_has_as_many_parameters_as_hkt():
    from hkt_hf import HKTConfig, HKTForSequenceClassification

    sweep = load_sweep(SHIPPED[0].with_name("listops_tiny.yaml"))
    sizes = {}
    for run in sweep.runs:
        config = HKTConfig(**run.recipe.model, vocab_size=20, num_labels=10)
        sizes[run.variant] = HKTForSequenceClassification(config).num_parameters()
    assert sizes["MHA, wider"] == pytest.approx(sizes["HKT"], rel=0.02)
    assert sizes["HKT, stride 1"] == sizes["HKT"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "`seeds` is .*at least one"),
        ({"seeds": [0, 0]}, "a seed is there twice"),
        ({"seeds": ["0"]}, "must be a list of integers"),
        ({"variants": {}}, "`variants` must map at least one name"),
        ({"variants": {"MHA": "model.num_levels=1"}}, r"`variants.MHA` is 'model.num_levels=1': it must be a list"),
        ({"variants": {"MHA": ["model.num_level=1"]}}, r"`variants.MHA`: .*did you mean num_levels"),
        ({"variants": {"MHA": [], "M-H-A": [], "HKT": []}}, "are the same run"),
        ({"variants": {"MHA": [], "mha": ["model.num_levels=1"]}}, "make the same file name"),
        ({"baseline": "HKT"}, "`baseline` is 'HKT': it must be one of HKT, stride 1, MHA"),
        ({"recipe": "nowhere.yaml"}, "there is no such recipe file"),
        ({"jobs": 2}, "a sweep has exactly the keys recipe, baseline, seeds, variants; this one has .*jobs"),
    ],
)
def test_bad_sweeps_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_sweep(write_sweep(tmp_path, **changes))


def test_missing_and_malformed_files(tmp_path, capsys):
    for script in ("sweep", "report"):
        assert load_script(script).main([str(tmp_path / "nowhere.yaml")]) == 2
        assert "error: " in capsys.readouterr().err
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="this one has list"):
        load_sweep(tmp_path / "list.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="is not valid YAML"):
        load_sweep(tmp_path / "bad.yaml")


def test_a_killed_sweep_loses_nothing_and_is_reported(tmp_path, capsys):
    path = write_sweep(tmp_path)
    arguments = [str(path), "--jobs", "2"]
    arguments += ["--output-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path / "results")]
    results = tmp_path / "results"

    before: dict[str, bytes] = {}
    # Terminated, it terminates its runs. Killed, it leaves them behind, and they go on.
    for kill, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen([sys.executable, SCRIPTS / "sweep.py", *arguments], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while len(list(results.glob("*.json"))) == len(before) // 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(kill)
        assert process.wait(timeout=60) == code
        before = {file.name: file.read_bytes() for file in results.iterdir() if not file.name.startswith(".")}
    finished = [name for name in before if name.endswith(".json")]
    assert 1 <= len(finished) < 4

    assert load_script("sweep").main(arguments) == 0
    names = {run.name for run in load_sweep(path).runs}
    assert {file.stem for file in results.glob("*.json")} == {file.stem for file in results.glob("*.parquet")} == names
    for name in finished:
        assert (results / name).read_bytes() == before[name]
    content = json.loads((results / "mha-seed1.json").read_text())
    assert content["seed"] == 1 and content["steps"] == 4
    predictions = pq.read_table(results / "mha-seed1.parquet")
    right = [a == b for a, b in zip(*(predictions[name].to_pylist() for name in ("label", "prediction")), strict=True)]
    assert sum(right) / len(right) == content["test"]["accuracy"]

    assert load_script("report").main([str(path), "--results-dir", str(results)]) == 0
    report = (results / "README.md").read_text()
    assert capsys.readouterr().out.strip().endswith(report.strip())
    assert "4 of 4 runs" in report and "HKT, stride 1" in report and "without a model: majority" in report
    for figure in ("differences.png", "curves.png", "by_depth.png", "by_length.png"):
        assert f"]({figure})" in report and (results / figure).stat().st_size > 5_000

    # Another recipe under the same names is not taken for the same run.
    changed = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    changed["training"]["learning_rate"] = 0.1
    write_recipe(tmp_path / "tiny.yaml", changed)
    for script in ("sweep", "report"):
        capsys.readouterr()
        assert load_script(script).main([str(path), *(["--results-dir", str(results)])]) == 2
        assert "holds the results of another recipe" in capsys.readouterr().err


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, capsys):
    path = write_sweep(tmp_path, seeds=[0])
    # Something else lies where the first run wants to write.
    (tmp_path / "runs" / "hkt-stride-1-seed0").mkdir(parents=True)
    (tmp_path / "runs" / "hkt-stride-1-seed0" / "thesis.txt").write_text("precious")
    folders = ["--output-dir", str(tmp_path / "runs"), "--results-dir", str(tmp_path / "results")]
    assert load_script("sweep").main([str(path), *folders]) == 1
    assert "failed: hkt-stride-1-seed0, see " in capsys.readouterr().err
    assert "is not empty" in (tmp_path / "runs" / "hkt-stride-1-seed0.log").read_text()
    assert [file.name for file in (tmp_path / "results").glob("*.json")] == ["mha-seed0.json"]
    assert (tmp_path / "runs" / "hkt-stride-1-seed0" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(("chosen", "threads"), [(None, "4"), ("1", "1")])
def test_runs_share_the_cpus_unless_the_user_sets_their_threads(tmp_path, monkeypatch, chosen, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    script, seen = load_script("sweep"), []

    def start(run, folder, data_dir, environment):
        seen.append(environment["OMP_NUM_THREADS"])
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(script, "start", start)
    monkeypatch.setattr(script.os, "cpu_count", lambda: 8)
    run = load_sweep(write_sweep(tmp_path)).runs[0]
    assert script.run_all([run], 1, tmp_path / "runs", tmp_path / "results", None, 2) == [run]
    assert seen == [threads]


def test_the_table_in_the_readme_is_what_the_results_make():
    report = load_script("report")
    readme = report.README.read_text(encoding="utf-8")
    assert report.with_table(readme) == readme
    assert len(report.kept_sweeps()) >= 4
    with pytest.raises(ValueError, match="lacks the two marks"):
        report.with_table("# A README without them")


@pytest.mark.parametrize(
    ("variant", "other", "stated"),
    [
        ("HKT", "MHA", "+7.0 points (+6.6 to +7.4"),
        ("MHA, wider", "MHA", "+1.2 (-1.1 to +3.4)"),
        ("HKT", "MHA, wider", "+5.9 (+3.3 to +8.4)"),
        ("MHA + convolution", "MHA", "+0.3 (-2.4 to +2.9)"),
        ("HKT without its convolution branch", "MHA", "+7.2 (+5.0 to +9.4)"),
        ("HKT, stride 1", "MHA", "+5.0 (+2.2 to +7.7)"),
        ("HKT, stride 1, without its convolution branch", "MHA", "+4.0 (-1.7 to +9.8)"),
        ("HKT", "HKT, stride 1", "+2.1 (-1.0 to +5.2)"),
        (
            "HKT without its convolution branch",
            "HKT, stride 1, without its convolution branch",
            "+3.2 (-0.5 to +6.9)",
        ),
        ("HKT", "HKT, static fusion", "-0.2 (-2.0 to +1.5)"),
    ],
)
def test_the_differences_that_the_readme_states_are_those_of_the_results(variant, other, stated):
    readme = " ".join((SCRIPTS.parent / "README.md").read_text(encoding="utf-8").split())
    sweep = load_sweep(SCRIPTS.parent / "configuration" / "sweeps" / "listops_tiny.yaml")
    results = read_results(sweep, SCRIPTS.parent / "results" / "listops_tiny")
    accuracies = [[content["test"]["accuracy"] for content in results[name].values()] for name in (variant, other)]
    difference = across_seeds([first - second for first, second in zip(*accuracies, strict=True)])
    mean, low, high = (f"{100 * value:+.1f}" for value in (difference["mean"], *difference["interval"]))
    assert stated.replace(" points", "").rstrip(")") == f"{mean} ({low} to {high}"
    assert stated in readme


def test_a_sweep_without_a_seed_of_both_has_no_line_in_the_table(tmp_path):
    sweep = load_sweep(SCRIPTS.parent / "configuration" / "sweeps" / "listops_tiny.yaml")
    for name in ("hkt-seed0", "mha-seed1"):
        shutil.copy(SCRIPTS.parent / "results" / "listops_tiny" / f"{name}.json", tmp_path)
    with pytest.raises(ValueError, match="no seed of both HKT and MHA: run more of the sweep"):
        summary_table([(sweep, tmp_path)])
