"""IMDB reviews (Maas et al. 2011): sentiment of a film review, positive or negative.

From the Hub (`stanfordnlp/imdb`) or from a local folder of the same parquet files. The published splits overlap: 96
rows of train repeat another one, and 123 texts of train are in test too. They are dropped from train, before validation
is split off, so that no text is in two splits. Test is never changed (199 of its rows repeat another one), so that
accuracies stay comparable to published ones. The protocol (a validation split, what is dropped) is ours; the paper's is
not known.
"""

import logging
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value, load_dataset

logger = logging.getLogger(__name__)

HUB_NAME = "stanfordnlp/imdb"
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
NUM_LABELS = FEATURES["label"].num_classes

# In a folder: one file per split, or shards as on the Hub, there within a folder named after the configuration.
FILE_PATTERNS = ("{split}.parquet", "{split}-*.parquet", "plain_text/{split}-*.parquet")


def load_imdb(data_dir: str | Path | None = None, *, num_validation: int = 2500, seed: int = 0) -> DatasetDict:
    """Load train, validation and test, each with the columns `text` and `label` (0 = neg, 1 = pos).

    Train and validation are shuffled (the files are sorted by label) and have the same share of each label. What was
    dropped from train is logged; `read_imdb` and `remove_leaked_texts` are the two steps, for whoever needs the counts.

    Args:
        data_dir: a folder with `train.parquet` and `test.parquet`, or with shards named as on the Hub
            (`train-00000-of-00001.parquet`). The Hub's `stanfordnlp/imdb` by default.
        num_validation: reviews moved from train to validation.
        seed: of the split and of the order. The same seed gives the same splits on every machine.

    Raises:
        FileNotFoundError: `data_dir` or a file in it is missing.
        ValueError: a file is unreadable or lacks a column, a label is not 0 or 1, a text is missing or empty, or
            `num_validation` does not leave reviews of both labels in train and in validation.
        ConnectionError: from `datasets`, when the Hub cannot be reached and the data are not in its cache.
    """
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
    _check_num_validation(train, num_validation)
    split = train.train_test_split(test_size=num_validation, seed=seed, stratify_by_column="label")
    return DatasetDict({"train": split["train"], "validation": split["test"], "test": original["test"]})


def read_imdb(data_dir: str | Path | None = None) -> DatasetDict:
    """The published train and test, checked and otherwise unchanged. Arguments and errors: see `load_imdb`."""
    if data_dir is None:
        source = HUB_NAME
        loaded = load_dataset(HUB_NAME)
        # A query through the Arrow format applies selections; the table behind a dataset need not.
        tables = {name: loaded[name].with_format("arrow")[:] for name in ("train", "test")}
    else:
        source = Path(data_dir)
        tables = {name: _read_parquet(source, name) for name in ("train", "test")}
    return DatasetDict({name: _checked(table, f"{source}, {name}") for name, table in tables.items()})


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


def _read_parquet(folder: Path, split: str) -> pa.Table:
    how = f"get the files with `hf download {HUB_NAME} --repo-type dataset --local-dir {folder}`"
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"the IMDB folder {folder} {problem}; {how}, or leave data_dir out to use the Hub")
    for pattern in FILE_PATTERNS:
        if files := sorted(folder.glob(pattern.format(split=split))):
            break
    else:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise FileNotFoundError(
            f"no {split}.parquet or {split}-*.parquet in the IMDB folder {folder}, which holds {names}; {how}"
        )
    # A partial download would otherwise be a smaller data set, and not be noticed.
    if (shard := re.search(r"-of-(\d+)\.parquet$", files[0].name)) and len(files) != int(shard[1]):
        raise FileNotFoundError(f"{folder} has {len(files)} of {int(shard[1])} shards of {split}; {how}")
    tables = []
    for file in files:
        try:
            # One file at a time: given a folder or several files, pyarrow infers more columns from path names.
            tables.append(pq.ParquetFile(file).read())
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{file} cannot be read as parquet ({error}); {how}") from error
    try:
        return pa.concat_tables(tables, promote_options="none" if len(tables) == 1 else "default")
    except pa.ArrowException as error:
        raise ValueError(f"the shards of {split} in {folder} have different columns ({error}); {how}") from error


def _checked(table: pa.Table, where: str) -> Dataset:
    missing = [name for name in FEATURES if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{where}: no column {' and no column '.join(map(repr, missing))} among {table.column_names}; "
            "rename your columns to 'text' and 'label'"
        )
    if len(table) == 0:
        raise ValueError(f"{where}: there are no rows")
    text, label = table.column("text"), table.column("label")
    if not (pa.types.is_string(text.type) or pa.types.is_large_string(text.type)):
        raise ValueError(f"{where}: the column 'text' has the type {text.type}; it must hold strings")
    if not pa.types.is_integer(label.type):
        raise ValueError(f"{where}: the column 'label' has the type {label.type}; it must hold the integers 0 and 1")
    _refuse_rows(
        pc.fill_null(pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(text)), 0), True),
        f"{where}: missing or empty text in",
        "remove these rows",
    )
    _refuse_rows(
        pc.fill_null(pc.or_(pc.less(label, 0), pc.greater_equal(label, NUM_LABELS)), True),
        f"{where}: a label that is neither 0 (neg) nor 1 (pos) in",
        "correct or remove these rows (the Hub's unsupervised reviews have the label -1)",
    )
    return Dataset(table.select(list(FEATURES)).cast(FEATURES.arrow_schema))


def _refuse_rows(is_bad: pa.ChunkedArray, problem: str, remedy: str) -> None:
    rows = pc.indices_nonzero(is_bad).to_pylist()
    if rows:
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise ValueError(f"{problem} {len(rows)} row(s), counted from 0: {shown}; {remedy}")


def _check_num_validation(train: Dataset, num_validation: int) -> None:
    per_label = [train["label"][:].count(label) for label in range(NUM_LABELS)]
    if min(per_label) < 2:
        raise ValueError(
            f"train has {per_label[0]} negative and {per_label[1]} positive reviews; train and validation need at "
            "least one of each"
        )
    highest = len(train) - NUM_LABELS
    if not isinstance(num_validation, int) or not NUM_LABELS <= num_validation <= highest:
        raise ValueError(
            f"num_validation must be an integer from {NUM_LABELS} to {highest}, since train has {len(train)} reviews "
            f"and both splits need both labels; got {num_validation!r}"
        )
