"""Which checkpoints of a run can be trusted after a kill at any moment."""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer_utils import sort_checkpoints

STATE_FILE = "trainer_state.json"
WEIGHTS_FILE = "model.safetensors"


def write_json(path: Path, content: Any) -> None:
    """Writes `content` so that `path` is, at every moment, either absent, as it was before or complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def is_complete(checkpoint: Path) -> bool:
    """Whether training can go on from this folder, which Trainer writes file by file, trainer_state.json last."""
    try:
        TrainerState.load_from_json(str(checkpoint / STATE_FILE))
        with safe_open(checkpoint / WEIGHTS_FILE, framework="pt"):  # compares the size of the file with its header
            pass
    except (OSError, ValueError, TypeError, SafetensorError):
        return False
    # torch.save writes a zip file, whose directory comes last: one that was cut short is no zip file.
    pickled = [checkpoint / "optimizer.pt", checkpoint / "scheduler.pt", *checkpoint.glob("rng_state*.pth")]
    return len(pickled) > 2 and all(zipfile.is_zipfile(path) for path in pickled)


def newest_checkpoint(output_dir: Path) -> Path | None:
    """
    The newest complete checkpoint in `output_dir`.

    Deletes the incomplete ones, half written or half deleted: Trainer counts them when it keeps the last
    `save_total_limit` checkpoints, and would delete complete ones for their sake.
    """
    complete = None
    for checkpoint in map(Path, sort_checkpoints(str(output_dir))):
        if is_complete(checkpoint):
            complete = checkpoint
        else:
            shutil.rmtree(checkpoint)
    return complete


def best_checkpoint(state: TrainerState, output_dir: Path) -> Path | None:
    """
    The folder of the best step so far.

    `state.best_model_checkpoint` is not used: it is an absolute path, and when the output folder has moved Trainer
    drops it with a warning and keeps the last weights instead of the best.
    """
    return output_dir / f"checkpoint-{state.best_global_step}" if state.best_global_step else None
