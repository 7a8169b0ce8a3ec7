# Everything a newcomer needs, from a fresh clone: Python 3.11 or newer, make and git.
#
#   make demo [ARGS="workload=flow sites=2"]   the main job: a coordinator and 4 sites, here
#   make test | test-fast                      the whole suite | without what takes long
#   make lint                                  ruff and mypy
#   make bench [ARGS="--json out.json"]        time of a round over the data plane
#   make proto                                 generate the wire messages anew
#
# .venv is made once, and again when the pins or the packaging change.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-fast lint bench proto clean
.DEFAULT_GOAL := help

help:
	@sed -n '3,9s/^# \{0,1\}//p' Makefile

install: $(STAMP)

# The stamp is touched last: an install that was cut short is done again.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fedwan needs Python 3.11 or newer, $(PYTHON) is older; try make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: install
	$(BIN)/fedwan demo $(ARGS)

test: install
	$(BIN)/python -m pytest $(ARGS)

test-fast: install
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/round_trip.py $(ARGS)

proto: install
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fedwan/link/wire.proto

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
