"""What a recipe can name: the tasks, with their data and their trivial baselines, and the tokenizers."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from ..data.cifar10 import load_cifar10
from ..data.imdb import load_imdb, read_imdb, remove_leaked_texts
from ..data.listops import listops_baselines, load_listops
from ..tokenization_hkt import build_byte_tokenizer, build_listops_tokenizer, build_pixel_tokenizer
from .evaluation import length_groups


def majority_baseline(train: Dataset, test: Dataset) -> dict[str, float]:
    """Accuracy on `test` of always answering the most frequent label of `train`."""
    majority = Counter(train["label"]).most_common(1)[0][0]
    return {"majority": float(np.mean(np.asarray(test["label"]) == majority))}


def imdb_drops(data_dir: str | Path | None) -> dict[str, Any]:
    """How many reviews `load_imdb` drops from train, by reason."""
    original = read_imdb(data_dir)
    _, counts = remove_leaked_texts(original["train"], original["test"])
    return {"dropped_from_train": counts}


def selects_on_test(recipe: dict[str, Any]) -> bool:
    """Whether a run of these sections chose its checkpoint on test, as the Long Range Arena's code does for IMDB."""
    return recipe["data"].get("protocol") == "long_range_arena"


def listops_groups(test: Dataset) -> dict[str, list[str]]:
    return {
        "depth": [str(depth) for depth in test["depth"]],
        "length": length_groups(test["length"], [32, 64, 96, 128, 192, 256, 320, 384, 448, 512]),
    }


def imdb_groups(test: Dataset) -> dict[str, list[str]]:
    return {"length": length_groups([len(text.encode()) for text in test["text"]], [512, 1024, 2048, 4096])}


@dataclass(frozen=True)
class Task:
    """
    A task that a recipe can name.

    Attributes:
        load: returns train, validation and test with the columns `text` and `label` (a ClassLabel); its keyword
            arguments are the keys of the recipe's `data` section.
        baselines: from (train, test) to the accuracy on test of answers that need no model.
        takes_data_dir: whether `load` has files, so that its first argument is `data_dir`.
        facts: from `data_dir` to what else results should say about the data.
        groups: from test to the groups that results count the accuracy in: the name of a grouping to each row's group.
    """

    load: Callable[..., DatasetDict]
    baselines: Callable[[Dataset, Dataset], dict[str, float]]
    takes_data_dir: bool = False
    facts: Callable[..., dict[str, Any]] | None = None
    groups: Callable[[Dataset], dict[str, list[str]]] = lambda test: {}


TASKS: dict[str, Task] = {
    "listops": Task(load=load_listops, baselines=listops_baselines, groups=listops_groups),
    "imdb": Task(
        load=load_imdb, baselines=majority_baseline, takes_data_dir=True, facts=imdb_drops, groups=imdb_groups
    ),
    "cifar10": Task(load=load_cifar10, baselines=majority_baseline, takes_data_dir=True),
}

TOKENIZERS: dict[str, Callable[..., PreTrainedTokenizerBase]] = {
    "bytes": build_byte_tokenizer,
    "listops": build_listops_tokenizer,
    "pixels": build_pixel_tokenizer,
}
