# Everything a newcomer needs, from a fresh clone: Python 3.11 or newer, make and git.
#
#   make demo [ARGS="workload=flow sites=2"]   the main job: a coordinator and 4 sites, here
#   make install | clean                       .venv alone | without it and all caches
#   make test | test-fast                      the whole suite | without what takes long
#        [WORKERS=2] [ARGS=tests/link]         2 processes, or 0: here, one test after the other
#   make lint                                  ruff and mypy
#   make bench [BENCH="timed check"]           all benchmarks and checks, or some, quick; runs/bench/
#   make bench-peers ARGS="--json out.json"    fedwan beside DDP, torchft and Flower, as root
#   make proto                                 generate the wire messages anew
#
# .venv is made once, and again when the pins or the packaging change.

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2
# A file's tests share a worker, and what is dear to make; in order, so that the fleets begin early.
BY_FILE := --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed

.PHONY: help install demo test test-fast lint bench bench-peers proto clean
.DEFAULT_GOAL := help

help:
	@sed -n '3,12s/^# \{0,1\}//p' Makefile

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
	$(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE) $(ARGS)

test-fast: install
	$(BIN)/python -m pytest -n $(WORKERS) $(BY_FILE) -m "not slow" $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# `transport`, `timed`, `planner` and `sync_vs_local` make network namespaces, as root.
# `check` has bounds, and ends with 1 where one does not hold.
BENCH ?= simulation fuzz round_trip codecs transport timed planner scale strategies unequal quality \
    sync_vs_local site doctor check

bench: install
	for name in $(BENCH); do \
	    echo "== $$name"; \
	    $(BIN)/python -m benchmarks $$name --quick --json runs/bench/$$name.json $(ARGS) || exit 1; \
	done

# The peers have an environment of their own, with the same torch and flwr.
$(PEERS_STAMP): constraints.txt pyproject.toml benchmarks/peers/requirements.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -r benchmarks/peers/requirements.txt -e '.[demo]'
	@touch $(PEERS_STAMP)

bench-peers: $(PEERS_STAMP)
	$(PEERS)/bin/python -m benchmarks peers $(ARGS)

proto: install
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fedwan/link/wire.proto

clean:
	rm -rf $(VENV) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
