"""Recipes: the shipped ones are complete, overrides count, and every mistake is named before any data is read."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_recipe import TINY, write_recipe

from hkt_hf import HKTConfig, HKTForSequenceClassification
from hkt_hf.training import load_recipe
from hkt_hf.training.recipe import _loader_types
from hkt_hf.training.tasks import TASKS

SHIPPED = sorted((Path(__file__).resolve().parent.parent / "configuration").glob("*.yaml"))


@pytest.fixture(scope="module")
def tiny_recipe(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("recipe") / "tiny.yaml", TINY)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_complete_and_valid(path, tmp_path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert set(recipe.data) == set(_loader_types(TASKS[recipe.task].load))
    assert {"num_levels", "level_stride", "level_fusion", "hybrid"} <= set(recipe.model)
    config = HKTConfig(**recipe.model)
    assert config.max_position_embeddings >= recipe.tokenizer["max_length"]
    arguments = recipe.training_arguments(tmp_path)
    assert (arguments.seed, arguments.report_to) == (recipe.seed, [])
    assert arguments.load_best_model_at_end
    assert arguments.metric_for_best_model == "accuracy"
    # The best checkpoint and the newest one: with 1, a kill after the last step would lose the newest.
    assert arguments.save_total_limit == 2
    assert "/" not in yaml.safe_dump(recipe.sections())


def test_promised_recipes_are_there():
    promised = {"listops_demo", "listops_tiny", "listops_512_tiny", "listops"}
    promised |= {"imdb_tiny", "imdb", "cifar10_tiny", "cifar10"}
    assert promised <= {path.stem for path in SHIPPED}


def test_overrides_change_the_recipe_and_its_arguments(tiny_recipe, tmp_path):
    overrides = ["model.num_levels=1", "model.hybrid=false", "training.learning_rate=1e-4", "seed=7", "seed=8"]
    recipe = load_recipe(tiny_recipe, overrides)
    config = HKTConfig(**recipe.model)
    assert (config.num_levels, config.hybrid) == (1, False)
    arguments = recipe.training_arguments(tmp_path)
    assert (arguments.learning_rate, arguments.seed, arguments.max_steps) == (1e-4, 8, 32)
    assert recipe.overrides == tuple(overrides)
    assert recipe.data["seed"] == 1


def test_a_recipe_chooses_the_attention_implementation(tiny_recipe):
    config = HKTConfig(**load_recipe(tiny_recipe, ["model.attn_implementation=hkt_fused"]).model)
    assert HKTForSequenceClassification(config).config._attn_implementation == "hkt_fused"
    message = r"--override .*: `model.attn_implementation` is 'flash': it must be one of eager, hkt_fused, sdpa"
    with pytest.raises(ValueError, match=message):
        load_recipe(tiny_recipe, ["model.attn_implementation=flash"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [listops\nseed: 1\n", r"tiny\.yaml is not valid YAML.*line 2"),
        ("task: listops\ntask: imdb\n", r"not valid YAML.*duplicate key task.*line 2"),
        ("- task\n", r"a recipe is a mapping of the sections task"),
        ("just words\n", r"tiny\.yaml"),
        ("", r"`task`, `seed`, .* missing"),
        ("task: \xff".encode("latin-1"), r"not valid YAML"),
    ],
)
def test_malformed_recipe_files(tmp_path, text, message):
    path = tmp_path / "tiny.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        (None, "trainer", {}, r"unknown key `trainer`.*sections.*did you mean training\?"),
        (None, "task", "listop", r"`task` is 'listop'.*one of cifar10, imdb, listops"),
        (None, "seed", "one", r"`seed` is 'one'.*of type int"),
        (None, "seed", True, r"`seed` is True"),
        (None, "seed", -1, r"`seed` is -1: it must be in 0"),
        (None, "model", None, r"`model` is None"),
        ("model", "num_level", 3, r"unknown key `model\.num_level`.*HKTConfig.*did you mean num_levels"),
        ("model", "num_levels", "three", r"`model`.*num_levels.*three"),
        ("model", "hidden_size", 15, r"hidden_size.* is 15.*multiple"),
        ("model", "vocab_size", 20, r"`model\.vocab_size` must not be set: the tokenizer decides it"),
        ("training", "learningrate", 1.0, r"unknown key `training\.learningrate`.*did you mean learning_rate"),
        ("training", "learning_rate", "fast", r"`training\.learning_rate` is 'fast', of type str.*float"),
        ("training", "max_steps", 1.5, r"`training\.max_steps` is 1\.5.*of type int"),
        ("training", "eval_strategy", "sometimes", r"`training`.*sometimes"),
        ("training", "eval_strategy", False, r"`training\.eval_strategy` is False.*no, off.*quote"),
        ("training", "report_to", "wandb", r"`training\.report_to` is 'wandb', which is not installed"),
        ("training", "seed", 1, r"`training\.seed` must not be set: the recipe's `seed` decides it"),
        ("training", "output_dir", "x", r"`training\.output_dir` must not be set.*--output-dir"),
        ("data", "num_trains", 1, r"unknown key `data\.num_trains`.*did you mean num_train"),
        ("data", "cache_dir", "x", r"unknown key `data\.cache_dir`"),
        ("data", "num_train", "many", r"`data\.num_train` is 'many'"),
        ("tokenizer", "kind", "word", r"`tokenizer\.kind` is 'word'.*bytes, listops"),
        ("tokenizer", "maxlength", 3, r"unknown key `tokenizer\.maxlength`.*did you mean max_length"),
        ("tokenizer", "max_length", 0, r"max_length` is 0"),
        ("tokenizer", "max_length", 17, r"is 17, but the model has only 16 learned positions"),
        ("tokenizer", "max_length", "${model.size}", r"tiny\.yaml.*model\.size"),
    ],
)
def test_recipe_errors_name_value_rule_and_remedy(tmp_path, section, key, value, message):
    content = json.loads(json.dumps(TINY))
    (content[section] if section else content)[key] = value
    path = write_recipe(tmp_path / "tiny.yaml", content)
    with pytest.raises(ValueError, match=message) as raised:
        load_recipe(path)
    assert "tiny.yaml" in str(raised.value)


@pytest.mark.parametrize("key", ["task", "seed", "data", "tokenizer", "model", "training"])
def test_every_section_is_required(tmp_path, key):
    content = {name: section for name, section in TINY.items() if name != key}
    with pytest.raises(ValueError, match=f"`{key}` missing"):
        load_recipe(write_recipe(tmp_path / "tiny.yaml", content))


@pytest.mark.parametrize("key", ["num_train", "num_test"])
def test_arguments_without_default_are_required(tmp_path, key):
    content = TINY | {"data": {name: value for name, value in TINY["data"].items() if name != key}}
    with pytest.raises(ValueError, match=rf"`data\.{key}` missing"):
        load_recipe(write_recipe(tmp_path / "tiny.yaml", content))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_level=1", r"--override model\.num_level=1: unknown key `model\.num_level`.*num_levels"),
        ("model.deep.er=1", r"--override model\.deep\.er=1: unknown key `model\.deep`"),
        ("training.max_steps=ten", r"--override training\.max_steps=ten: `training\.max_steps` is 'ten'"),
        ("model=3", r"--override model=3: `model` is 3"),
        ("tasks=imdb", r"--override tasks=imdb: unknown key `tasks`"),
        ("model.num_levels", r"an override has the form section\.key=value"),
        ("=3", r"an override has the form"),
        ("model..num_levels=1", r"an override has the form"),
        ("model.num_levels=[1", r"--override model\.num_levels=\[1: the value is not valid YAML"),
    ],
)
def test_override_errors_name_the_override(tiny_recipe, override, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(tiny_recipe, [override])
