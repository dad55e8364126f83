"""Two processes train as one with the same global batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_recipe import TINY, write_recipe

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ["accelerate.commands.launch", "--config_file", "configuration/accelerate/cpu.yaml", "--main_process_port=0"]
# Each process draws its own dropout.
CONTENT = TINY | {
    "model": TINY["model"] | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.0},
    "training": TINY["training"] | {"logging_steps": 1},
}


@pytest.mark.parametrize("order", ["group_by_length", "random"])
def test_two_processes_follow_the_loss_curve_of_one(tmp_path, order):
    recipe = write_recipe(tmp_path / "recipe.yaml", CONTENT)

    def train(name, *launch, batch_size):
        command = [sys.executable, *launch, "scripts/train.py", recipe, "--output-dir", tmp_path / name, "--override"]
        command += [f"training.per_device_{part}_batch_size={batch_size}" for part in ("train", "eval")]
        command += [f"training.train_sampling_strategy={order}"]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert process.returncode == 0, process.stderr
        return json.loads((tmp_path / name / "results.json").read_text())

    one = train("one", batch_size=8)
    two = train("two", "-m", *LAUNCH, batch_size=4)
    for key in ("loss", "grad_norm", "eval_loss"):
        curves = [{entry["step"]: entry[key] for entry in run["curve"] if key in entry} for run in (one, two)]
        assert len(curves[0]) > 5
        assert curves[1] == pytest.approx(curves[0], rel=1e-3), key
    # Trainer weighs the loss of an incomplete last batch otherwise; the answers are the same.
    assert two["test"] | {"loss": None} == one["test"] | {"loss": None}
