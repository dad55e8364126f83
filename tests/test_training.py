"""Training: runs are resumed bit for bit, and results are what the saved model gives."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from script_loader import load_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_recipe import TINY, write_recipe
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

from hkt_hf import HKTConfig, HKTForSequenceClassification
from hkt_hf.training import load_recipe, run_recipe, summary
from hkt_hf.training.callbacks import SeededOrderCallback
from hkt_hf.training.checkpoints import is_complete, newest_checkpoint
from hkt_hf.training.run import load_task_data, tokenize
from hkt_hf.training.tasks import TOKENIZERS, majority_baseline

ROOT = Path(__file__).resolve().parent.parent

# The same run, killed when it gets to a place: it is the kill itself that no cleanup can soften.
KILLED_RUN = """
import os, signal, sys
from transformers import Trainer
from hkt_hf.training import load_recipe, run_recipe

place, recipe, output_dir = sys.argv[1:]

steps = 0

def kill_if(condition):
    if condition:
        print(f"steps: {steps}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

training_step, save_rng_state, predict = Trainer.training_step, Trainer._save_rng_state, Trainer.predict

def counted_step(self, *args, **kwargs):
    global steps
    steps += 1
    return training_step(self, *args, **kwargs)

def killed_save(self, output_dir):
    kill_if(place == "checkpoint" and self.state.global_step == 20)
    save_rng_state(self, output_dir)

def killed_predict(self, *args, **kwargs):
    kill_if(place == "test")
    return predict(self, *args, **kwargs)

Trainer.training_step, Trainer._save_rng_state, Trainer.predict = counted_step, killed_save, killed_predict
run_recipe(load_recipe(recipe), output_dir)
"""


@pytest.fixture(scope="module", autouse=True)
def quiet_machine(tmp_path_factory):
    """An own cache of the data, and one thread, with which results are the same bits each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        patch.setenv("HF_DATASETS_CACHE", str(cache))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny_recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe") / "tiny.yaml", TINY)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_recipe):
    """Folder, results, and the splits evaluated, of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    evaluated = []
    with pytest.MonkeyPatch.context() as patch:
        evaluate, predict = Trainer.evaluate, Trainer.predict

        def recorded_evaluate(self, *args, **kwargs):
            evaluated.append("eval")
            return evaluate(self, *args, **kwargs)

        def recorded_predict(self, *args, **kwargs):
            evaluated.append("test")
            return predict(self, *args, **kwargs)

        patch.setattr(Trainer, "evaluate", recorded_evaluate)
        patch.setattr(Trainer, "predict", recorded_predict)
        results = run_recipe(load_recipe(tiny_recipe), folder)
    return folder, results, evaluated


def assert_same_tensors(first, second):
    first, second = load_file(first), load_file(second)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


# A run


def test_a_run_leaves_a_model_that_gives_its_results(finished, tiny_recipe):
    folder, results, _ = finished
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    recipe = load_recipe(tiny_recipe)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {digit: str(digit) for digit in range(10)}
    assert (tokenizer.model_max_length, model.config.pad_token_id) == (16, tokenizer.pad_token_id)
    assert results["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    for split in ("validation", "test"):
        rows = load_task_data(recipe)[split]
        inputs = tokenizer(list(rows["text"]), padding=True, return_tensors="pt")
        labels = torch.tensor(list(rows["label"]))
        with torch.no_grad():
            output = model(**inputs, labels=labels)
        assert results[split]["num_examples"] == len(rows)
        assert results[split]["accuracy"] == pytest.approx((output.logits.argmax(-1) == labels).float().mean().item())
        assert results[split]["loss"] == pytest.approx(output.loss.item(), rel=1e-5)


def test_the_best_checkpoint_by_validation_is_kept_and_test_is_touched_once(finished):
    folder, results, evaluated = finished
    accuracies = {entry["step"]: entry["eval_accuracy"] for entry in results["curve"] if "eval_accuracy" in entry}
    assert list(accuracies) == [5, 10, 15, 20, 25, 30, 32]
    assert results["validation"]["accuracy"] == max(accuracies.values()) == accuracies[results["best_step"]]
    assert_same_tensors(folder / "model.safetensors", folder / f"checkpoint-{results['best_step']}/model.safetensors")
    assert evaluated.count("test") == 1
    assert evaluated[-1] == "test"


def test_results_say_where_they_come_from(finished):
    _, results, _ = finished
    assert results["recipe"] == TINY
    assert (results["name"], results["seed"], results["overrides"], results["steps"]) == ("tiny", 3, [], 32)
    assert results["environment"]["versions"].keys() >= {"python", "torch", "transformers", "datasets"}
    assert results["environment"].keys() == {"commit", "versions", "platform", "device", "threads"}
    assert {split: data["rows"] for split, data in results["data"].items()} == {
        "train": 96,
        "validation": 40,
        "test": 30,
    }
    assert len({data["sha256"] for data in results["data"].values()}) == 3
    assert results["baselines"].keys() == {"majority", "root_operator", "root_operator_and_direct_digits"}
    assert 0 < results["seconds_per_step"] < results["train_seconds"]
    assert results["memory"]["peak_rss_bytes"] > 50e6
    assert results["curve"][0].keys() >= {"loss", "learning_rate", "step", "seconds", "step_seconds"}


def test_summary_puts_the_baselines_beside_the_accuracy(finished):
    _, results, _ = finished
    line = summary(results)
    for value in (results["test"]["accuracy"], *results["baselines"].values()):
        assert f"{value:.4f}" in line


def test_no_pickle_and_no_path_beside_the_model(finished):
    folder, _, _ = finished
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "results.json", "run.json"} <= files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    for name in files:
        assert str(folder.parent).encode() not in (folder / name).read_bytes(), name


def test_predictions_are_those_of_the_saved_model_row_by_row(finished, tiny_recipe):
    folder, results, _ = finished
    model = HKTForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    test = load_task_data(load_recipe(tiny_recipe))["test"]
    with torch.no_grad():
        # One by one: no batch, no order.
        answers = [model(**tokenizer(text, return_tensors="pt")).logits.argmax().item() for text in test["text"]]
    saved = pq.read_table(folder / "predictions.parquet").to_pydict()
    assert saved == {"label": list(test["label"]), "prediction": answers}
    # Texts of several lengths, so that Trainer's own order is another one, and several answers.
    assert len(set(test["length"])) > 3 and len(set(answers)) > 1
    right = [answer == label for answer, label in zip(answers, test["label"], strict=True)]
    assert results["test"]["accuracy"] == sum(right) / len(right)
    assert results["test"]["by_length"]["1-32"]["support"] == 30


def test_a_finished_run_is_not_trained_again(finished, tiny_recipe, monkeypatch):
    folder, results, _ = finished
    monkeypatch.setattr(Trainer, "train", None)
    assert run_recipe(load_recipe(tiny_recipe), folder) == json.loads(json.dumps(results))


def test_a_folder_of_something_else_is_left_alone(finished, tiny_recipe, tmp_path):
    folder, _, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(ValueError, match=r"another recipe: model\.num_levels is None there and 1 here"):
        run_recipe(load_recipe(tiny_recipe, ["model.num_levels=1"]), folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before

    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and holds no run"):
        run_recipe(load_recipe(tiny_recipe), tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        run_recipe(load_recipe(tiny_recipe), tmp_path / "thesis.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_other_data_do_not_continue_a_run(finished, tiny_recipe, tmp_path):
    folder, _, _ = finished
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("results.json"))
    run_file = tmp_path / "run" / "run.json"
    run_file.write_text(run_file.read_text().replace('"rows": 96', '"rows": 97'))
    with pytest.raises(ValueError, match=r"another data: train\.rows is 97 there and 96 here"):
        run_recipe(load_recipe(tiny_recipe), tmp_path / "run")


def test_local_reviews_train_and_what_was_dropped_is_counted(tmp_path):
    def write(split, texts):
        rows = {"text": texts, "label": [index % 2 for index in range(len(texts))]}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{split}.parquet")

    reviews = [f"{'good' if index % 2 else 'bad'} film, number {index}" for index in range(40)]
    test = [f"test review {index}" for index in range(9)]
    write("train", [*reviews, reviews[0], "again", reviews[0], test[3]])
    write("test", test)
    content = TINY | {
        "task": "imdb",
        "data": {"num_validation": 8, "seed": 0},
        "tokenizer": {"kind": "bytes", "max_length": 16, "truncation": True},
        "training": TINY["training"] | {"max_steps": 2},
    }
    recipe = load_recipe(write_recipe(tmp_path / "reviews.yaml", content))
    results = run_recipe(recipe, tmp_path / "run", tmp_path)
    assert results["data"]["dropped_from_train"] == {"in_test": 1, "contradictory": 0, "duplicate": 2}
    assert [results["data"][split]["rows"] for split in ("train", "validation", "test")] == [33, 8, 9]
    assert results["baselines"] == {"majority": pytest.approx(4 / 9)}
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["id2label"], config["vocab_size"]) == ({"0": "neg", "1": "pos"}, 261)


# Resuming


def test_a_run_killed_twice_ends_as_if_nothing_had_happened(finished, tiny_recipe, tmp_path):
    """
    Killed while it writes the checkpoint of step 20, in the second epoch, then after the last step, before the test.
    In between the folder moves.
    """
    undisturbed, expected, _ = finished
    assert run_killed("checkpoint", tiny_recipe, tmp_path / "first") == 20
    assert (tmp_path / "first/checkpoint-20/optimizer.pt").exists()
    assert not is_complete(tmp_path / "first/checkpoint-20")
    assert is_complete(tmp_path / "first/checkpoint-15")

    (tmp_path / "first").rename(tmp_path / "second")
    assert run_killed("test", tiny_recipe, tmp_path / "second") == 32 - 15
    assert is_complete(tmp_path / "second/checkpoint-32")
    assert not (tmp_path / "second/results.json").exists()

    results = run_recipe(load_recipe(tiny_recipe), tmp_path / "second")
    assert_same_tensors(
        tmp_path / "second/checkpoint-32/model.safetensors", undisturbed / "checkpoint-32/model.safetensors"
    )
    assert_same_tensors(tmp_path / "second/model.safetensors", undisturbed / "model.safetensors")
    for key in ("validation", "test", "best_step", "steps", "data", "baselines"):
        assert results[key] == expected[key], key
    curves = [
        [(entry["step"], entry["eval_loss"]) for entry in curve if "eval_loss" in entry]
        for curve in (results["curve"], expected["curve"])
    ]
    assert curves[0] == curves[1]
    seconds = [entry["seconds"] for entry in results["curve"]]
    assert seconds == sorted(seconds)


def run_killed(place, recipe, folder):
    """The number of steps it trained."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, place, str(recipe), str(folder)], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == -9, process.stderr
    return int(re.search(r"steps: (\d+)", process.stdout)[1])


def test_the_order_by_length_depends_on_seed_and_epoch_alone():
    sampler = LengthGroupedSampler(batch_size=4, lengths=[index % 7 for index in range(100)])

    def order(epoch, seed=0, data_seed=None):
        torch.rand(1)  # what dropout does to the global state
        SeededOrderCallback().on_epoch_begin(
            TrainingArguments(seed=seed, data_seed=data_seed, per_device_train_batch_size=4),
            SimpleNamespace(epoch=epoch),
            None,
            train_dataloader=DataLoader(range(100), batch_size=4, sampler=sampler),
        )
        return list(sampler)

    # A run that resumes within epoch 1 says 1.5 where an undisturbed one says 1.0.
    assert order(0) == order(0)
    assert order(1.0) == order(1.5)
    assert sorted(order(0)) == list(range(100))
    assert len({tuple(order(0)), tuple(order(1)), tuple(order(0, seed=9))}) == 3
    assert order(0, seed=9, data_seed=0) == order(0)


def test_a_streaming_dataset_trains(tiny_recipe, tmp_path):
    recipe = load_recipe(tiny_recipe)
    tokenizer = TOKENIZERS["listops"](model_max_length=16)
    rows = load_task_data(recipe)["train"]
    seen = []

    def encode(row):
        seen.append(row["text"])
        return tokenizer(row["text"]) | {"labels": row["label"]}

    set_seed(0)
    model = HKTForSequenceClassification(
        HKTConfig(**recipe.model, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=10)
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=8,
            logging_steps=1,
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=rows.to_iterable_dataset().map(encode, remove_columns=rows.column_names),
        processing_class=tokenizer,
        callbacks=[SeededOrderCallback()],
    )
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    trainer.train()
    assert all(entry["loss"] > 0 for entry in trainer.state.log_history[:3])
    # Nothing was read ahead of what the steps and the loader's next batch need, and every weight has learnt.
    assert seen == rows["text"][: len(seen)] and 24 <= len(seen) <= 40
    assert not [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "trainer_state.json").unlink(),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "optimizer.pt").unlink(),
        lambda folder: (folder / "scheduler.pt").unlink(),
        lambda folder: (folder / "rng_state.pth").unlink(),
        lambda folder: cut_in_half(folder / "trainer_state.json"),
        lambda folder: cut_in_half(folder / "model.safetensors"),
        lambda folder: cut_in_half(folder / "optimizer.pt"),
        lambda folder: cut_in_half(folder / "rng_state.pth"),
    ],
)
def test_an_incomplete_checkpoint_is_recognised_and_removed(finished, tmp_path, damage):
    folder, results, _ = finished
    best, last = f"checkpoint-{results['best_step']}", "checkpoint-32"
    for name in (best, last):
        shutil.copytree(folder / name, tmp_path / name)
    assert newest_checkpoint(tmp_path) == tmp_path / last
    damage(tmp_path / last)
    assert newest_checkpoint(tmp_path) == tmp_path / best
    assert not (tmp_path / last).exists()


def cut_in_half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


# Learning


def test_accumulated_batches_equal_one_batch(tiny_recipe, tmp_path):
    """SGD, because Adam turns the sign of a gradient near zero, which rounding decides, into a whole step."""
    common = ["training.optim=sgd", "training.learning_rate=0.5", "training.max_steps=4", "training.logging_steps=1"]
    common += ["model.hidden_dropout=0", "model.attention_dropout=0"]
    losses = []
    for batch, accumulation in ((8, 1), (1, 8)):
        overrides = [
            f"training.per_device_train_batch_size={batch}",
            f"training.gradient_accumulation_steps={accumulation}",
        ]
        results = run_recipe(load_recipe(tiny_recipe, common + overrides), tmp_path / str(batch))
        losses.append([entry["loss"] for entry in results["curve"] if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    first, second = (load_file(tmp_path / name / "checkpoint-4/model.safetensors") for name in ("8", "1"))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-4, atol=1e-6, msg=name)


def test_hkt_learns_which_token_is_in_the_majority():
    set_seed(0)
    config = HKTConfig(
        vocab_size=4,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        max_position_embeddings=15,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = HKTForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def draw(rows):
        labels = torch.randint(3, (rows,))
        weights = torch.ones(rows, 3).scatter(1, labels[:, None], 2.0)
        tokens = torch.multinomial(weights, 15, replacement=True)
        counts = torch.nn.functional.one_hot(tokens, 3).sum(1)
        return tokens + 1, counts.argmax(1), counts

    model.train()
    for _ in range(150):
        tokens, labels, _ = draw(64)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
    model.eval()
    tokens, labels, counts = draw(1000)
    decided = counts.topk(2).values.diff().squeeze(1) != 0
    with torch.no_grad():
        predicted = model(input_ids=tokens).logits.argmax(-1)
    assert (predicted == labels)[decided].float().mean() > 0.95


# Tokenizing


def test_texts_that_are_empty_or_too_long_are_refused_unless_cut():
    tokenizer = TOKENIZERS["bytes"](model_max_length=4)

    def data(*texts):
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": texts, "label": [0] * len(texts)})})

    with pytest.raises(ValueError, match=r"train, row 1: the text has 5 tokens and `tokenizer\.max_length` is 4"):
        tokenize(data("abcd", "abcde"), tokenizer, truncation=False)
    with pytest.raises(ValueError, match="train, row 1: the text has no token"):
        tokenize(data("abcd", ""), tokenizer, truncation=True)
    with pytest.raises(ValueError, match="train has no rows"):
        tokenize(data(), tokenizer, truncation=True)
    encoded = tokenize(data("abcd", "abcde"), tokenizer, truncation=True)["train"]
    assert encoded.column_names == ["label", "input_ids"]
    assert encoded["input_ids"][0] == encoded["input_ids"][1] == tokenizer("abcd")["input_ids"]


def test_majority_baseline():
    train, test = {"label": [1, 1, 0]}, {"label": [1, 0, 0, 0]}
    assert majority_baseline(train, test) == {"majority": 0.25}


# The command line


@pytest.mark.parametrize("tracker", ["tensorboard", "trackio"])
def test_a_tracker_gets_the_curve_offline(tracker, tiny_recipe, tmp_path):
    # In a process of its own: trackio reads its folder from the environment when it is imported.
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    short = ["--override", "training.max_steps=10", "training.save_steps=10"]
    command = [sys.executable, ROOT / "scripts" / "train.py", tiny_recipe, "--output-dir", tmp_path / "run", *short]
    subprocess.run([*map(str, command), "--track", tracker], env=environment, check=True, capture_output=True)

    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    # A run that is tracked is no other run than one that is not.
    assert results["recipe"] == load_recipe(tiny_recipe, short[1:]).sections()
    expected = [entry["eval_accuracy"] for entry in results["curve"] if "eval_accuracy" in entry]
    expected.append(results["validation"]["accuracy"])
    assert len(expected) == 3
    assert tracked(tracker, tmp_path, environment) == pytest.approx(expected)


def tracked(tracker, folder, environment):
    """The validation accuracies that a run in `folder` left with the tracker, as its own reader gives them."""
    if tracker == "tensorboard":
        values = []
        for file in sorted((folder / "run").glob("runs/*/events*")):
            events = EventAccumulator(str(file)).Reload()
            values += [event.value for event in events.Scalars("eval/accuracy")]
        return values
    metric = ["--project", "tiny", "--run", "run", "--metric", "eval/accuracy", "--json"]
    command = [sys.executable, "-m", "trackio.cli", "get", "metric", *metric]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return [value["value"] for value in json.loads(answer.stdout)["values"]]


def test_the_script_trains_and_prints_the_accuracy_with_the_baselines(finished, tiny_recipe, capsys):
    folder, results, _ = finished
    assert load_script("train").main([str(tiny_recipe), "--output-dir", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == summary(results)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["listops_dem"], r"error: there is no recipe 'listops_dem': .* listops_demo"),
        (["nowhere.yaml"], r"error: nowhere\.yaml: there is no such recipe file"),
        (["listops_demo", "--override", "model.num_levels=0"], r"error: .*num_levels.*0.*at least 1"),
        (
            ["listops_demo", "--override", "seed=1", "model.num_level=1"],
            r"error: --override model\.num_level=1: unknown",
        ),
        (["listops_demo", "--data-dir", "nowhere", "--output-dir", "unused"], r"error: .*listops has no files"),
        (["imdb_tiny", "--data-dir", "nowhere", "--output-dir", "unused"], r"error: .*nowhere"),
        (["listops_demo", "--track", "wandb"], r"error: `track` is 'wandb', which is not installed"),
    ],
)
def test_the_script_says_what_is_wrong_in_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_script("train").main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert re.match(message, captured.err)
    assert list(tmp_path.iterdir()) == []
