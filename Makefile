# Everything that needs an environment makes it first: a machine with Python 3.10 to 3.14 and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# For test-pythons: versions that uv finds or downloads, or paths of interpreters.
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
# The fast part of what users are promised, on an installed package.
PROMISES := tests/contract/test_public_surface.py tests/contract/test_beside_gepa.py tests/contract/test_lockstep.py \
	tests/contract/test_async_gepa.py tests/contract/test_printing.py tests/contract/test_budget.py tests/gepa

# The tests start many processes: without bytecode each of them compiles the package anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo docs test test-benchmarks test-long test-newest test-pythons test-ray test-slow notebooks lint types dist check clean

$(VENV)/.installed: pyproject.toml
	@echo "Making an environment in $(VENV): once, some minutes, about 1.4 GB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## AsyncGEPA beside dspy.GEPA on the embedded server: about two minutes
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.installed  ## the test suite and the examples in the docstrings
	$(BIN)/python -m pytest -n auto --dist worksteal
	$(BIN)/python -m pytest --quiet --doctest-modules dspy_flashevolve

test-long: $(VENV)/.installed  ## what `make test` leaves out: kills, many seeds, further cases
	$(BIN)/python -m pytest -n auto --dist worksteal -m "long and not slow"

test-benchmarks: $(VENV)/.installed  ## the tests of the benchmarks and of the notebooks
	$(BIN)/python -m pytest -n auto --dist worksteal tests/benchmarks

test-ray: $(VENV)/.installed  ## the tests of rollouts in Ray's actors
	$(BIN)/python -m pytest -n auto --dist worksteal -m ray

test-slow: $(VENV)/.installed  ## the slow suites; see tests/contract/dspy_suite and FLASHEVOLVE_VLLM_BASE
	$(BIN)/python -m pytest -m "slow or vllm"

notebooks: $(VENV)/.installed  ## run the notebooks on the server at API_BASE, and save their outputs in them
	$(BIN)/python -m pytest --nbmake --overwrite notebooks
	$(BIN)/jupyter nbconvert --log-level ERROR --to notebook --inplace --coalesce-streams notebooks/*.ipynb

docs: $(VENV)/.installed  ## the documentation, in site/; a warning is an error, and so is a Python block that does not run
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -n auto -m pages

dist: $(VENV)/.installed  ## the wheel and the source distribution, in dist/, checked as a package index checks them
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

test-newest:  ## the same promises on the newest releases and pre-releases of dspy and gepa, bounds or not
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check '.[sim]' hypothesis pytest pytest-xdist
	build/newest/bin/python -m pip install --quiet --disable-pip-version-check --pre --upgrade dspy gepa
	build/newest/bin/python -m pip list | grep -E '^(dspy|gepa) '
	build/newest/bin/python -m pytest -n auto --dist worksteal $(PROMISES)

test-pythons:  ## the same promises on other Pythons, each in an environment that uv makes and throws away
	for version in $(PYTHONS); do \
	  uv run --isolated --no-project --python $$version --with '.[sim]' --with hypothesis --with pytest \
	    --with pytest-xdist python -m pytest -n auto --dist worksteal $(PROMISES) || exit 1; \
	done

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/pyright

check: test test-long test-ray test-benchmarks lint types docs  ## all that CI runs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist site
