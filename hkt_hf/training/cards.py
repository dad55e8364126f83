"""The model card of a run: generated from its results.json and a template, so that no figure is typed by hand."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .. import __version__
from .markdown import markdown_table, percent, percent_interval
from .publish import check_repo_id
from .run import RESULTS_FILE
from .tasks import selects_on_test

# Per task: what cards say about it.
TASKS = {
    "listops": {
        "title": "ListOps",
        "dataset": "listops-synthetic",
        "language": None,
        "input": "a nested expression of MIN, MAX, MED and SM over digits; the label is its value",
        "data": "Expressions drawn by the package (Long Range Arena grammar, seeded, no expression twice).",
        "limits": "A diagnostic task: the model computes nothing that a calculator does not compute better. It knows "
        "expressions of the lengths that it was trained on.",
        "example": 'classify("[MAX 2 9 [MIN 4 7 ] 0 ]")',
    },
    "imdb": {
        "title": "IMDB, characters",
        "dataset": "stanfordnlp/imdb",
        "language": "en",
        "input": "the first bytes of an English film review; the label is its sentiment",
        "data": "IMDB reviews (Maas et al. 2011) as bytes, longer ones cut.",
        "limits": "English film reviews of 2011 and before, no other text. Far weaker than any pretrained model: it is "
        "for comparing attention that is trained from scratch, not for decisions about texts or people.",
        "example": 'classify("One of the best films of the year.")',
    },
    "cifar10": {
        "title": "sequential CIFAR-10",
        "dataset": "uoft-cs/cifar10",
        "language": None,
        "input": "the 1,024 gray values of a 32 x 32 image in raster order; the label is what it shows",
        "data": "CIFAR-10 (Krizhevsky 2009) in gray, one token per pixel, not augmented.",
        "limits": "Images of 32 x 32 pixels of ten classes. Any model that sees two dimensions is far better: it is "
        "for comparing attention over long sequences.",
        "example": "# Any image of PIL; `pip install 'hkt-hf[train]'` brings what this needs.\n"
        "from hkt_hf.data.cifar10 import image_to_text\n"
        "from PIL import Image\n\n"
        'image = Image.new("L", (32, 32), 128)\n'
        "classify(image_to_text(image))",
    },
}


def write_card(folder: str | Path, repo_id: str, template: str | Path, revision: str = f"v{__version__}") -> ModelCard:
    """
    Writes README.md into the folder of a finished run, and returns the card.

    Args:
        folder: holds results.json.
        repo_id: `user/name` of the repository that the card will be in.
        template: Jinja template of the card, such as model_cards/template.md.
        revision: the tag that its examples load.

    Raises:
        ValueError: `repo_id` is malformed, or the folder holds no results of the kind that `run_recipe` writes.
    """
    check_repo_id(repo_id)
    path = Path(folder) / RESULTS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file: a card is made from the results of a finished run.")
    results = json.loads(path.read_text(encoding="utf-8"))
    if "interval" not in results.get("test", {}):
        raise ValueError(f"{path} has no test interval: it was written by an older version; run the recipe again.")
    recipe, test = results["recipe"], results["test"]
    task, name = TASKS[recipe["task"]], repo_id.rpartition("/")[2]
    data = ModelCardData(
        model_name=name,
        language=task["language"],
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["hkt", "hierarchical-kernel-transformer", "long-range", recipe["task"]],
        datasets=[task["dataset"]] if "/" in task["dataset"] else None,
        metrics=["accuracy"],
        eval_results=[
            EvalResult(
                task_type="text-classification",
                task_name="Sequence classification",
                dataset_type=task["dataset"],
                dataset_name=task["title"],
                dataset_split="test",
                metric_type="accuracy",
                metric_name="Accuracy",
                metric_value=round(test["accuracy"], 4),
            )
        ],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(template),
        # Not model_name, which ModelCardData keeps for its index of results.
        name=name,
        repo_id=repo_id,
        revision=revision,
        description=f"{_architecture(recipe['model'], results['parameters'])}, trained from scratch on "
        f"{task['title']}: {task['input']}.",
        example=_example(repo_id, revision, task["example"]),
        limits=f"{task['limits']} One seed ({results['seed']}): how much another seed would differ is not known from "
        "this card.",
        training=_training(results, task),
        results="\n".join(_results(results)),
        time=_time(results),
    )
    card.save(Path(folder) / "README.md")
    return card


def _architecture(model: dict[str, Any], parameters: int) -> str:
    if model["num_levels"] > 1:
        kind = f"A Hierarchical Kernel Transformer with {model['num_levels']} levels of stride {model['level_stride']}"
        kind += "" if model["hybrid"] else " and no convolution branch"
    else:
        kind = "Standard multi-head attention" + (" with a convolution branch" if model["hybrid"] else "")
        kind += ", a baseline of the Hierarchical Kernel Transformer"
    layers, width = model["num_hidden_layers"], model["hidden_size"]
    return f"{kind}: {layers} layers of width {width}, {parameters:,} parameters"


def _example(repo_id: str, revision: str, code: str) -> str:
    return (
        f'classify = pipeline("text-classification", "{repo_id}", revision="{revision}", trust_remote_code=False)\n'
        f"{code}"
    )


def _training(results: dict[str, Any], task: dict[str, Any]) -> str:
    recipe, data = results["recipe"], results["data"]
    rows = ", ".join(f"{data[split]['rows']:,} {split}" for split in ("train", "validation", "test"))
    dropped = data.get("dropped_from_train", {})
    reasons = [f"{count} ({reason.replace('_', ' ')})" for reason, count in dropped.items() if count]
    training = recipe["training"]
    overrides = [override for override in results["overrides"] if not override.startswith("seed=")]
    selected_on = "validation"
    if selects_on_test(recipe):
        selected_on = "test, as in the Long Range Arena's code: its accuracy there is too high by an unknown amount"
    lines = [
        f"{task['data']} Rows: {rows}." + (f" Dropped from train: {', '.join(reasons)}." if reasons else ""),
        f"Recipe `{results['name']}`"
        + (f" with `{' '.join(overrides)}`" if overrides else "")
        + f", seed {results['seed']}: {results['steps']:,} steps of {training['per_device_train_batch_size']} "
        f"sequences, AdamW, learning rate {training['learning_rate']}. The checkpoint of step "
        f"{results['best_step']:,} was the best on {selected_on}. All settings, the curve, versions and SHA-256 of the "
        "data: results.json.",
    ]
    if "note" in results:
        lines.append(results["note"])
    return "\n\n".join(lines)


def _results(results: dict[str, Any]) -> list[str]:
    test, validation = results["test"], results["validation"]
    rows = [
        ["this model", f"**{percent(test['accuracy'])}**", percent_interval(test["interval"])],
        *([f"without a model: {name.replace('_', ' ')}", percent(a), ""] for name, a in results["baselines"].items()),
        ["this model, validation", percent(validation["accuracy"]), ""],
    ]
    if selects_on_test(results["recipe"]):
        rows.pop()
    lines = markdown_table(["test", "accuracy, %", "95 %, bootstrap over the test set"], rows)
    if len(test["per_class"]) > 1:
        columns = ("precision", "recall", "f1")
        rows = [
            [name, *(percent(cell[column]) for column in columns), f"{cell['support']:,}"]
            for name, cell in test["per_class"].items()
        ]
        lines += ["", *markdown_table(["class", *columns, "rows"], rows)]
    for key in [key for key in test if key.startswith("by_")]:
        rows = [[group, percent(cell["accuracy"]), f"{cell['support']:,}"] for group, cell in test[key].items()]
        lines += ["", *markdown_table([key.removeprefix("by_"), "accuracy, %", "rows"], rows)]
    return lines


def _time(results: dict[str, Any]) -> str:
    environment = results["environment"]
    minutes, step = results["train_seconds"] / 60, 1000 * results["seconds_per_step"]
    memory = results["memory"]["peak_rss_bytes"] / 2**30
    return (
        f"Training took {minutes:.0f} minutes ({step:.0f} ms per step) on {environment['device']} with "
        f"{environment['threads']} thread(s), and {memory:.1f} GiB of memory at most. Energy and carbon were not "
        "measured."
    )
