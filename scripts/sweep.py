#!/usr/bin/env python
"""Train every variant and seed of a sweep: python scripts/sweep.py listops_tiny --jobs 2"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from hkt_hf.training.recipe import find_yaml
from hkt_hf.training.run import PREDICTIONS_FILE, RESULTS_FILE
from hkt_hf.training.sweep import SweepRun, load_sweep

TRAIN = Path(__file__).resolve().with_name("train.py")
SWEEPS = TRAIN.parent.parent / "configuration" / "sweeps"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train all variants and seeds of a sweep. Killed at any moment, the same command goes on: finished "
        "runs are skipped, the others go on from their last checkpoint."
    )
    parser.add_argument("sweep", metavar="SWEEP", help="a YAML file, or the bare name of one in configuration/sweeps/")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the CPUs (default: 1)")
    parser.add_argument("--data-dir", help="local folder of the data, instead of the Hub")
    parser.add_argument("--output-dir", type=Path, help="checkpoints and logs; default: runs/<name of the sweep>")
    parser.add_argument("--results-dir", type=Path, help="what is kept; default: results/<name of the sweep>")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}: at least 1 is needed.")
    try:
        sweep = load_sweep(find_yaml(options.sweep, SWEEPS))
        output_dir = options.output_dir or Path("runs") / sweep.name
        results_dir = options.results_dir or Path("results") / sweep.name
        open_runs = [run for run in sweep.runs if not is_done(run, results_dir)]
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    results_dir.mkdir(parents=True, exist_ok=True)
    failed = run_all(open_runs, len(sweep.runs), output_dir, results_dir, options.data_dir, options.jobs)
    for run in failed:
        print(f"failed: {run.name}, see {output_log(output_dir / run.name)}", file=sys.stderr)
    return 1 if failed else 0


def is_done(run: SweepRun, results_dir: Path) -> bool:
    """Whether the results of exactly this run are there; ValueError if they are those of another recipe."""
    path = results_dir / f"{run.name}.json"
    if not path.is_file():
        return False
    if json.loads(path.read_text(encoding="utf-8"))["recipe"] != run.recipe.sections():
        raise ValueError(f"{path} holds the results of another recipe: move it away, or choose another --results-dir.")
    return True


def run_all(
    runs: list[SweepRun], total: int, output_dir: Path, results_dir: Path, data_dir: str | None, jobs: int
) -> list[SweepRun]:
    """Runs `jobs` at a time, each with its share of the CPUs or `OMP_NUM_THREADS`; returns those that failed."""
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))} | os.environ
    waiting, running, failed = list(runs), {}, []
    # A terminated sweep terminates its runs: else they would go on without it, and a new sweep would start them twice.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tqdm(total=total, initial=total - len(runs), unit="run") as progress:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running[start(run, output_dir / run.name, data_dir, environment)] = run
                    progress.set_postfix_str(", ".join(run.name for run in running.values()))
                time.sleep(0.2)
                for process in [process for process in running if process.poll() is not None]:
                    run = running.pop(process)
                    if process.returncode == 0:
                        keep(output_dir / run.name, results_dir, run.name)
                    else:
                        failed.append(run)
                    progress.update()
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
    return failed


def start(run: SweepRun, folder: Path, data_dir: str | None, environment: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, TRAIN, run.recipe_path, "--output-dir", folder, "--override", *run.overrides]
    if data_dir is not None:
        command += ["--data-dir", data_dir]
    log = output_log(folder)
    with log.open("a", encoding="utf-8") as file:
        return subprocess.Popen(
            [str(part) for part in command],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
        )


def output_log(folder: Path) -> Path:
    """Beside the run's folder, which must be empty when the run begins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_name(f"{folder.name}.log")


def keep(folder: Path, results_dir: Path, name: str) -> None:
    """The results last: they say that the run is done."""
    for source, suffix in ((PREDICTIONS_FILE, ".parquet"), (RESULTS_FILE, ".json")):
        temporary = results_dir / f".{name}{suffix}"
        shutil.copyfile(folder / source, temporary)
        temporary.replace(results_dir / f"{name}{suffix}")


if __name__ == "__main__":
    sys.exit(main())
