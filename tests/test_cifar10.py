"""Sequential CIFAR-10: images become 1,024 gray values in raster order, and bad files are refused with a reason."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import pipeline

from hkt_hf import HKTConfig, HKTForSequenceClassification
from hkt_hf.data.cifar10 import LABELS, image_to_text, load_cifar10
from hkt_hf.tokenization_hkt import NUM_SPECIAL_TOKENS, PIXEL_VOCAB_SIZE, build_pixel_tokenizer


def picture(seed: int, mode: str = "L", side: int = 32) -> Image.Image:
    shape = (side, side) if mode == "L" else (side, side, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def encoded(image: Image.Image) -> dict:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def write(folder, **changes):
    columns = {"img": [encoded(picture(index)) for index in range(30)], "label": [index % 10 for index in range(30)]}
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "test.parquet")
    pq.write_table(pa.table(columns | changes), folder / "train.parquet")
    return folder


def test_an_image_is_its_gray_values_in_raster_order():
    image = picture(0)
    ids = build_pixel_tokenizer()(image_to_text(image))["input_ids"]
    assert ids == (np.asarray(image, dtype=int).ravel() + NUM_SPECIAL_TOKENS).tolist()


def test_colours_become_gray():
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[0, 1] = (255, 0, 0)
    pixels[1, 0] = (0, 255, 0)
    words = image_to_text(Image.fromarray(pixels)).split()
    # ITU-R 601-2: 0.299 R + 0.587 G + 0.114 B
    assert (words[1], words[32], words[2]) == ("76", "150", "0")


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"28 x 28 pixels: it must have 32 x 32; use `image.resize\(\(32, 32\)\)`"):
        image_to_text(picture(0, side=28))


def test_splits(tmp_path):
    data = load_cifar10(write(tmp_path), num_validation=10)
    assert {split: len(rows) for split, rows in data.items()} == {"train": 20, "validation": 10, "test": 30}
    assert data["test"].features["label"].names == LABELS
    assert data["test"]["text"][7] == image_to_text(picture(7)) and data["test"]["label"][7] == 7
    assert set(data["train"]["text"]).isdisjoint(data["validation"]["text"])
    assert sorted(data["validation"]["label"]) == list(range(10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": [10] + [0] * 29}, r"train: a label that is not in 0 \(airplane\) to 9 \(truck\) in 1 row\(s\)"),
        ({"label": [0.5] * 30}, "the column 'label' has the type double"),
        ({"img": ["file.png"] * 30}, "the column 'img' has the type string; it must hold images"),
        ({"img": [encoded(picture(1)), None] + [encoded(picture(1))] * 28}, "train, row 1: there is no image"),
        ({"img": [{"bytes": b"no image", "path": None}] * 30}, "train, row 0: cannot identify image file"),
        ({"img": [{"bytes": encoded(picture(1))["bytes"][:300], "path": None}] * 30}, "train, row 0: .*truncated"),
        ({"img": [encoded(picture(1, side=16))] * 30}, "train, row 0: the image has 16 x 16 pixels"),
    ],
)
def test_bad_rows_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_cifar10(write(tmp_path, **changes), num_validation=10)


def test_missing_column(tmp_path):
    folder = write(tmp_path)
    pq.write_table(pa.table({"image": [1], "label": [1]}), folder / "test.parquet")
    with pytest.raises(ValueError, match="test: no column 'img' among .*'image'.*; rename your columns to 'img' and"):
        load_cifar10(folder, num_validation=10)


def test_one_call_from_an_image_to_its_class(tmp_path):
    config = HKTConfig(
        vocab_size=PIXEL_VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label=dict(enumerate(LABELS)),
        label2id={name: index for index, name in enumerate(LABELS)},
    )
    HKTForSequenceClassification(config).save_pretrained(tmp_path)
    build_pixel_tokenizer().save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), trust_remote_code=False)
    (answer,) = classify(image_to_text(picture(3, "RGB")))
    assert answer["label"] in LABELS and 0 < answer["score"] < 1
