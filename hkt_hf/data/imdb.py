"""IMDB reviews (Maas et al. 2011): sentiment of a film review, positive or negative.

From the Hub (`stanfordnlp/imdb`) or from a local folder of the same parquet files. The published splits overlap: 96
rows of train repeat another one, and 123 texts of train are in test too. They are dropped from train, before validation
is split off, so that no text is in two splits. Test is never changed (199 of its rows repeat another one), so that
accuracies stay comparable to published ones. The protocol (a validation split, what is dropped) is ours; the paper's is
not known.
"""

import logging
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from .files import check_columns, check_labels, read_tables, refuse_rows, split_off_validation

logger = logging.getLogger(__name__)

HUB_NAME = "stanfordnlp/imdb"
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})


def load_imdb(
    data_dir: str | Path | None = None,
    *,
    num_validation: int = 2500,
    seed: int = 0,
    protocol: Literal["held_out", "long_range_arena"] = "held_out",
) -> DatasetDict:
    """Load train, validation and test, each with the columns `text` and `label` (0 = neg, 1 = pos).

    Train and validation are shuffled (the files are sorted by label) and have the same share of each label. What was
    dropped from train is logged; `read_imdb` and `remove_leaked_texts` are the two steps, for whoever needs the counts.

    Args:
        data_dir: a folder with `train.parquet` and `test.parquet`, or with shards named as on the Hub
            (`train-00000-of-00001.parquet`). The Hub's `stanfordnlp/imdb` by default.
        num_validation: reviews moved from train to validation; of no effect in the Long Range Arena's protocol.
        seed: of the split and of the order. The same seed gives the same splits on every machine.
        protocol: "held_out" selects the model on reviews of train. "long_range_arena" does what the code of the Long
            Range Arena does: it selects it on test, so that its accuracies are too high by an unknown amount, and
            trains on all of train.

    Raises:
        FileNotFoundError: `data_dir` or a file in it is missing.
        ValueError: a file is unreadable or lacks a column, a label is not 0 or 1, a text is missing or empty,
            `num_validation` does not leave reviews of both labels in train and in validation, or there is no such
            protocol.
        ConnectionError: from `datasets`, when the Hub cannot be reached and the data are not in its cache.
    """
    if protocol not in ("held_out", "long_range_arena"):
        raise ValueError(f"protocol is {protocol!r}: it must be 'held_out' or 'long_range_arena'")
    original = read_imdb(data_dir)
    train, counts = remove_leaked_texts(original["train"], original["test"])
    if any(counts.values()):
        logger.warning(
            "IMDB: of %d train reviews, dropped %d that repeat another one, %d that occur with both labels and %d that "
            "are in test; %d remain",
            len(original["train"]),
            counts["duplicate"],
            counts["contradictory"],
            counts["in_test"],
            len(train),
        )
    test = original["test"]
    if protocol == "long_range_arena":
        return DatasetDict({"train": train.shuffle(seed=seed), "validation": test, "test": test})
    return split_off_validation(train, test, num_validation, seed)


def read_imdb(data_dir: str | Path | None = None) -> DatasetDict:
    """The published train and test, checked and otherwise unchanged. Arguments and errors: see `load_imdb`."""
    tables = read_tables(HUB_NAME, data_dir)
    return DatasetDict({split: _checked(table, where) for split, (table, where) in tables.items()})


def remove_leaked_texts(train: Dataset, test: Dataset) -> tuple[Dataset, dict[str, int]]:
    """Drop from train what is there twice and what is in test too. Texts are compared exactly.

    Of copies with equal labels, the first stays. Of copies that contradict each other none does, since nothing tells
    which label is right.

    Returns:
        The train that remains, in its order, and the numbers of dropped rows: `in_test` (every copy), `contradictory`
        (every copy), `duplicate` (all copies but the first). A row is counted once, under the first that applies.
    """
    texts = train["text"][:]
    labels_of_text: dict[str, set[int]] = {}
    for text, label in zip(texts, train["label"], strict=True):
        labels_of_text.setdefault(text, set()).add(label)
    test_texts = set(test["text"])

    counts = {"in_test": 0, "contradictory": 0, "duplicate": 0}
    kept: dict[str, int] = {}
    for row, text in enumerate(texts):
        if text in test_texts:
            counts["in_test"] += 1
        elif len(labels_of_text[text]) > 1:
            counts["contradictory"] += 1
        elif text in kept:
            counts["duplicate"] += 1
        else:
            kept[text] = row
    return train.select(list(kept.values())), counts


def _checked(table: pa.Table, where: str) -> Dataset:
    check_columns(table, list(FEATURES), where)
    text = table.column("text")
    if not (pa.types.is_string(text.type) or pa.types.is_large_string(text.type)):
        raise ValueError(f"{where}: the column 'text' has the type {text.type}; it must hold strings")
    refuse_rows(
        pc.fill_null(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(text)), 0), True),
        f"{where}: missing or empty text in",
        "remove these rows",
    )
    check_labels(
        table.column("label"),
        FEATURES["label"].names,
        where,
        "correct or remove these rows (the Hub's unsupervised reviews have the label -1)",
    )
    return Dataset(table.select(list(FEATURES)).cast(FEATURES.arrow_schema))
