"""From the results of a sweep to a Markdown report with figures: nothing in it is typed by hand."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from matplotlib import pyplot
from matplotlib.figure import Figure
from sklearn.metrics import accuracy_score
from tqdm import tqdm

from .evaluation import across_seeds, compare_answers
from .markdown import markdown_table, percent, percent_interval
from .sweep import Sweep
from .tasks import selects_on_test

# HKT and MHA, accuracy in per cent and standard deviation over three seeds, from the paper's abstract.
PAPER = {
    "listops": {"HKT": (55.10, 0.29), "MHA": (50.33, 0.12), "setting": "hkt-small, T = 512"},
    "cifar10": {"HKT": (35.45, 0.09), "MHA": (34.01, 0.19), "setting": "hkt-small, T = 1024"},
    "imdb": {"HKT": (70.19, 0.57), "MHA": (62.72, 0.40), "setting": "hkt-small, T = 1024"},
}
Results = dict[str, dict[int, dict[str, Any]]]


def write_report(sweep: Sweep, results_dir: Path) -> str:
    """
    Writes README.md and its figures beside the results of a sweep, and returns the text.

    Raises:
        ValueError: there are no results, or none of the baseline.
    """
    results = read_results(sweep, results_dir)
    if not results.get(sweep.baseline):
        raise ValueError(f"{results_dir} has no results of {sweep.baseline}, which the others are compared with.")
    comparisons = compare(sweep, results, results_dir)
    first = next(iter(results[sweep.baseline].values()))
    task = first["recipe"]["task"]

    lines = [f"# {sweep.name}: {', '.join(results)}", "", *_origin(sweep, results), ""]
    lines += [*_accuracy_table(sweep, results, comparisons, first), "", *_remarks(sweep, results, first), ""]
    figures = {
        "differences.png": ("Difference to the baseline", plot_differences(sweep, comparisons, task)),
        "curves.png": ("Validation accuracy during training", plot_curves(results)),
    }
    for grouping in [key for key in first["test"] if key.startswith("by_")]:
        title = f"Test accuracy by {grouping.removeprefix('by_')}"
        figures[f"{grouping}.png"] = (title, plot_groups(results, grouping))
    for file_name, (title, figure) in figures.items():
        figure.savefig(results_dir / file_name, dpi=120)
        pyplot.close(figure)
        lines += [f"![{title}]({file_name})", ""]
    lines += ["## Every variant minus every other, in points, with 95 % intervals", ""]
    lines += [*pairwise_differences(sweep, results, results_dir), ""]
    lines += ["## Seed by seed, against the baseline", "", *_paired_table(sweep, comparisons), ""]
    text = "\n".join(lines)
    (results_dir / "README.md").write_text(text, encoding="utf-8")
    return text


def summary_table(sweeps: Iterable[tuple[Sweep, Path]]) -> list[str]:
    """
    One line per sweep: the accuracies of the variants that the paper is about, of the seeds that HKT and MHA both have.

    Raises:
        ValueError: a sweep has no seed of both.
    """
    variants = ("HKT", "MHA", "MHA + convolution")
    rows = []
    for sweep, results_dir in sweeps:
        results = read_results(sweep, results_dir)
        if not set(results.get("HKT", {})) & set(results.get(sweep.baseline, {})):
            raise ValueError(f"{results_dir} has no seed of both HKT and {sweep.baseline}: run more of the sweep.")
        pair = {variant: results[variant] for variant in ("HKT", sweep.baseline)}
        comparison = compare(sweep, pair, results_dir)["HKT"]
        first = next(iter(results[sweep.baseline].values()))
        cells = []
        for variant in variants:
            by_seed = results.get(variant, {})
            accuracies = [by_seed[seed]["test"]["accuracy"] for seed in comparison["by_seed"] if seed in by_seed]
            cells.append(percent(across_seeds(accuracies)["mean"]) if accuracies else "not run")
        trivial = [f"{name.replace('_', ' ')} {percent(accuracy)}" for name, accuracy in first["baselines"].items()]
        paper = PAPER[first["recipe"]["task"]]
        rows.append(
            [
                f"[{sweep.name}](results/{sweep.name}/README.md)",
                str(comparison["seeds"]),
                *cells,
                f"**{percent(comparison['mean'], sign=True)}**",
                percent_interval(_interval(comparison), sign=True),
                "; ".join(trivial),
                f"{paper['HKT'][0]:.2f} - {paper['MHA'][0]:.2f} = {paper['HKT'][0] - paper['MHA'][0]:+.2f}",
            ]
        )
    header = ["test accuracy, %", "seeds", *variants, "HKT - MHA", "95 %", "without a model", "the paper: HKT - MHA"]
    return markdown_table(header, rows)


def read_results(sweep: Sweep, results_dir: Path) -> Results:
    """{variant: {seed: content of its results file}}, of the runs that are there."""
    results: Results = {}
    for run in sweep.runs:
        path = results_dir / f"{run.name}.json"
        if path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["recipe"] != run.recipe.sections():
                raise ValueError(f"{path} holds the results of another recipe than the sweep's: run the sweep again.")
            results.setdefault(run.variant, {})[run.seed] = content
    return {variant: results[variant] for variant in sweep.variants if variant in results}


def read_answers(sweep: Sweep, results: Results, results_dir: Path) -> dict[tuple[str, int], pa.Table]:
    """{(variant, seed): its labels and predictions, row by row}."""
    return {
        (run.variant, run.seed): pq.read_table(results_dir / f"{run.name}.parquet")
        for run in sweep.runs
        if run.seed in results.get(run.variant, {})
    }


def compare(sweep: Sweep, results: Results, results_dir: Path) -> dict[str, dict[str, Any]]:
    """Each variant against the baseline: seed by seed, on the same test rows, and across the seeds that both have."""
    answers = read_answers(sweep, results, results_dir)
    both_have = [(variant, seed) for variant, seed in answers if seed in results[sweep.baseline]]
    by_seed: dict[str, dict[int, dict[str, Any]]] = {variant: {} for variant in results if variant != sweep.baseline}
    for variant, seed in tqdm(both_have, desc=f"Comparing {sweep.name}"):
        if variant != sweep.baseline:
            by_seed[variant][seed] = compare_answers(
                answers[variant, seed]["label"],
                answers[variant, seed]["prediction"],
                answers[sweep.baseline, seed]["prediction"],
            )
    return {
        variant: {"by_seed": pairs} | across_seeds([pair["difference"] for pair in pairs.values()])
        for variant, pairs in by_seed.items()
        if pairs
    }


def plot_differences(sweep: Sweep, comparisons: dict[str, dict[str, Any]], task: str) -> Figure:
    """Points of accuracy over the baseline, with 95 % intervals, next to the paper's."""
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.4 * (len(comparisons) + 1)), layout="constrained")
    names = []
    for row, (variant, comparison) in enumerate(comparisons.items()):
        low, high = (100 * bound for bound in _interval(comparison))
        axes.plot([low, high], [row, row], color="tab:blue", linewidth=2)
        for pair in comparison["by_seed"].values():
            axes.plot(100 * pair["difference"], row, "o", color="tab:blue", alpha=0.4, markersize=4)
        axes.plot(100 * comparison["mean"], row, "o", color="tab:blue")
        names.append(f"{variant} ({comparison['seeds']} seed{'s' * (comparison['seeds'] > 1)})")
    paper = PAPER[task]
    axes.plot(paper["HKT"][0] - paper["MHA"][0], len(names), "D", color="tab:orange")
    axes.set_yticks(range(len(names) + 1), labels=[*names, f"the paper: HKT - MHA, {paper['setting']}"])
    axes.invert_yaxis()
    axes.axvline(0, color="gray", linewidth=1)
    axes.set_xlabel(f"points of test accuracy over {sweep.baseline}")
    axes.grid(axis="x", alpha=0.3)
    return figure


def plot_curves(results: Results) -> Figure:
    """The mean over the seeds, and the range that they cover."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for variant, by_seed in results.items():
        curves = [
            {entry["step"]: 100 * entry["eval_accuracy"] for entry in content["curve"] if "eval_accuracy" in entry}
            for content in by_seed.values()
        ]
        steps = sorted(set.intersection(*map(set, curves)))
        values = np.array([[curve[step] for step in steps] for curve in curves])
        (line,) = axes.plot(steps, values.mean(axis=0), label=variant)
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel="validation accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def plot_groups(results: Results, grouping: str) -> Figure:
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    supports = {}
    for variant, by_seed in results.items():
        tables = [content["test"][grouping] for content in by_seed.values()]
        supports = {group: cell["support"] for group, cell in tables[0].items()}
        means = [100 * np.mean([table[group]["accuracy"] for table in tables]) for group in supports]
        axes.plot(range(len(supports)), means, "o-", label=variant)
    labels = [f"{group}\nn = {support}" for group, support in supports.items()]
    axes.set_xticks(range(len(supports)), labels=labels, fontsize="small")
    axes.set(xlabel=grouping.removeprefix("by_"), ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _interval(comparison: dict[str, Any]) -> list[float]:
    """Over the seeds; one seed has an interval over the test set alone."""
    return comparison["interval"] or next(iter(comparison["by_seed"].values()))["interval"]


def _origin(sweep: Sweep, results: Results) -> list[str]:
    contents = [content for by_seed in results.values() for content in by_seed.values()]
    environments = [content["environment"] for content in contents]
    seen = {key: sorted({str(environment[key]) for environment in environments}) for key in ("device", "threads")}
    versions = environments[0]["versions"]
    commits = sorted({str(environment["commit"])[:12] for environment in environments})
    return [
        f"{len(contents)} of {len(sweep.runs)} runs, on {', '.join(seen['device'])} with "
        f"{' or '.join(seen['threads'])} thread(s) each, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit {', '.join(commits)}. Made by "
        f"`python scripts/report.py {sweep.name}` from the results files beside it.",
    ]


def _accuracy_table(
    sweep: Sweep, results: Results, comparisons: dict[str, dict[str, Any]], first: dict[str, Any]
) -> list[str]:
    rows = []
    for variant, by_seed in results.items():
        contents = list(by_seed.values())
        accuracy = across_seeds([content["test"]["accuracy"] for content in contents])
        comparison = comparisons.get(variant, {"mean": 0.0, "interval": None})
        rows.append(
            [
                variant,
                f"{contents[0]['parameters']:,}",
                str(accuracy["seeds"]),
                f"**{percent(accuracy['mean'])}**",
                "" if accuracy["std"] is None else percent(accuracy["std"]),
                percent_interval(accuracy["interval"] or contents[0]["test"]["interval"]),
                "" if variant == sweep.baseline else percent(comparison["mean"], sign=True),
                percent_interval(comparison["interval"], sign=True),
                f"{1000 * np.median([content['seconds_per_step'] for content in contents]):.0f}",
                f"{np.median([content['train_seconds'] for content in contents]) / 60:.1f}",
                f"{max(content['memory']['peak_rss_bytes'] for content in contents) / 2**30:.1f}",
            ]
        )
    for name, accuracy in first["baselines"].items():
        rows.append([f"without a model: {name.replace('_', ' ')}", "", "", percent(accuracy), *[""] * 7])
    paper = PAPER[first["recipe"]["task"]]
    for name in ("HKT", "MHA"):
        mean, deviation = paper[name]
        difference = f"{paper['HKT'][0] - paper['MHA'][0]:+.2f}" if name == "HKT" else ""
        rows.append(
            [f"the paper's {name} ({paper['setting']})", "", "3", f"{mean:.2f}", f"{deviation:.2f}", "", difference]
            + [""] * 4
        )
    header = ["", "parameters", "seeds", "test accuracy, %", "sd", "95 %", f"over {sweep.baseline}", "95 %"]
    return markdown_table([*header, "ms per step", "minutes", "peak GiB"], rows)


def _remarks(sweep: Sweep, results: Results, first: dict[str, Any]) -> list[str]:
    selected = "by validation accuracy, test read once"
    if selects_on_test(first["recipe"]):
        selected = "by accuracy on test itself (the Long Range Arena's protocol), hence too high"
    notes = [
        f"{variant}, seed {seed}: {content['note']}"
        for variant, by_seed in results.items()
        for seed, content in by_seed.items()
        if "note" in content
    ]
    return [
        f"Accuracies on {first['test']['num_examples']:,} test examples, of the best checkpoint {selected}. "
        "Intervals of several seeds are Student's t over the seeds; that of a single seed is a bootstrap over the test "
        f"set, and does not know the noise of the seed. Differences to {sweep.baseline} are between runs "
        "with equal seeds.",
        *(line for note in notes for line in ("", note)),
    ]


def pairwise_differences(sweep: Sweep, results: Results, results_dir: Path) -> list[list[str]]:
    """
    Every variant minus every one below it, in points: the mean over the seeds that both have with its interval, which
    for a single seed is a bootstrap over the test set.
    """
    answers = read_answers(sweep, results, results_dir)
    variants = list(results)
    rows = []
    for index, variant in enumerate(variants[:-1]):
        cells = [""] * index
        for other in variants[index + 1 :]:
            seeds = [seed for seed in results[variant] if seed in results[other]]
            cells.append(_difference([(answers[variant, seed], answers[other, seed]) for seed in seeds]))
        rows.append([variant, *cells])
    return markdown_table(["", *(f"- {other}" for other in variants[1:])], rows)


def _difference(pairs: list[tuple[pa.Table, pa.Table]]) -> str:
    if not pairs:
        return "no common seed"
    if len(pairs) == 1:
        ((table, other),) = pairs
        comparison = compare_answers(table["label"], table["prediction"], other["prediction"])
        mean, interval = comparison["difference"], comparison["interval"]
    else:
        accuracies = [[accuracy_score(table["label"], table["prediction"]) for table in pair] for pair in pairs]
        comparison = across_seeds([first - second for first, second in accuracies])
        mean, interval = comparison["mean"], comparison["interval"]
    return f"{percent(mean, sign=True)} ({percent_interval(interval, sign=True)})"


def _paired_table(sweep: Sweep, comparisons: dict[str, dict[str, Any]]) -> list[str]:
    rows = [
        [
            variant,
            str(seed),
            percent(pair["difference"], sign=True),
            percent_interval(pair["interval"], sign=True),
            f"{pair['p_value']:.2g}",
        ]
        for variant, comparison in comparisons.items()
        for seed, pair in comparison["by_seed"].items()
    ]
    header = ["", "seed", f"over {sweep.baseline}, points", "95 %, bootstrap over the test set", "p (McNemar, exact)"]
    return markdown_table(header, rows)
