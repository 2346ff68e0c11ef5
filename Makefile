# Every command of the project. `make` lists them. Needs GNU make, a POSIX shell and Python 3.10 to 3.13.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# torch_xla has wheels for Linux on x86_64 alone; elsewhere the package works without it.
EXTRAS ?= $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),dev$(comma)xla,dev)
comma := ,

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# A test worker a core, four at most (each imports torch), with one thread each: more threads than cores are slower.
# A file's tests stay in one worker, so that its fixtures are made once.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile
CHECK_VERSION = import sys; v = sys.version_info[:2]; sys.exit("mutransformer needs Python 3.10 to 3.13, and \
	$(PYTHON) is %d.%d: name another, as in make PYTHON=python3.12 setup" % v if not (3, 10) <= v <= (3, 13) else 0)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup fit coordcheck transfer bench test test-slow lint format type contracts check docs plan-env clean distclean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo 'Variables: ARGS="..." is passed on, PYTHON=python3.12 makes the environment, VENV=.venv holds it.'

setup: $(STAMP) ## Make the environment in .venv; nothing is done where it is up to date

# Safe to repeat after an interruption: a venv without a working pip is made anew, and a package that pip had begun but
# not recorded is forgotten, so that pip installs it again.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: name a Python 3.10 to 3.13, as in make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c '$(CHECK_VERSION)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments: install its venv module (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@if [ -e $(VENV) ] && [ ! -e $(VENV)/pyvenv.cfg ] && [ -n "$$(ls -A $(VENV))" ]; then \
		echo "$(VENV) is there and is no Python environment: name another, as in make VENV=.venv2 setup"; exit 1; fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@for info in $(VENV)/lib/python*/site-packages/*.dist-info; do \
		[ ! -d "$$info" ] || [ -f "$$info/RECORD" ] || rm -rf "$$info"; done
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

fit: $(STAMP) ## Train the small model (ARGS="--trainer.max_steps=50" overrides its config)
	$(BIN)/mutransformer fit --config configs/small.yaml $(ARGS)

coordcheck: $(STAMP) ## Check that every tensor keeps its size as width grows: PASS or FAIL, about a minute
	$(BIN)/mutransformer coordcheck --config configs/coordcheck.yaml $(ARGS)

transfer: $(STAMP) ## Check that the best learning rate stays as width grows: PASS or FAIL, about an hour on two cores
	$(BIN)/mutransformer transfer --config configs/transfer.yaml --jobs 2 $(ARGS)

bench: $(STAMP) ## Compare the training step with others in speed and memory, about half an hour (ARGS="--shapes small")
	$(BIN)/python benchmarks/speed.py $(ARGS)

test: $(STAMP) ## Run all tests but the slow ones (ARGS="tests/mup -k rules" selects)
	$(PYTEST) -m "not slow" $(ARGS)

# pytest ends with 5 where nothing was collected: no fault as long as there is no slow test, unless ARGS selected.
test-slow: $(STAMP) ## Run the slow tests alone
	$(PYTEST) -m slow $(ARGS) || { code=$$?; [ $$code -eq 5 ] && [ -z "$${ARGS:-}" ] || exit $$code; }

lint: $(STAMP) ## Check style and format, change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## Format the code and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## Check types
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(STAMP) ## Check that imports between rooms run one way
	$(BIN)/lint-imports

check: lint type contracts ## Run lint, type and contracts

docs: $(STAMP) ## Write the configuration reference anew
	$(BIN)/python scripts/generate_reference.py

plan-env: $(STAMP) ## Make the environment that `mutransformer plan` compiles in, .venv-plan; Python 3.10 to 3.12
	$(PYTHON) -m venv $(VENV)-plan
	$(VENV)-plan/bin/python -m pip install --disable-pip-version-check \
		$$($(BIN)/python -c 'from mutransformer.xla.libtpu import VERSIONS; print(*map("==".join, VERSIONS.items()))')
	@echo 'use it by: export MUTRANSFORMER_PLAN_PYTHON=$(VENV)-plan/bin/python'

clean: ## Remove caches and build output; runs and the environment stay
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too
	[ ! -e $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)
