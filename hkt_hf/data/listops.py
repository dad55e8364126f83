"""ListOps as a dataset: drawn on the spot, the same everywhere, with the accuracies that need no hierarchy.

The grammar is that of the Long Range Arena (Tay et al. 2021), see `listops_grammar`. The length window, the order of
the splits and the baselines are ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from itertools import count
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock
from transformers.utils import logging

from ..tokenization_hkt import LISTOPS_TOKENS
from .listops_grammar import (
    DIGITS,
    MIN_ARGUMENTS,
    OPERATORS,
    TREES_PER_CHUNK,
    evaluate,
    generate_chunk,
    longest_expression,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


__all__ = ["LISTOPS_TOKENS", "evaluate", "listops_baselines", "load_listops"]

logger = logging.get_logger(__name__)

# Raise it whenever the same parameters give other data or another layout on disk.
FORMAT_VERSION = 1

# Drawing stops after this many trees in a row without a new expression: about ten seconds on one core.
PATIENCE_CHUNKS = 512

_MANIFEST = "manifest.json"


def load_listops(
    *,
    min_length: int = 257,
    max_length: int = 512,
    num_train: int,
    num_validation: int,
    num_test: int,
    seed: int = 0,
    max_depth: int = 10,
    cache_dir: str | os.PathLike | None = None,
    num_proc: int | None = None,
) -> DatasetDict:
    """Generate ListOps, or load it from the cache.

    The data depends on nothing but the lengths, the numbers of rows, `seed` and `max_depth`. No expression occurs
    twice, neither in a split nor in two of them. Test is taken first from the stream of expressions, then validation,
    then train: test does not depend on `num_train` and `num_validation`, validation not on `num_train`.

    Args:
        min_length, max_length: limits on the number of tokens without parentheses, both inclusive.
        max_depth: depth at which every node is a digit, the root being 1.
        cache_dir: folder for the cache, by default `hkt_hf` in the cache of `datasets`.
        num_proc: processes that generate, by default one per CPU. Does not affect the data. Where processes are spawned
            (macOS, Windows) a script that uses more than one needs the usual `if __name__ == "__main__":`.

    Returns:
        Splits train, validation and test with the columns `text` (no parentheses, single spaces), `label` (ClassLabel
        "0" to "9"), `length` and `depth` (int32; depth of the deepest node, the root being 1).

    Raises:
        ValueError: a parameter is of the wrong type or out of range, no expression has such a length, or there are too
            few different expressions to be found.
        RuntimeError: a generating process died.
    """
    sizes = {"test": num_test, "validation": num_validation, "train": num_train}
    for split, size in sizes.items():
        _check_integer(f"num_{split}", size, minimum=0)
    if sum(sizes.values()) == 0:
        raise ValueError("num_train, num_validation and num_test are all 0: ask for at least one expression")
    for name, value in (("min_length", min_length), ("max_length", max_length), ("max_depth", max_depth)):
        _check_integer(name, value, minimum=1)
    _check_integer("seed", seed)
    _check_lengths(min_length, max_length, max_depth)
    if num_proc is None:
        num_proc = os.cpu_count() or 1
    _check_integer("num_proc", num_proc, minimum=1)

    from datasets import config

    root = Path(config.HF_DATASETS_CACHE) / "hkt_hf" if cache_dir is None else Path(cache_dir).expanduser()
    folder = root / (
        f"listops-v{FORMAT_VERSION}-length{min_length}-{max_length}-depth{max_depth}-seed{seed}"
        f"-train{num_train}-validation{num_validation}-test{num_test}"
    )
    cached = _read_cache(folder)
    if cached is not None:
        return cached

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        # Another process, such as the next rank of a distributed run, may have built it while this one waited.
        cached = _read_cache(folder)
        if cached is not None:
            return cached
        if folder.exists():
            logger.warning(f"The ListOps cache {folder} is damaged and is built again.")
            _remove(folder)
        parameters = {"min_length": min_length, "max_length": max_length, "max_depth": max_depth, "seed": seed}
        rows = _unique_expressions(sum(sizes.values()), parameters, num_proc)
        _write_cache(_as_dataset_dict(rows, sizes), folder)
    dataset = _read_cache(folder)
    if dataset is None:
        raise RuntimeError(f"the ListOps cache {folder} cannot be read back: check the disk, or pass another cache_dir")
    return dataset


def listops_baselines(train: Dataset, test: Dataset) -> dict[str, float]:
    """Accuracy on `test` of three guesses fitted on `train` that look at nothing below the root. Ours.

    `majority` is the most frequent label, `root_operator` the most frequent one given the root operator, and
    `root_operator_and_direct_digits` the most frequent one given what stands directly under the root: its digits in any
    order and how many of its arguments are operators. That last key falls back to coarser ones where `train` has fewer
    than 10 examples: the operator applied to those digits alone, with and without the number of operators, then the
    operator.

    Args:
        train, test: datasets, or mappings of columns, with `text` (either notation) and `label` (0 to 9).

    Returns:
        The three accuracies, 0 to 1.

    Raises:
        ValueError: a column is missing, a dataset is empty, or a text does not begin with an operator or a digit.
    """
    train_roots, train_labels = _roots_and_labels("train", train)
    test_roots, test_labels = _roots_and_labels("test", test)
    return {
        name: _lookup_accuracy(
            [chain(root) for root in train_roots], train_labels, [chain(root) for root in test_roots], test_labels
        )
        for name, chain in _KEY_CHAINS.items()
    }


def _check_integer(name: str, value: Any, minimum: int | None = None) -> None:
    rule = "an integer" if minimum is None else f"an integer of at least {minimum}"
    if not isinstance(value, int) or isinstance(value, bool) or (minimum is not None and value < minimum):
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def _check_lengths(min_length: int, max_length: int, max_depth: int) -> None:
    if min_length > max_length:
        raise ValueError(f"min_length={min_length} is above max_length={max_length}: swap or widen them")
    # A digit alone has length 1, the shortest operator 4, and everything from there up to the longest exists.
    shortest_operator = 2 + MIN_ARGUMENTS
    longest = longest_expression(max_depth)
    if min_length > longest or (min_length > 1 and max_length < shortest_operator):
        lengths = "1" if longest == 1 else f"1 and {shortest_operator} to {longest}"
        raise ValueError(
            f"no expression has between min_length={min_length} and max_length={max_length} tokens: "
            f"with max_depth={max_depth} the lengths are {lengths}"
        )


def _unique_expressions(total: int, parameters: dict[str, int], num_proc: int) -> list[tuple[str, int, int, int]]:
    from datasets.utils import tqdm

    rows: list[tuple[str, int, int, int]] = []
    seen: set[str] = set()
    chunks_drawn = chunks_without_new = 0
    with closing(_chunks(parameters, num_proc)) as chunks, tqdm(total=total, desc="Generating ListOps") as progress:
        while len(rows) < total:
            if chunks_without_new == PATIENCE_CHUNKS:
                limits = ", ".join(f"{name}={parameters[name]}" for name in ("min_length", "max_length", "max_depth"))
                raise ValueError(
                    f"found only {len(rows)} of {total} different expressions with {limits} in "
                    f"{chunks_drawn * TREES_PER_CHUNK:,} trees, none of them in the last "
                    f"{PATIENCE_CHUNKS * TREES_PER_CHUNK:,}: ask for fewer or widen the limits"
                )
            before = len(rows)
            for row in next(chunks):
                if len(rows) < total and row[0] not in seen:
                    seen.add(row[0])
                    rows.append(row)
            progress.update(len(rows) - before)
            chunks_drawn += 1
            chunks_without_new = 0 if len(rows) > before else chunks_without_new + 1
    return rows


def _chunks(parameters: dict[str, int], num_proc: int) -> Iterator[list[tuple[str, int, int, int]]]:
    """Chunks 0, 1, 2, ... in this order, without end, whatever the number of processes."""
    if num_proc == 1:
        yield from (generate_chunk(chunk, **parameters) for chunk in count())
        return
    # Other start methods import torch in every worker and demand a guarded main module. A forked worker is safe here:
    # it runs nothing but pure Python.
    context = get_context("fork" if sys.platform == "linux" else None)
    with ProcessPoolExecutor(num_proc, mp_context=context, initializer=_exit_with_parent) as pool:
        pending: deque = deque()
        try:
            for chunk in count():
                pending.append(pool.submit(generate_chunk, chunk, **parameters))
                if len(pending) == 4 * num_proc:
                    yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a process that generates ListOps died: out of memory, or the script that calls load_listops has no "
                "`if __name__ == '__main__':`; num_proc=1 needs neither"
            ) from error
        finally:
            for future in pending:
                future.cancel()


def _exit_with_parent() -> None:
    """End this worker as soon as its parent is killed: it would wait for work forever."""

    def watch() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _as_dataset_dict(rows: Sequence[tuple[str, int, int, int]], sizes: dict[str, int]) -> DatasetDict:
    """Cut `rows` into splits in the order of `sizes`."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features(
        text=Value("string"), label=ClassLabel(names=list(DIGITS)), length=Value("int32"), depth=Value("int32")
    )
    splits = {}
    start = 0
    for split, size in sizes.items():
        part = rows[start : start + size]
        columns = {name: [row[index] for row in part] for index, name in enumerate(features)}
        splits[split] = Dataset.from_dict(columns, features=features)
        start += size
    return DatasetDict({split: splits[split] for split in ("train", "validation", "test")})


def _write_cache(dataset: DatasetDict, folder: Path) -> None:
    """Write next to `folder` and rename at the end, so that `folder` is complete whenever it exists."""
    incomplete = folder.with_name(folder.name + ".incomplete")
    # The caller holds the lock, so what is there was left by a process that was killed.
    _remove(incomplete)
    try:
        # By default an empty split gets no file at all, which `datasets` then fails to load.
        dataset.save_to_disk(incomplete, num_shards=dict.fromkeys(dataset, 1))
        files = [path for path in sorted(incomplete.rglob("*")) if path.is_file()]
        manifest = {path.relative_to(incomplete).as_posix(): _digest(path) for path in files}
        (incomplete / _MANIFEST).write_text(json.dumps(manifest, indent=2))
        incomplete.rename(folder)
    finally:
        _remove(incomplete)


def _read_cache(folder: Path) -> DatasetDict | None:
    """The cached dataset, or None if it is missing or not what was written."""
    from datasets import DatasetDict

    try:
        # Arrow files are mapped into memory unread: without the digests a damaged one would show late or never. Files
        # that the manifest does not know are none of our business: Dataset.map() leaves its own cache beside the data.
        manifest = json.loads((folder / _MANIFEST).read_text())
        if any(_digest(folder / path) != digest for path, digest in manifest.items()):
            return None
        return DatasetDict.load_from_disk(str(folder))
    except (OSError, ValueError, AttributeError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Root operator, direct digits in ascending order, number of arguments that are operators.
_Root = tuple[str, tuple[int, ...], int]


def _direct_digits_keys(root: _Root) -> tuple[Hashable, ...]:
    operator, digits, subtrees = root
    value = OPERATORS[operator](list(digits)) if operator in OPERATORS and digits else None
    return root, (operator, value, subtrees), (operator, value), operator, None


# For each baseline the keys to look up, the most specific first, ending in the one that always matches.
_KEY_CHAINS = {
    "majority": lambda root: (None,),
    "root_operator": lambda root: (root[0], None),
    "root_operator_and_direct_digits": _direct_digits_keys,
}

# From 5 to 20 the accuracy hardly changes; at 1 rare keys answer at random.
_MIN_EXAMPLES = 10

_NESTING = np.zeros(256, dtype=np.int32)
_NESTING[ord("[")] = 1
_NESTING[ord("]")] = -1
_IS_DIGIT = np.zeros(256, dtype=bool)
_IS_DIGIT[ord("0") : ord("9") + 1] = True


def _roots_and_labels(name: str, dataset: Dataset | Mapping[str, Sequence]) -> tuple[list[_Root], list[int]]:
    columns = getattr(dataset, "column_names", None) or list(dataset)
    missing = [column for column in ("text", "label") if column not in columns]
    if missing:
        raise ValueError(f"{name} needs the columns 'text' and 'label', {missing} missing from {columns}")
    labels = [int(label) for label in dataset["label"]]
    if not labels:
        raise ValueError(f"{name} is empty: the baselines need at least one expression in it")
    return [_root(text) for text in dataset["text"]], labels


def _root(text: str) -> _Root:
    characters = np.frombuffer(text.encode(), dtype=np.uint8)
    nesting = np.cumsum(_NESTING[characters])
    digits = np.sort(characters[(nesting == 1) & _IS_DIGIT[characters]]) - ord("0")
    subtrees = np.count_nonzero((nesting == 2) & (characters == ord("[")))
    root = text.lstrip("( \t\n").split(maxsplit=1)[:1]
    if not root or (root[0] not in OPERATORS and root[0] not in DIGITS):
        raise ValueError(f"a ListOps expression begins with an operator or a digit, got {text[:40]!r}")
    return root[0], tuple(digits.tolist()), subtrees


def _lookup_accuracy(
    train_keys: Sequence[tuple[Hashable, ...]],
    train_labels: Sequence[int],
    test_keys: Sequence[tuple[Hashable, ...]],
    test_labels: Sequence[int],
) -> float:
    counts: defaultdict[tuple[int, Hashable], Counter[int]] = defaultdict(Counter)
    for keys, label in zip(train_keys, train_labels, strict=True):
        for level, key in enumerate(keys):
            counts[level, key][label] += 1
    # Ties go to the smallest label, so that the order of the rows does not matter.
    answers = {
        key: min(labels, key=lambda label: (-labels[label], label))
        for key, labels in counts.items()
        if labels.total() >= _MIN_EXAMPLES
    }
    fallback = Counter(train_labels)
    majority = min(fallback, key=lambda label: (-fallback[label], label))
    correct = 0
    for keys, label in zip(test_keys, test_labels, strict=True):
        known = (answers[level, key] for level, key in enumerate(keys) if (level, key) in answers)
        correct += next(known, majority) == label
    return correct / len(test_labels)
