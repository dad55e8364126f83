"""Where a result comes from: code, libraries, machine, data."""

import hashlib
import json
import platform
import resource
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict

LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "safetensors", "scikit-learn", "numpy")


def environment() -> dict[str, Any]:
    """Commit, versions and hardware, as far as they can change a result or a time."""
    return {
        "commit": git_commit(),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in LIBRARIES},
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor(),
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """The model of the CPU, where the system tells it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def git_commit() -> str | None:
    """The commit of this package's checkout, `-dirty` added if a tracked file differs; None outside of a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        # An installed package may lie within a repository that is not its own.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def data_fingerprints(datasets: DatasetDict) -> dict[str, dict[str, Any]]:
    """Rows and SHA-256 of the texts and labels of each split, in order: equal on every machine for equal data."""
    return {split: {"rows": len(dataset), "sha256": _sha256(dataset)} for split, dataset in datasets.items()}


def peak_memory() -> dict[str, int | None]:
    """The most memory that this process has held so far, in bytes."""
    # macOS counts in bytes, Linux in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def _sha256(dataset: Dataset) -> str:
    digest = hashlib.sha256()
    for batch in dataset.select_columns(["text", "label"]).iter(batch_size=1000):
        digest.update(json.dumps([batch["text"], batch["label"]]).encode())
    return digest.hexdigest()
