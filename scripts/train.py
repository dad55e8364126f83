#!/usr/bin/env python
"""Train what a recipe says: python scripts/train.py imdb_tiny --override model.num_levels=1 model.hybrid=false"""

import argparse
import sys
from pathlib import Path

from accelerate import PartialState

from hkt_hf.training import load_recipe, run_recipe, summary
from hkt_hf.training.recipe import find_yaml

CONFIGURATION = Path(__file__).resolve().parent.parent / "configuration"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train, evaluate and save what a recipe says; resumes a killed run.")
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the bare name of one in configuration/")
    parser.add_argument(
        "--override",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="changes to the recipe, e.g. model.num_levels=1 training.max_steps=10",
    )
    parser.add_argument("--data-dir", help="local folder of the data, instead of the Hub")
    parser.add_argument("--output-dir", help="default: runs/<name of the recipe>")
    parser.add_argument(
        "--track",
        metavar="TRACKER",
        help="trackio, tensorboard or another tracker of Trainer that gets the curve too; these two work offline",
    )
    options = parser.parse_args(arguments)
    try:
        recipe = load_recipe(find_yaml(options.recipe, CONFIGURATION), options.override)
        output_dir = options.output_dir or Path("runs") / recipe.name
        results = run_recipe(recipe, output_dir, options.data_dir, options.track)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    # Of several processes, one.
    if PartialState().is_main_process:
        print(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
