# Everything runs in .venv of this checkout; `make setup` builds it, every other target asks for it.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
STAMP := .venv/setup.stamp
DOCS_STAMP := .venv/docs.stamp
BUILT = $(filter-out %.cpp %.h %/CMakeLists.txt,$(wildcard optim/csrc/*))

# Tests, examples and ranks start a hundred interpreters, each of which would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

# The first python >= 3.11 that really runs and can make a venv (version managers' shims may exist and still fail).
# `make setup PYTHON=python3.13` asks for another one.
PYTHON ?=
FIND_PYTHON = for name in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	  for path in $$(type -aP $$name 2>/dev/null || true); do \
	    if "$$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	      echo "$$path"; exit 0; fi; done; done; exit 1

.PHONY: help setup demo check test soak golden mutants lint docs bench gpu clean

help:
	@echo "make setup    build .venv (python >= 3.11, exact versions of constraints.txt)"
	@echo "make demo     train a small GPT in a fraction of its memory, same bits"
	@echo "make check    what to run while working: lint and the quick tests, under a minute"
	@echo "make test     all tests but the long ones      make soak   the long ones"
	@echo "make lint     ruff and mypy                    make mutants  are the tests awake?"
	@echo "make golden   are bits, bytes, collectives and peaks what they were? (minutes)"
	@echo "make bench    the measured tables              make gpu    the tests that need a GPU"
	@echo "make docs     the documentation, into site/"

# These tests are of the device that is emulated on the CPU, on a machine with a GPU too; `make gpu` is for that one.
check test soak golden mutants: export CUDA_VISIBLE_DEVICES :=

setup: $(STAMP)
	@echo "setup: .venv is ready ($$($(PY) -V))"

$(STAMP): pyproject.toml constraints.txt $(wildcard optim/csrc/*.cpp optim/csrc/*.h optim/csrc/CMakeLists.txt)
	@if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	  found=$$($(FIND_PYTHON)) || { echo "setup: no python >= 3.11 with venv and ensurepip was found on PATH" >&2; exit 1; }; \
	  echo "setup: making .venv with $$("$$found" -V)"; "$$found" -m venv --clear .venv; fi
	@echo "setup: installing torch, the other dependencies and this checkout (editable, with its C++ kernels); minutes when torch is downloaded"
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt scikit-build-core nanobind cmake ninja
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(PY) examples/train_gpt.py --demo

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check . || { echo "check: run ruff format ." >&2; exit 1; }
	$(PY) tests/check.py

test: $(STAMP)
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -m "not soak" tests

soak: $(STAMP)
	$(PY) -m pytest -q --durations=15 --timeout=3600 -m soak tests

golden: $(STAMP)
	$(PY) -m tests.golden check

mutants: $(STAMP)
	$(PY) tests/mutants/run.py

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check . || { echo "lint: run ruff format ." >&2; exit 1; }
	$(PY) -m mypy

# The extra `docs` is installed at the first build (half a minute); the build itself takes seconds.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -q
	$(PY) tests/built_site.py
	@echo "docs: open site/index.html"

$(DOCS_STAMP): $(STAMP)
	@echo "docs: installing mkdocs-material and mkdocstrings"
	@$(PY) -m pip install -q --disable-pip-version-check -c constraints.txt $$($(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $(DOCS_STAMP)

bench: $(STAMP)
	$(PY) -m benchmarks

gpu: $(STAMP)
	GEMINI_TEST_DEVICE=cuda $(PY) -m pytest -q --durations=15 -m gpu tests/gpu

clean:
	rm -rf build dist site optim/*.so $(BUILT) ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
