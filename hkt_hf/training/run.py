"""
From a recipe to a trained model and its results: data -> tokens -> model -> Trainer -> best checkpoint -> test, once.

The output folder of a run:

    run.json          which recipe and data the folder belongs to; written before training
    checkpoint-*/     Trainer's checkpoints, from which a killed run goes on
    config.json, model.safetensors, tokenizer files    the best model by validation accuracy
    predictions.parquet    the answers of that model on test, row by row: label and prediction
    results.json      written last: a run that has it is finished
"""

import json
import logging
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from filelock import FileLock, Timeout
from pyarrow.compute import list_value_length
from safetensors.torch import load_model
from sklearn.metrics import accuracy_score
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerState,
    set_seed,
)

from ..configuration_hkt import HKTConfig
from ..modeling_hkt import HKTForSequenceClassification
from .callbacks import SeededOrderCallback, TimeCallback
from .checkpoints import STATE_FILE, WEIGHTS_FILE, best_checkpoint, newest_checkpoint, write_json
from .evaluation import evaluate_answers
from .provenance import data_fingerprints, environment, peak_memory
from .recipe import Recipe
from .tasks import TASKS, TOKENIZERS, selects_on_test

logger = logging.getLogger(__name__)

RUN_FILE = "run.json"
# The system lets go of it when a process ends, however it ends.
LOCK_FILE = ".lock"
RESULTS_FILE = "results.json"
PREDICTIONS_FILE = "predictions.parquet"


def run_recipe(
    recipe: Recipe, output_dir: str | Path, data_dir: str | Path | None = None, track: str | None = None
) -> dict[str, Any]:
    """
    Trains, evaluates and saves what `recipe` says, or goes on with it.

    A run that was killed goes on from its newest complete checkpoint and ends with the weights, bit for bit, of a run
    that was not (on the same machine, with as many threads). A finished run is not trained again.

    Args:
        recipe: from `load_recipe`.
        output_dir: a new or empty folder, or that of an earlier run of the same recipe.
        data_dir: local folder of the data, for the tasks that have files.
        track: a tracker known to Trainer that gets the curve too, e.g. "trackio" or "tensorboard". Both work offline.

    Returns:
        The content of results.json.

    Raises:
        ValueError: the folder holds something else; the data are malformed or not those that the run began with; a text
            has no token, or more than the recipe allows; the tracker is not installed.
        OSError: the data are not there (FileNotFoundError for a local folder, ConnectionError for the Hub).
    """
    output_dir = Path(output_dir).resolve()
    if (results := _finished_results(recipe, output_dir)) is not None:
        logger.warning("%s holds this run already, finished: it is not trained again.", output_dir)
        return results

    arguments = recipe.training_arguments(output_dir, track)
    datasets = load_task_data(recipe, data_dir)
    task = TASKS[recipe.task]
    data = data_fingerprints(datasets) | (task.facts(data_dir) if task.facts else {})
    tokenizer = TOKENIZERS[recipe.tokenizer["kind"]](model_max_length=recipe.tokenizer["max_length"])
    encoded = tokenize(datasets, tokenizer, truncation=recipe.tokenizer["truncation"])
    # The weights are drawn here, before Trainer sets the same seed again.
    set_seed(recipe.seed)
    model = HKTForSequenceClassification(model_config(recipe, tokenizer, datasets["train"]))
    # Not before: a folder is not lost to a recipe that cannot be run.
    with arguments.main_process_first(local=False):
        if arguments.process_index == 0:
            lock = _claim(output_dir, {"recipe": recipe.sections(), "data": data})
        checkpoint = newest_checkpoint(output_dir)
    if (results := _finished_results(recipe, output_dir)) is not None:
        # By the process that was waited for.
        return results
    trainer = Trainer(
        model=model,
        args=arguments,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=encoded["train"],
        eval_dataset=encoded["validation"],
        processing_class=tokenizer,
        compute_metrics=compute_accuracy,
        callbacks=[SeededOrderCallback(), TimeCallback()],
    )
    state = _train(trainer, checkpoint)
    curve = list(state.log_history)
    validation = _validation(trainer, encoded["validation"])
    names = datasets["test"].features["label"].names
    answers, loss = predict(trainer, encoded["test"])
    labels = np.asarray(datasets["test"]["label"])
    test = evaluate_answers(labels, answers, names, task.groups(datasets["test"])) | {"loss": loss}

    results = {
        "name": recipe.name,
        "recipe": recipe.sections(),
        "overrides": list(recipe.overrides),
        "seed": recipe.seed,
        "parameters": model.num_parameters(),
        "environment": environment(),
        "data": data,
        "steps": state.global_step,
        "best_step": state.best_global_step,
        "train_seconds": max((entry["seconds"] for entry in curve), default=None),
        "seconds_per_step": _median([entry["step_seconds"] for entry in curve if "step_seconds" in entry]),
        "memory": peak_memory(),
        "curve": curve,
        "validation": validation,
        "test": test,
        "baselines": task.baselines(datasets["train"], datasets["test"]),
    }
    # All processes: each may hold a part of the weights.
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        # Not trainer.save_model: it adds a pickle of the training arguments, paths included.
        model.save_pretrained(output_dir, state_dict=weights)
        tokenizer.save_pretrained(output_dir)
        # The smallest integers that hold the classes.
        columns = {"label": labels.astype(np.min_scalar_type(len(names))), "prediction": answers}
        pq.write_table(pa.table(columns), output_dir / PREDICTIONS_FILE)
        write_json(output_dir / RESULTS_FILE, results)
        lock.release()
    return results


def load_task_data(recipe: Recipe, data_dir: str | Path | None = None) -> DatasetDict:
    """Train, validation and test of the recipe's task, with the columns `text` and `label`."""
    task = TASKS[recipe.task]
    if not task.takes_data_dir:
        if data_dir is not None:
            raise ValueError(f"data_dir is {str(data_dir)!r}, but {recipe.task} has no files: leave it out.")
        return task.load(**recipe.data)
    try:
        return task.load(data_dir, **recipe.data)
    except ConnectionError as error:
        raise ConnectionError(f"{error}; a local folder of the data (--data-dir) needs no Hub.") from error


def tokenize(datasets: DatasetDict, tokenizer: PreTrainedTokenizerBase, *, truncation: bool) -> DatasetDict:
    """
    Texts to `input_ids`, cut at the tokenizer's `model_max_length` if `truncation`; `label` stays.

    The attention mask is left to the collator: before padding it is all ones.

    Raises:
        ValueError: a split has no rows, or a text has no token, or is too long and may not be cut.
    """

    def encode(batch: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(batch["text"], truncation=truncation, return_attention_mask=False, verbose=False)
        return {"input_ids": tokens["input_ids"]}

    encoded = DatasetDict()
    for split, dataset in datasets.items():
        if len(dataset) == 0:
            raise ValueError(f"{split} has no rows: a run needs some to train, to select a model and to test it.")
        dropped = [column for column in dataset.column_names if column != "label"]
        encoded[split] = dataset.map(encode, batched=True, remove_columns=dropped, desc=f"Tokenizing {split}")
        lengths = list_value_length(encoded[split].data.column("input_ids")).to_numpy()
        if lengths.min() < 1:
            raise ValueError(f"{split}, row {lengths.argmin()}: the text has no token; leave empty texts out.")
        if lengths.max() > tokenizer.model_max_length:
            raise ValueError(
                f"{split}, row {lengths.argmax()}: the text has {lengths.max()} tokens and `tokenizer.max_length` is "
                f"{tokenizer.model_max_length}; raise that, or set `tokenizer.truncation` to cut long texts."
            )
    return encoded


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Dataset) -> HKTConfig:
    """The recipe's model with what the tokenizer and the labels decide."""
    names = train.features["label"].names
    return HKTConfig(
        **recipe.model,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
        problem_type="single_label_classification",
    )


def predict(trainer: Trainer, dataset: Dataset) -> tuple[np.ndarray, float]:
    """
    The classes [N] that the model gives to the rows of a dataset, in their order, and the loss.

    Trainer orders what it evaluates like what it trains on, and answers in that order. Sorted by length and taken one
    after the other, the rows are as cheap as grouped ones, and the order is known.
    """
    order = np.argsort([-len(tokens) for tokens in dataset["input_ids"]], kind="stable")
    strategy, trainer.args.train_sampling_strategy = trainer.args.train_sampling_strategy, "sequential"
    try:
        output = trainer.predict(dataset.select(order))
    finally:
        trainer.args.train_sampling_strategy = strategy
    answers = np.empty(len(dataset), dtype=np.min_scalar_type(output.predictions.shape[1]))
    answers[order] = np.argmax(output.predictions, axis=-1)
    return answers, output.metrics["test_loss"]


def compute_accuracy(predictions: EvalPrediction) -> dict[str, float]:
    """For Trainer. scikit-learn's accuracy, because evaluate.load fetches a script from the Hub."""
    return {"accuracy": accuracy_score(predictions.label_ids, np.argmax(predictions.predictions, axis=-1))}


def summary(results: dict[str, Any]) -> str:
    """One line: the accuracies, and beside them those that need no model."""
    trivial = ", ".join(f"{name.replace('_', ' ')} {accuracy:.4f}" for name, accuracy in results["baselines"].items())
    selected = "selected on test itself" if selects_on_test(results["recipe"]) else "validation"
    return (
        f"{results['name']}: test accuracy {results['test']['accuracy']:.4f} "
        f"({selected} {results['validation']['accuracy']:.4f}; without a model: {trivial})"
    )


def _finished_results(recipe: Recipe, output_dir: Path) -> dict[str, Any] | None:
    """The results in `output_dir` if the run is finished; ValueError if the folder is not this run's."""
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(f"{output_dir} is a file: choose another output folder.")
    if (output_dir / RUN_FILE).is_file():
        _check_same_run(output_dir, "recipe", recipe.sections())
    elif output_dir.is_dir() and any(not path.name.startswith(".") for path in output_dir.iterdir()):
        raise ValueError(f"{output_dir} is not empty and holds no run: choose another output folder.")
    if not (output_dir / RESULTS_FILE).is_file():
        return None
    return json.loads((output_dir / RESULTS_FILE).read_text(encoding="utf-8"))


def _claim(output_dir: Path, run: dict[str, Any]) -> FileLock:
    """
    Says in `output_dir` whose it is, or checks that it is this run's, and keeps other processes out of it.

    A sweep that is killed leaves its runs behind, and the same command would start them twice.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output_dir / LOCK_FILE)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logger.warning("Another process trains this run, in %s: waiting for it.", output_dir)
        lock.acquire()
    if (output_dir / RUN_FILE).is_file():
        _check_same_run(output_dir, "data", run["data"])
    else:
        write_json(output_dir / RUN_FILE, run)
    return lock


def _check_same_run(output_dir: Path, part: str, expected: dict[str, Any]) -> None:
    found = _flatten(json.loads((output_dir / RUN_FILE).read_text(encoding="utf-8"))[part])
    expected = _flatten(expected)
    differences = [
        f"{key} is {found.get(key)!r} there and {expected.get(key)!r} here"
        for key in sorted({*found, *expected})
        if found.get(key) != expected.get(key)
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ValueError(
            f"{output_dir} holds a run with another {part}: {'; '.join(differences[:3])}{more}. "
            "Nothing was changed; choose another output folder."
        )


def _train(trainer: Trainer, checkpoint: Path | None) -> TrainerState:
    """Trains from the checkpoint, or from the start; leaves the best weights in the model."""
    if checkpoint is not None:
        state = TrainerState.load_from_json(str(checkpoint / STATE_FILE))
        if state.global_step >= state.max_steps:
            # Killed after the last step. Trainer would train one step more where that step did not end an epoch.
            best = best_checkpoint(state, checkpoint.parent) if trainer.args.load_best_model_at_end else None
            load_model(trainer.model, (best or checkpoint) / WEIGHTS_FILE)
            return state
        logger.warning("Going on from %s.", checkpoint)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer.state


def _validation(trainer: Trainer, dataset: Dataset) -> dict[str, Any]:
    metrics = trainer.evaluate(dataset)
    return {"accuracy": metrics["eval_accuracy"], "loss": metrics["eval_loss"], "num_examples": len(dataset)}


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in nested.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
