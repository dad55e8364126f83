"""What the tasks with files share: reading parquet files from the Hub or a folder, refusing rows, splitting."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset

SPLITS = ("train", "test")
# In a folder: one file per split, or shards as on the Hub, there within a folder named after the configuration.
FILE_PATTERNS = ("{split}.parquet", "{split}-*.parquet", "plain_text/{split}-*.parquet")


def read_tables(hub_name: str, data_dir: str | Path | None) -> dict[str, tuple[pa.Table, str]]:
    """
    The published train and test, each with the words that say where it is from.

    Args:
        hub_name: repository of the dataset on the Hub.
        data_dir: a folder with `train.parquet` and `test.parquet`, or with shards named as on the Hub
            (`train-00000-of-00001.parquet`); None = the Hub.

    Raises:
        FileNotFoundError: `data_dir` or a file in it is missing.
        ValueError: a file is unreadable.
        ConnectionError: from `datasets`, when the Hub cannot be reached and the data are not in its cache.
    """
    if data_dir is not None:
        folder = Path(data_dir)
        return {split: (_read_parquet(folder, split, hub_name), f"{folder}, {split}") for split in SPLITS}
    loaded = load_dataset(hub_name)
    # A query through the Arrow format applies selections; the table behind a dataset need not.
    return {split: (loaded[split].with_format("arrow")[:], f"{hub_name}, {split}") for split in SPLITS}


def check_columns(table: pa.Table, names: list[str], where: str) -> None:
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise ValueError(
            f"{where}: no column {' and no column '.join(map(repr, missing))} among {table.column_names}; "
            f"rename your columns to {' and '.join(map(repr, names))}"
        )
    if len(table) == 0:
        raise ValueError(f"{where}: there are no rows")


def check_labels(label: pa.ChunkedArray, names: list[str], where: str, remedy: str) -> None:
    """Refuses what is not the number of one of these names."""
    if not pa.types.is_integer(label.type):
        raise ValueError(
            f"{where}: the column 'label' has the type {label.type}; it must hold the integers 0 to {len(names) - 1}"
        )
    refuse_rows(
        pc.fill_null(pc.or_(pc.less(label, 0), pc.greater_equal(label, len(names))), True),
        f"{where}: a label that is not in 0 ({names[0]}) to {len(names) - 1} ({names[-1]}) in",
        remedy,
    )


def refuse_rows(is_bad: pa.ChunkedArray, problem: str, remedy: str) -> None:
    rows = pc.indices_nonzero(is_bad).to_pylist()
    if rows:
        shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        raise ValueError(f"{problem} {len(rows)} row(s), counted from 0: {shown}; {remedy}")


def split_off_validation(train: Dataset, test: Dataset, num_validation: int, seed: int) -> DatasetDict:
    """
    Moves `num_validation` rows of train to validation. Both are shuffled, with the same share of each label; the same
    seed gives the same splits on every machine.

    Raises:
        ValueError: `num_validation` does not leave rows of every label in both.
    """
    names = train.features["label"].names
    labels = train["label"][:]
    counts = {name: labels.count(index) for index, name in enumerate(names)}
    rarest = min(counts, key=counts.get)
    if counts[rarest] < 2:
        raise ValueError(
            f"train has {counts[rarest]} row(s) of the label {rarest!r}; train and validation need at least one each"
        )
    highest = len(train) - len(names)
    if not isinstance(num_validation, int) or not len(names) <= num_validation <= highest:
        raise ValueError(
            f"num_validation must be an integer from {len(names)} to {highest}, since train has {len(train)} rows and "
            f"both splits need every label; got {num_validation!r}"
        )
    split = train.train_test_split(test_size=num_validation, seed=seed, stratify_by_column="label")
    return DatasetDict({"train": split["train"], "validation": split["test"], "test": test})


def _read_parquet(folder: Path, split: str, hub_name: str) -> pa.Table:
    how = f"get the files with `hf download {hub_name} --repo-type dataset --local-dir {folder}`"
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"the data folder {folder} {problem}; {how}, or leave data_dir out to use the Hub")
    for pattern in FILE_PATTERNS:
        if files := sorted(folder.glob(pattern.format(split=split))):
            break
    else:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise FileNotFoundError(
            f"no {split}.parquet or {split}-*.parquet in the data folder {folder}, which holds {names}; {how}"
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
