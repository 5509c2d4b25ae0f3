# Everything that needs an environment makes it first: a machine with Python 3.10 to 3.14 and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-benchmarks test-slow notebooks lint types doctest check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## AsyncGEPA beside dspy.GEPA on the embedded server, in under two minutes
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.installed  ## the test suite and the examples in the docstrings
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/python -m pytest --quiet --doctest-modules dspy_flashevolve

test-benchmarks: $(VENV)/.installed  ## the tests of the benchmarks and of the notebooks
	$(BIN)/python -m pytest -n auto --dist worksteal tests/benchmarks

test-slow: $(VENV)/.installed  ## the slow suites; see tests/contract/dspy_suite and FLASHEVOLVE_VLLM_BASE
	$(BIN)/python -m pytest -m "slow or vllm"

notebooks: $(VENV)/.installed  ## run the notebooks, and save their outputs in them
	TQDM_DISABLE=1 $(BIN)/python -m pytest --nbmake --overwrite notebooks

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright

check: test test-benchmarks lint types  ## all that CI runs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
