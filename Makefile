# Everything a newcomer needs, from a fresh clone: Python 3.11 or newer, make and git.
#
#   make demo [ARGS="workload=flow sites=2"]   the main job: a coordinator and 4 sites, here
#   make install | clean                       .venv alone | without it and all caches
#   make test | test-fast                      the whole suite | what takes a second at most
#        [WORKERS=3] [ARGS=tests/link]         3 processes, or 0: here, one test after the other
#   make lint                                  ruff and mypy
#   make bench [BENCH="timed check"]           most benchmarks, or some, quick; runs/bench/
#   make bench-peers ARGS="--json out.json"    fedwan beside DDP, torchft and Flower, as root
#   make proto                                 generate the wire messages anew
#   make lock [ARGS=--upgrade]                 pyproject.toml's packages, pinned and hashed
#   make sbom | audit                          what is installed, dist/sbom.json | its known holes
#
# .venv is made once, and again when the lock or the packaging changes.

PYTHON ?= python3
ARGS ?=
WORKERS ?= 3
# A file's tests share a worker, and what is dear to make; in order, so that the fleets begin early.
BY_FILE := --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed

.PHONY: help install demo test test-fast lint bench bench-peers proto lock sbom audit clean
.DEFAULT_GOAL := help

help:
	@sed -n '3,14s/^# \{0,1\}//p' Makefile

install: $(STAMP)

# $(call pip_install,VENV,WORDS): each file is checked against its hashes in requirements.lock; fedwan's
# own folder has none. The lock's pip comes first: before 26.3 it does not check hashes of constraints.
# Then torch, in the build that pip is set up to find (one for CPUs alone, say): where there are hashes,
# pip prefers the files of an index that tells theirs.
define pip_install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	rm -rf $(1)/torch
	sed -n '/^pip==/,/[^\\]$$/p' requirements.lock | $(1)/bin/python $(PIP) install -r /dev/stdin
	$(1)/bin/python $(PIP) download --no-deps -d $(1)/torch $$(grep -o '^torch==[^ ]*' requirements.lock)
	$(1)/bin/python $(PIP) install $(LOCKED) --no-deps --no-index -f $(1)/torch torch
	rm -rf $(1)/torch
	$(1)/bin/python $(PIP) install $(LOCKED) --build-constraint requirements.lock $(2)
endef
PIP := -m pip --quiet --disable-pip-version-check
LOCKED := --no-require-hashes -c requirements.lock

# The stamp is touched last: an install that was cut short is done again.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "fedwan needs Python 3.11 or newer, $(PYTHON) is older; try make PYTHON=python3.12" >&2; exit 2; }
	$(call pip_install,$(VENV),-e '.[dev]')
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
$(PEERS_STAMP): requirements.lock pyproject.toml benchmarks/peers/requirements.txt
	$(call pip_install,$(PEERS),-r benchmarks/peers/requirements.txt -e '.[demo]')
	@touch $(PEERS_STAMP)

bench-peers: $(PEERS_STAMP)
	$(PEERS)/bin/python -m benchmarks peers $(ARGS)

proto: install
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. fedwan/link/wire.proto

# Pins and hashes that are there stay, unless pyproject.toml or ARGS say otherwise. What is new there
# is installed when the lock has it.
lock:
	test -x $(BIN)/uv || $(MAKE) install
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --generate-hashes \
	    --custom-compile-command 'make lock' -o requirements.lock $(ARGS) pyproject.toml >/dev/null

sbom: install
	mkdir -p dist
	$(BIN)/uvx --quiet --python $(BIN)/python --from cyclonedx-bom==7.5.0 \
	    cyclonedx-py environment --pyproject pyproject.toml -o dist/sbom.json $(BIN)/python

audit: install
	@.ci/audit

clean:
	rm -rf $(VENV) $(PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
