"""
A recipe: one YAML file that says all there is to say about a run, except where its data and its output lie.

    task      a key of `tasks.TASKS`
    seed      of the weights, the order of the data and the dropout
    data      keyword arguments of the task's loader; `data.seed` draws the data and is apart from `seed`
    tokenizer kind, max_length (tokens, special ones included), truncation
    model     arguments of HKTConfig, and attn_implementation if sdpa is not the one
    training  arguments of transformers.TrainingArguments

Everything is checked here, before any data is read, and every mistake raises a ValueError with the value, the rule and
the remedy.
"""

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, DatasetDict
from huggingface_hub.dataclasses import type_validator
from huggingface_hub.errors import StrictDataclassError
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from ..configuration_hkt import HKTConfig
from ..kernels.attention_interface import NAME as FUSED
from .tasks import TASKS, TOKENIZERS

SECTION_TYPES = {"task": str, "seed": int, "data": dict, "tokenizer": dict, "model": dict, "training": dict}
TOKENIZER_TYPES = {"kind": str, "max_length": int, "truncation": bool}

# A typo would otherwise show when the model is made, after the data are read.
ATTENTION = ("eager", "sdpa", FUSED)

# Arguments that depend on the machine, and that a recipe must therefore not hold.
LOADER_ARGUMENTS_OF_THE_MACHINE = {"data_dir", "cache_dir", "num_proc"}
# Keys that something else in the recipe or on the command line already decides.
DECIDED_ELSEWHERE = {
    "model.vocab_size": "the tokenizer decides it",
    "model.pad_token_id": "the tokenizer decides it",
    "model.bos_token_id": "the tokenizer decides it",
    "model.eos_token_id": "the tokenizer decides it",
    "model.num_labels": "the data decides it",
    "model.id2label": "the data decides it",
    "model.label2id": "the data decides it",
    "model.problem_type": "every task here has one label per text",
    "training.output_dir": "it is an argument of the run (--output-dir)",
    "training.seed": "the recipe's `seed` decides it",
    "training.resume_from_checkpoint": "a run resumes by itself",
    "training.push_to_hub": "scripts/push_to_hub.py pushes a finished run",
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A checked recipe; `name` is the stem of its file, `overrides` are already merged into the sections."""

    name: str
    task: str
    seed: int
    data: dict[str, Any]
    tokenizer: dict[str, Any]
    model: dict[str, Any]
    training: dict[str, Any]
    overrides: tuple[str, ...] = ()

    def sections(self) -> dict[str, Any]:
        """What decides the result of a run: two runs with equal sections are the same run."""
        return {section: getattr(self, section) for section in SECTION_TYPES}

    def training_arguments(self, output_dir: str | Path, track: str | None = None) -> TrainingArguments:
        """What the recipe says of training; `track` names a tracker that the recipe does not."""
        output_dir = Path(output_dir)
        of_the_machine = {
            # Without a GPU, pinning memory is but a warning per loader.
            "dataloader_pin_memory": torch.cuda.is_available(),
            # Unless told so, the processes of `accelerate launch` on CPUs train apart, and write the same folder.
            "use_cpu": not torch.accelerator.is_available(),
            # For trackers. Without a name, what follows a resume or the end of training would be a run of its own.
            "project": self.name,
            "run_name": output_dir.name,
        }
        if track is not None:
            check_tracker(track, "`track`")
        told = {} if track is None else {"report_to": track}
        return TrainingArguments(output_dir=str(output_dir), seed=self.seed, **(of_the_machine | self.training | told))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """
    Reads and checks a recipe.

    Args:
        path: the YAML file.
        overrides: `section.key=value` strings, merged over the file; values are YAML.

    Raises:
        ValueError: missing or malformed file, missing or unknown section or key, wrong type, unknown task or tokenizer,
            or values that HKTConfig or TrainingArguments refuse.
    """
    path = Path(path)
    content = _read(path)
    for override in overrides:
        content = _merge(content, override)
    try:
        content = OmegaConf.to_container(content, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {error}") from error

    where = _Origin(path, overrides)
    _check_keys(content, SECTION_TYPES, where, rule="the sections of a recipe are {known}", required=SECTION_TYPES)
    for section, expected in SECTION_TYPES.items():
        _check_type(content[section], expected, section, where)

    loader = TASKS[_choice(content["task"], TASKS, "task", where)].load
    loader_types = _loader_types(loader)
    loader_required = [
        name for name in loader_types if inspect.signature(loader).parameters[name].default is inspect.Parameter.empty
    ]
    model_keys = {field.name for field in dataclasses.fields(HKTConfig) if field.init} | {"attn_implementation"}
    training_types = {field.name: field.type for field in dataclasses.fields(TrainingArguments) if field.init}

    _check_section(
        content, "data", loader_types, f"the arguments of {loader.__name__}", where, required=loader_required
    )
    _check_section(content, "tokenizer", TOKENIZER_TYPES, "these keys", where, required=TOKENIZER_TYPES)
    _choice(content["tokenizer"]["kind"], TOKENIZERS, "tokenizer.kind", where)
    # HKTConfig checks the types of its own fields, below.
    _check_section(content, "model", dict.fromkeys(model_keys, Any), "the arguments of HKTConfig", where)
    _check_section(content, "training", training_types, "the arguments of transformers.TrainingArguments", where)

    if "attn_implementation" in content["model"]:
        _choice(content["model"]["attn_implementation"], ATTENTION, "model.attn_implementation", where)

    recipe = Recipe(name=path.stem, overrides=tuple(overrides), **content)
    _check_arguments(recipe, where)
    return recipe


def find_yaml(name: str, folder: Path) -> Path:
    """The path itself, or the file of that name in a folder, which it names if there is none."""
    path = Path(name)
    if path.is_file() or path.suffix or path.parent != Path():
        return path
    shipped = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in shipped:
        raise ValueError(f"there is no recipe {name!r}: give a YAML file or one of {', '.join(shipped)}.")
    return folder / f"{name}.yaml"


def check_tracker(name: str, key: str) -> None:
    available = get_available_reporting_integrations()
    if name not in available:
        raise ValueError(
            f"{key} is {name!r}, which is not installed: install it, or use one of {', '.join(available) or 'none'}."
        )


class _Origin:
    """Names the place that a key comes from: the file, or the override that set it."""

    def __init__(self, path: Path, overrides: Sequence[str]):
        self.path = path
        self.overrides = overrides

    def __call__(self, key: str) -> str:
        # The last one that sets the key, or something within it, is the one that counts.
        for override in reversed(self.overrides):
            overridden = override.partition("=")[0]
            if f"{overridden}.".startswith(f"{key}."):
                return f"--override {override}"
        return str(self.path)


def _read(path: Path) -> DictConfig:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such recipe file.")
    try:
        content = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not valid YAML: {_one_line(error)}") from error
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path}: a recipe is a mapping of the sections {', '.join(SECTION_TYPES)}, not a list.")
    return content


def _merge(content: DictConfig, override: str) -> DictConfig:
    key, equals, _ = override.partition("=")
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise ValueError(f"--override {override}: an override has the form section.key=value, e.g. model.num_levels=1.")
    try:
        return OmegaConf.merge(content, OmegaConf.from_dotlist([override]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"--override {override}: the value is not valid YAML: {_one_line(error)}") from error


def _check_keys(given: dict, known: Iterable[str], where: _Origin, *, rule: str, required=(), prefix: str = "") -> None:
    known = sorted(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.6)
            remedy = f"did you mean {' or '.join(near)}?" if near else "remove it."
            rule_text = rule.format(known=", ".join(known))
            raise ValueError(f"{where(f'{prefix}{key}')}: unknown key `{prefix}{key}`: {rule_text}; {remedy}")
    missing = [key for key in required if key not in given]
    if missing:
        names = ", ".join(f"`{prefix}{key}`" for key in missing)
        raise ValueError(f"{where.path}: {names} missing: a recipe is complete; add what is missing.")


def _check_section(
    content: dict, section: str, types: dict[str, Any], of: str, where: _Origin, *, required: Iterable[str] = ()
) -> None:
    """Every key of the section is known, its value of the right type, and nothing required is missing."""
    for key in content[section]:
        if reason := DECIDED_ELSEWHERE.get(f"{section}.{key}"):
            raise ValueError(f"{where(f'{section}.{key}')}: `{section}.{key}` must not be set: {reason}; remove it.")
    rule = f"`{section}` takes {of}" + (": {known}" if len(types) < 10 else "")
    _check_keys(content[section], types, where, rule=rule, required=required, prefix=f"{section}.")
    for key, value in content[section].items():
        _check_type(value, types[key], f"{section}.{key}", where)


def _check_type(value: Any, expected: Any, key: str, where: _Origin) -> None:
    # An integer is right where a float is.
    for candidate in [value, float(value)] if type(value) is int else [value]:
        try:
            type_validator(key, candidate, expected)
        except TypeError:
            continue
        return
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    hint = " YAML reads the words no, off, yes and on as booleans: quote them." if isinstance(value, bool) else ""
    raise ValueError(
        f"{where(key)}: `{key}` is {value!r}, of type {type(value).__name__}: it must be of type {name}.{hint}"
    )


def _choice(value: str, choices: Iterable[str], key: str, where: _Origin) -> str:
    if value not in choices:
        raise ValueError(f"{where(key)}: `{key}` is {value!r}: it must be one of {', '.join(sorted(choices))}.")
    return value


def _loader_types(loader) -> dict[str, Any]:
    # A loader may import datasets late, and know these two names only while types are checked.
    hints = typing.get_type_hints(loader, localns={"Dataset": Dataset, "DatasetDict": DatasetDict})
    names = inspect.signature(loader).parameters.keys() - LOADER_ARGUMENTS_OF_THE_MACHINE
    return {name: hints.get(name, Any) for name in names}


def _check_arguments(recipe: Recipe, where: _Origin) -> None:
    """Lets HKTConfig and TrainingArguments check their values, long before they are needed."""
    try:
        config = HKTConfig(**recipe.model)
    except StrictDataclassError as error:
        raise ValueError(f"{where.path}: `model`: {_one_line(error)}") from error
    try:
        arguments = recipe.training_arguments("unused")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where.path}: `training`: {_one_line(error)}") from error
    for name in arguments.report_to:
        check_tracker(name, f"{where('training.report_to')}: `training.report_to`")
    if not 0 <= recipe.seed < 2**32:
        raise ValueError(f"{where('seed')}: `seed` is {recipe.seed}: it must be in 0..{2**32 - 1}.")
    max_length = recipe.tokenizer["max_length"]
    if max_length < 1:
        raise ValueError(
            f"{where('tokenizer.max_length')}: `tokenizer.max_length` is {max_length}: at least 1 is needed."
        )
    if config.position_embedding_type == "learned" and max_length > config.max_position_embeddings:
        raise ValueError(
            f"{where('tokenizer.max_length')}: `tokenizer.max_length` is {max_length}, but the model has only "
            f"{config.max_position_embeddings} learned positions: lower it or raise `model.max_position_embeddings`."
        )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
