"""From a YAML recipe to a trained, evaluated and saved model, through transformers' Trainer."""

from .callbacks import NoPicklesCallback
from .recipe import Recipe, load_recipe
from .run import run_recipe, summary

__all__ = ["NoPicklesCallback", "Recipe", "load_recipe", "run_recipe", "summary"]
