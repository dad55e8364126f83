# Needs nothing but make and Python 3.11 or later. Works with the make 3.81 that macOS ships.
#
#   make demo     train HKT and its baseline on a small ListOps and print a table
#   make test     the fast test suite
#   make lint     what CI checks of style
#   make format   put it right
#
# PIP_ARGS goes to pip. On Linux, PyPI's torch brings several GB of CUDA libraries; without an NVIDIA GPU prefer
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= 2
PIP_ARGS ?=
PYTEST_ARGS ?=

# One thread per pytest worker: several workers that each start a thread per core slow each other down.
# Offline, because no test may need the internet; a test that talks to its own local server sets its own environment.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

.PHONY: help install demo test lint format clean

help:
	@sed -n 's/^#   make/make/p' Makefile

install: $(INSTALLED)

# The interpreter is tried, not only looked up: a version manager's python3.11 may exist and refuse to start.
$(INSTALLED): pyproject.toml constraints.txt
	@set -e; \
	if [ ! -x $(BIN)/python ]; then \
	  found=; \
	  for candidate in python3.11 python3; do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "error: Python 3.11 or later is needed; neither python3.11 nor python3 on your PATH is that." >&2; exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$found"; \
	  $$found -m venv $(VENV); \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]' -c constraints.txt $(PIP_ARGS)
	@touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py

test: $(INSTALLED)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
