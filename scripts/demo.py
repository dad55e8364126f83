#!/usr/bin/env python
"""Train HKT and multi-head attention with equal depth, width, data and steps on a small ListOps, and compare them."""

import sys
import tempfile
import time
from pathlib import Path

from hkt_hf.training import load_recipe, run_recipe

RECIPE = Path(__file__).resolve().parent.parent / "configuration" / "listops_demo.yaml"
MODELS = {"HKT": [], "MHA": ["model.num_levels=1", "model.hybrid=false"]}


def main() -> None:
    started = time.perf_counter()
    results = {}
    # A folder of its own each time: to see the models train is the point.
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in MODELS.items():
            print(f"\n{name}: {RECIPE.name} {' '.join(overrides)}", flush=True)
            results[name] = run_recipe(load_recipe(RECIPE, overrides), Path(folder) / name)
    print(table(results))
    print(f"\n{time.perf_counter() - started:.0f} s in all. To keep a model: python scripts/train.py listops_demo")


def table(results: dict[str, dict]) -> str:
    """The models and, under them, the accuracies on the same test expressions that need no model."""
    rows = [("", "test accuracy", "parameters", "ms per step", "training")]
    for name, result in results.items():
        rows.append(
            (
                name,
                f"{result['test']['accuracy']:.1%}",
                f"{result['parameters']:,}",
                f"{1000 * result['seconds_per_step']:.0f}",
                f"{result['train_seconds']:.0f} s",
            )
        )
    for name, accuracy in results["HKT"]["baselines"].items():
        rows.append((name.replace("_", " "), f"{accuracy:.1%}", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]
    return "\n".join(["", lines[0].rstrip(), *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
