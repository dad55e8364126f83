#!/usr/bin/env python
"""
Write the report of a sweep from its results files: python scripts/report.py listops_tiny

Without a name: the reports of all sweeps in results/, and the table of them in the README.
"""

import argparse
import sys
from pathlib import Path

from hkt_hf.training.recipe import find_yaml
from hkt_hf.training.report import summary_table, write_report
from hkt_hf.training.sweep import load_sweep

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = ROOT / "configuration" / "sweeps"
RESULTS = ROOT / "results"
README = ROOT / "README.md"
START, END = "<!-- Made by `python scripts/report.py`. -->\n", "\n<!-- End of what it made. -->"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the table and the figures of a sweep beside its results files.")
    parser.add_argument(
        "sweep",
        metavar="SWEEP",
        nargs="?",
        help="a YAML file, or the bare name of one in configuration/sweeps/; default: all in results/, and the README",
    )
    parser.add_argument("--results-dir", type=Path, help="default: results/<name of the sweep>")
    options = parser.parse_args(arguments)
    if options.results_dir and not options.sweep:
        parser.error("--results-dir needs the sweep whose results it holds.")
    try:
        if options.sweep:
            sweep = load_sweep(find_yaml(options.sweep, SWEEPS))
            print(write_report(sweep, options.results_dir or Path("results") / sweep.name))
        else:
            for sweep, results_dir in kept_sweeps():
                write_report(sweep, results_dir)
            README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


def kept_sweeps() -> list:
    """The sweeps of which results/ has some, and where those are."""
    names = sorted(folder.name for folder in RESULTS.iterdir() if folder.is_dir())
    return [(load_sweep(find_yaml(name, SWEEPS)), RESULTS / name) for name in names]


def with_table(readme: str) -> str:
    """The README with the table that the results now make."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{README} lacks the two marks of the table, {START.strip()} and {END.strip()}: add them.")
    return before + start + "\n" + "\n".join(summary_table(kept_sweeps())) + "\n" + end + after


if __name__ == "__main__":
    sys.exit(main())
