"""
What the answers of a model on a test set say about it, and about the difference to another model.

Metrics and tests are those of scikit-learn and SciPy. (`evaluate.load` fetches a script from the Hub for each metric,
so it does not work offline.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from sklearn.metrics import accuracy_score, classification_report

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000


def evaluate_answers(
    labels: ArrayLike, answers: ArrayLike, names: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """
    Accuracy with its bootstrap interval over the test set, per class and per group.

    Args:
        labels, answers: integers [N], indices of `names`.
        names: of the classes.
        groups: from the name of a grouping to the group [N] of each row, such as {"depth": ["3", "5", ...]}.

    Returns:
        `accuracy`, `interval` (of the accuracy, 95 %), `num_examples`, `per_class` (precision, recall, f1, support) and
        for each grouping `by_<name>`: {group: {accuracy, support}}, in the order of the groups' first numbers.
    """
    labels, answers = np.asarray(labels), np.asarray(answers)
    report = classification_report(
        labels, answers, labels=range(len(names)), target_names=names, output_dict=True, zero_division=0.0
    )
    result = {
        "accuracy": float(accuracy_score(labels, answers)),
        "interval": bootstrap_interval(labels == answers),
        "num_examples": len(labels),
        "per_class": {
            name: {
                "precision": report[name]["precision"],
                "recall": report[name]["recall"],
                "f1": report[name]["f1-score"],
                "support": int(report[name]["support"]),
            }
            for name in names
        },
    }
    for grouping, members in groups.items():
        members = np.asarray(members)
        result[f"by_{grouping}"] = {
            str(group): {
                "accuracy": float(accuracy_score(labels[members == group], answers[members == group])),
                "support": int((members == group).sum()),
            }
            for group in sorted(set(members), key=_first_number)
        }
    return result


def bootstrap_interval(values: ArrayLike, seed: int = 0) -> list[float]:
    """The 95 % bootstrap interval (percentiles of 10,000 resamples) of the mean of `values` [N]."""
    result = stats.bootstrap(
        (np.asarray(values, dtype=float),),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        batch=100,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=seed,
    )
    return [float(bound) for bound in result.confidence_interval]


def compare_answers(labels: ArrayLike, answers: ArrayLike, baseline_answers: ArrayLike) -> dict[str, Any]:
    """
    Two models on the same test set, row by row.

    Returns:
        `difference` of the accuracies, its bootstrap `interval` over the test set (95 %), and `p_value` of McNemar's
        exact test: how likely so uneven a split of the rows that one of them alone gets right would be, were they
        equally good. It knows the noise of the test set, not that of the seed.

    Raises:
        ValueError: the answers are not to the same rows.
    """
    labels, answers, baseline_answers = (np.asarray(values) for values in (labels, answers, baseline_answers))
    if not labels.shape == answers.shape == baseline_answers.shape:
        raise ValueError(
            f"there are {len(labels)} labels, {len(answers)} and {len(baseline_answers)} answers: a paired comparison "
            "needs the same test set."
        )
    right, baseline_right = answers == labels, baseline_answers == labels
    only_one = int((right & ~baseline_right).sum()), int((baseline_right & ~right).sum())
    return {
        "difference": float(right.mean() - baseline_right.mean()),
        "interval": bootstrap_interval(right.astype(int) - baseline_right.astype(int)),
        "p_value": float(stats.binomtest(only_one[0], sum(only_one)).pvalue) if sum(only_one) else 1.0,
    }


def across_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and the mean's 95 % interval by Student's t; the last two are None for one value."""
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return {"mean": mean, "std": None, "interval": None, "seeds": count}
    deviation = float(np.std(values, ddof=1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * deviation / count**0.5
    return {"mean": mean, "std": deviation, "interval": [mean - half, mean + half], "seeds": count}


def length_groups(lengths: ArrayLike, edges: Sequence[int]) -> list[str]:
    """The group of each length, named by its limits: edges of 10 and 20 make "1-10", "11-20" and "21-"."""
    names = [f"{low + 1}-{high}" for low, high in zip([0, *edges], edges, strict=False)] + [f"{edges[-1] + 1}-"]
    return [names[index] for index in np.searchsorted(edges, np.asarray(lengths))]


def _first_number(group: str) -> int:
    return int(str(group).partition("-")[0])
