# `make quickstart` and `make test` need Python, make and a package index; everything goes into .venv.
# A stamp in .venv stands for each finished install, so that a second call installs nothing
# unless pyproject.toml or constraints.txt changed.

PYTHON ?= python3
BIN := .venv/bin
# Not compiled ahead: Python compiles what it imports, which is far less, and installing takes half the time.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: quickstart test test-again test-slow test-all test-latest test-browser test-slurm smoke lint format docs docs-reference clean
.NOTPARALLEL:

quickstart: .venv/.quickstart
	$(BIN)/ftcli quickstart

# Tests start hundreds of processes; each would compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

# tests/support/worker_groups.py makes the groups: all tests that start ranks, and the tests of each other file. In the
# order of collection, so that the group of the ranks, which is the longest, comes first.
WORKERS := -n 3 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
FAST := -m "not gpu and not slow and not full and not browser"

# Tests never reach for the model hub, and two processes share two cores.
test test-again test-slow test-all test-latest test-browser test-slurm smoke: export HF_HUB_OFFLINE := 1
test test-again test-slow test-all test-latest test-browser test-slurm smoke: export OMP_NUM_THREADS := 1

# Three workers on two cores, because half of the time of tests is waiting for processes.
test: lint
	$(BIN)/python -m pytest $(WORKERS) $(FAST) --durations 15

# The tests that did not pass in the last `make test`, one after the other. It ends at the first that fails again, and
# prints those that passed now as unstable: an unstable test is a bug.
test-again: .venv/.dev
	$(BIN)/python -m pytest $(FAST) --second-try --exitfirst

# `make test-slow GROUP=multiprocess` runs one group, a folder of tests/. A group that passed at this commit is not run
# again without FORCE=1.
test-slow: .venv/.dev
	$(BIN)/python tests/support/slow_groups.py $(GROUP:%=--group=%) $(if $(FORCE),--force) \
	    $(WORKERS) -m "slow and not gpu" --durations 15

test-all: test test-slow

# Reports in a real browser, from the Debian package chromium (apt-get install chromium).
test-browser: .venv/.dev
	$(BIN)/python -m pytest -m browser --durations 0

# Jobs on a real Slurm of two nodes on this machine. Needs root and: apt-get install slurm-wlm munge
test-slurm: .venv/.dev
	$(BIN)/python -m pytest tests/slurm/slurm_tests.py --timeout 900 --durations 0

# Whole smoke recipes on the models and data sets of the package index: several minutes each.
smoke: .venv/.dev
	$(BIN)/python -m pytest -m full --durations 0

# The fast tests with the newest version of each library below, beside the pinned torch, in an environment of its own.
# Versions above the bounds of pyproject.toml are installed on purpose: pip reports the conflict, the tests decide.
LATEST := .venv-latest/bin
NEWEST := accelerate transformers deepspeed peft datasets
TORCH := $(shell grep '^torch==' constraints.txt)

test-latest:
	[ -x $(LATEST)/pip ] || $(PYTHON) -m venv .venv-latest
	$(LATEST)/python -m pip install --quiet --no-compile '$(TORCH)'
	$(LATEST)/python -m pip install --quiet --no-compile '$(TORCH)' --editable '.[dev]'
	$(LATEST)/python -m pip install --quiet --no-compile --upgrade '$(TORCH)' $(NEWEST)
	@echo "tested versions, and those that constraints.txt pins:"
	@for name in torch $(NEWEST); do \
	    $(LATEST)/python -c "from importlib.metadata import version; print('  $$name', version('$$name'))"; \
	    sed -n "s/^$$name==/    pinned: /p" constraints.txt; \
	done
	$(LATEST)/python -m pytest $(WORKERS) $(FAST) --durations 15

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/support/type_check.py ftcli

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A broken link or a page that is missing from the navigation is an error (but not with --quiet, which hides them from
# --strict too). The result is build/docs/index.html.
docs: export NO_MKDOCS_2_WARNING := 1
docs: docs-reference
	$(BIN)/mkdocs build --strict

# The pages in docs/reference that are generated from the code, and the JSON Schema of recipes.
docs-reference: .venv/.docs
	$(BIN)/python docs/generators/write.py

# The user's own things stay: runs/ and .venv.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find ftcli tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/pip:
	$(PYTHON) -m venv .venv

# First and by itself: the largest download, and one that a change of pyproject.toml must not repeat.
.venv/.torch: constraints.txt | .venv/bin/pip
	@echo "installing torch into .venv (the largest download)"
	$(INSTALL) torch
	touch $@

.venv/.quickstart: pyproject.toml constraints.txt .venv/.torch
	@echo "installing ftcli into .venv"
	$(INSTALL) --editable '.[quickstart]'
	touch $@

.venv/.dev: pyproject.toml constraints.txt .venv/.torch
	@echo "installing ftcli and what its tests need into .venv"
	$(INSTALL) --editable '.[dev]'
	touch .venv/.quickstart $@

.venv/.docs: pyproject.toml constraints.txt .venv/.torch
	@echo "installing ftcli and what builds its documentation into .venv"
	$(INSTALL) --editable '.[docs]'
	touch $@
