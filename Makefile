# Every target first makes the virtual environment in .venv when it is missing or out of date.
# An environment of your own: `make test PY=path/to/python` (nothing is installed into it).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
PYTHON3 ?= python3

ifdef PY
READY :=
else
PY := .venv/bin/python
READY := .venv/.complete
endif

PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadgroup

.PHONY: help train test test-all lint bench gpu mutants versions

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# .complete is written last: an install that was interrupted has none, and starts again from nothing. torch goes first,
# by its exact version alone, so that pip never weighs other builds of it.
.venv/.complete: pyproject.toml constraints.txt $(wildcard rlloss/heads/csrc/*.[ch])
	@if [ ! -e $@ ]; then $(PYTHON3) -m venv --clear .venv; fi
	@rm -f $@
	.venv/bin/python -m pip install --disable-pip-version-check -q "$$(grep '^torch==' constraints.txt)"
	.venv/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[train,trl,dev]"
	@touch $@

train: $(READY)  ## supervised warm start, then GRPO on arithmetic, a few minutes on two cores
	$(PY) -m rlloss train configs/grpo_arithmetic.py

test: lint  ## lint, types, tests
	$(PYTEST) -m "not slow and not gpu"

test-all: lint  ## the same with the slow and the GPU tests
	$(PYTEST)

lint: $(READY)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

bench: $(READY)  ## time and memory of the modes
	$(PY) -m rlloss bench

gpu: $(READY)  ## what only a CUDA device can show, in at most five minutes
	$(PY) -m pytest tests/gpu -m gpu -rA --junitxml=gpu.xml

mutants: $(READY)  ## break the formulas one by one; every break must turn a test red
	OMP_NUM_THREADS=1 $(PY) -m tests.mutants

versions:  ## the oldest and the newest torch, pydantic and Liger, each in an environment of its own; downloads several GB
	$(PYTHON3) -m tests.versions $(if $(ONLY),--only $(ONLY))
