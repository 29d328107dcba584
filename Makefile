# make install   .venv with polyphily and the extra all: partitions, files, figures, Flower, privacy
# make demo      install, then train on ten synthetic clients
# make test      install the test tools, then the whole test suite
# make test-deploy   the tests with a server and sites as processes, several minutes
# make check     lint, format and type checks
# make docs      the documentation as a website, in site/; a broken link is an error

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install demo test test-deploy check docs format clean

install: $(VENV)/.installed
demo: install
	$(BIN)/polyphily demo
test: $(VENV)/.tools
	$(BIN)/pytest -n auto
test-deploy: $(VENV)/.tools
	$(BIN)/pytest tests/flower -m deploy --durations=0 -rP
check: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
docs: $(VENV)/.docs
	PYTHONPATH=docs $(BIN)/python -m website site
format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# torch first and by itself: resolved along with the rest, pip may fetch another build of it.
$(VENV)/.installed: $(BIN)/pip pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[all]'
	touch $@

$(VENV)/.tools: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@
