# Two commands on a fresh machine: `make train`, `make test`. Nothing else is needed but make and Python 3.11 or newer.
#   PYTHON=python3.12   the interpreter that the environment is made of
#   ARGS='...'          overrides for `make train`, as in ARGS='batch.global_batch_size=256'

PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(name))) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
SOURCES := launcher tests $(wildcard hydra_plugins benchmarks examples docker)
SCRIPTS := $(wildcard slurm/*.sh) slurm/train.sbatch $(wildcard tests/services/*) docker/wheels .ci/run

.PHONY: help setup train test quick lint clean

help:
	@echo "make setup   a virtual environment in $(VENV) with everything that is needed"
	@echo "make train   set up, then train: launcher train \$$(ARGS)"
	@echo "make test    set up, then run every test"
	@echo "make quick   the tests that start no ranks and no whole runs: under a minute"
	@echo "make lint    ruff, mypy and shellcheck"
	@echo "make clean   remove the environment and what tools have cached; runs stay"

setup: $(STAMP)

# The stamp is made last: an environment whose making was interrupted has none, and is made anew.
# torch goes first and pinned, so that no other package's looser request decides which build is fetched.
$(STAMP): pyproject.toml constraints.txt
	@python='$(PYTHON)'; "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: needs Python 3.11 or newer; $$python is $$("$$python" --version 2>&1 || true)" >&2; \
	  echo "      install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -f $@ || '$(PYTHON)' -m venv --clear $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	$(PIP) install --quiet -c constraints.txt -e '.[test,lint]'
	@touch $@

train: setup
	$(BIN)/launcher train $(ARGS)

# Half of what ranks and runs take is imports on one core, so two tests run side by side, each from its half of the files.
test: setup
	$(BIN)/python -m pytest -n 2 -m "not slow"
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

quick: setup
	$(BIN)/python -m pytest -n 2 -m "not slow and not thorough"

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/shellcheck $(SCRIPTS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find launcher tests -name __pycache__ -type d -prune -exec rm -rf {} +
