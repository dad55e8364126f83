"""Sequential CIFAR-10 (Krizhevsky 2009): what a photograph shows, from its gray values as a sequence.

An image of 32 x 32 pixels is 1,024 tokens: its gray values 0 to 255 in raster order, row by row from the top left, as
words ("0" to "255"), the texts of `build_pixel_tokenizer`. From the Hub (`uoft-cs/cifar10`, in colour) or from a local
folder of parquet files; colours become gray values by PIL's "L" (ITU-R 601-2 luma). As in the Long Range Arena, nothing
is augmented. The validation split is ours.
"""

import io
from pathlib import Path

import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.utils import tqdm
from PIL import Image, UnidentifiedImageError

from .files import check_columns, check_labels, read_tables, split_off_validation

HUB_NAME = "uoft-cs/cifar10"
LABELS = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=LABELS)})
SIDE = 32

_WORDS = [str(value) for value in range(256)]


def load_cifar10(data_dir: str | Path | None = None, *, num_validation: int = 5000, seed: int = 0) -> DatasetDict:
    """Load train, validation and test, each with the columns `text` (see `image_to_text`) and `label` (0 to 9).

    Args:
        data_dir: a folder with `train.parquet` and `test.parquet`, or with shards named as on the Hub
            (`train-00000-of-00001.parquet`), with the columns `img` and `label`. The Hub's `uoft-cs/cifar10` by
            default.
        num_validation: images moved from train to validation.
        seed: of the split and of the order. The same seed gives the same splits on every machine.

    Raises:
        FileNotFoundError: `data_dir` or a file in it is missing.
        ValueError: a file is unreadable or lacks a column, a label is not in 0..9, an image is missing, damaged or of
            another size, or `num_validation` does not leave images of every label in train and in validation.
        ConnectionError: from `datasets`, when the Hub cannot be reached and the data are not in its cache.
    """
    tables = read_tables(HUB_NAME, data_dir)
    train, test = (_as_texts(*tables[split]) for split in ("train", "test"))
    return split_off_validation(train, test, num_validation, seed)


def image_to_text(image: Image.Image) -> str:
    """The text that stands for an image: `pipeline("text-classification", model)(image_to_text(image))`.

    Args:
        image: 32 x 32 pixels, of any mode.

    Raises:
        ValueError: the image has another size.
    """
    if image.size != (SIDE, SIDE):
        raise ValueError(
            f"the image has {image.size[0]} x {image.size[1]} pixels: it must have {SIDE} x {SIDE}; "
            f"use `image.resize(({SIDE}, {SIDE}))`"
        )
    return " ".join([_WORDS[value] for value in image.convert("L").tobytes()])


def _as_texts(table: pa.Table, where: str) -> Dataset:
    check_columns(table, ["img", "label"], where)
    check_labels(table.column("label"), LABELS, where, "correct or remove these rows")
    images = table.column("img")
    # What `datasets` writes for an Image: the bytes of a file and its path.
    if not pa.types.is_struct(images.type) or images.type.get_field_index("bytes") < 0:
        raise ValueError(
            f"{where}: the column 'img' has the type {images.type}; it must hold images as `datasets` writes them, "
            "a struct with the field 'bytes'"
        )
    files = tqdm(images.to_pylist(), desc=f"Reading the images of {where}")
    texts = [_file_to_text(image, f"{where}, row {row}") for row, image in enumerate(files)]
    columns = {"text": pa.array(texts), "label": table.column("label")}
    return Dataset(pa.table(columns).cast(FEATURES.arrow_schema))


def _file_to_text(image: dict | None, where: str) -> str:
    if image is None or image["bytes"] is None:
        raise ValueError(f"{where}: there is no image; remove the row")
    try:
        return image_to_text(Image.open(io.BytesIO(image["bytes"])))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{where}: {error}; correct or remove the row") from error
