"""
A sweep: one YAML file that says which variants of a recipe to train, with which seeds.

    recipe    path of the recipe, relative to the folder of the sweep
    baseline  the variant that the others are compared with
    seeds     list of integers
    variants  name: list of overrides, as of `load_recipe`
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from .recipe import Recipe, load_recipe

KEYS = ("recipe", "baseline", "seeds", "variants")


@dataclass(frozen=True)
class SweepRun:
    """One variant with one seed."""

    variant: str
    seed: int
    recipe_path: Path
    overrides: tuple[str, ...]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Names its files: "HKT, stride 1" with seed 0 is `hkt-stride-1-seed0`."""
        return f"{slug(self.variant)}-seed{self.seed}"


@dataclass(frozen=True)
class Sweep:
    """A checked sweep. All variants with the first seed come first, so that a sweep cut short compares them all."""

    name: str
    baseline: str
    runs: tuple[SweepRun, ...]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(run.variant for run in self.runs))


def load_sweep(path: str | Path) -> Sweep:
    """
    Reads and checks a sweep and every recipe in it, before anything is trained.

    Raises:
        ValueError: missing or malformed file, missing or unknown key, no seed or variant, variants that are the same
            run or have the same file name, an unknown baseline, or what `load_recipe` refuses.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: there is no such sweep file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or set(content) != set(KEYS):
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: a sweep has exactly the keys {', '.join(KEYS)}; this one has {found}.")
    seeds, variants = content["seeds"], content["variants"]
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"{path}: `seeds` is {seeds!r}: it must be a list of integers, at least one.")
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{path}: `seeds` is {seeds!r}: a seed is there twice; remove one.")
    if not isinstance(variants, dict) or not variants:
        raise ValueError(f"{path}: `variants` must map at least one name to its overrides (a list, empty for none).")
    if content["baseline"] not in variants:
        raise ValueError(f"{path}: `baseline` is {content['baseline']!r}: it must be one of {', '.join(variants)}.")
    recipe_path = path.parent / str(content["recipe"])

    runs = []
    for seed in seeds:
        for variant, overrides in variants.items():
            if not isinstance(overrides, list) or not all(isinstance(override, str) for override in overrides):
                raise ValueError(
                    f"{path}: `variants.{variant}` is {overrides!r}: it must be a list of overrides such as "
                    "model.num_levels=1."
                )
            overrides = (*overrides, f"seed={seed}")
            try:
                recipe = load_recipe(recipe_path, overrides)
            except ValueError as error:
                raise ValueError(f"{path}, `variants.{variant}`: {error}") from error
            runs.append(SweepRun(variant, seed, recipe_path, overrides, recipe))
    _refuse_equals({run.name: run.variant for run in runs}, len(runs), path, "have names that make the same file name")
    _refuse_equals({str(run.recipe.sections()): run.variant for run in runs}, len(runs), path, "are the same run")
    return Sweep(path.stem, content["baseline"], tuple(runs))


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _refuse_equals(kept: Mapping[str, str], expected: int, path: Path, problem: str) -> None:
    if len(kept) < expected:
        raise ValueError(f"{path}: two of the variants {problem}; {len(kept)} of {expected} runs differ.")
