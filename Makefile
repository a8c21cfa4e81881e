# Two targets are all that a newcomer needs: `make demo` and `make test`. Both set up whatever is missing.
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= gemma3-270m
# One process a core, at most four. A file's tests stay together, for the engines that they share; files in order, because
# those with engines come before the many small ones.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test test-all test-automodel test-upstream check format docs clean

help:
	@echo "make demo      set everything up and onboard $(MODEL), from checkpoint to report"
	@echo "make test      set everything up and run the tests (under 15 minutes on 2 cores)"
	@echo "make test-all  the slow tests too: real weights, 20 seeds of every model, full fault table"
	@echo "make test-automodel  our training classes inside NeMo AutoModel, which is installed beside them for it"
	@echo "make test-upstream  vLLM's own tests against this target; counts go to docs/upstream.md"
	@echo "make check     formatting, lint, types, import layers"
	@echo "make format    apply the formatting"
	@echo "make docs      regenerate what is generated in docs/ and README tables"
	@echo "make setup     only the environment, in $(VENV)"

setup:
	@VENV=$(VENV) bash scripts/setup.sh

demo: setup
	$(BIN)/pilotage onboard $(MODEL)

test: setup
	@bash scripts/install-chromium.sh
	$(PYTEST) -m "not slow"

test-all: setup
	@bash scripts/install-chromium.sh
	$(PYTEST)

# It asks for an older transformers than ours: without its dependencies, and out of the way of the other tests.
AUTOMODEL := $(VENV)/automodel
$(AUTOMODEL)/nemo_automodel: | setup
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --target $(AUTOMODEL) nemo-automodel==0.7.0

test-automodel: setup $(AUTOMODEL)/nemo_automodel
	PYTHONPATH=$(AUTOMODEL) $(BIN)/python -m pytest tests/parity/test_training_automodel.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-upstream: setup
	$(BIN)/python tests/upstream/run.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .setup .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
