#!/usr/bin/env python
"""Write the report of a sweep from its results files: python scripts/report.py listops_tiny"""

import argparse
import sys
from pathlib import Path

from hkt_hf.training.recipe import find_yaml
from hkt_hf.training.report import write_report
from hkt_hf.training.sweep import load_sweep

SWEEPS = Path(__file__).resolve().parent.parent / "configuration" / "sweeps"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the table and the figures of a sweep beside its results files.")
    parser.add_argument("sweep", metavar="SWEEP", help="a YAML file, or the bare name of one in configuration/sweeps/")
    parser.add_argument("--results-dir", type=Path, help="default: results/<name of the sweep>")
    options = parser.parse_args(arguments)
    try:
        sweep = load_sweep(find_yaml(options.sweep, SWEEPS))
        print(write_report(sweep, options.results_dir or Path("results") / sweep.name))
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
