# make install   .venv with polyphily and the extra all: partitions, files, figures, Flower, privacy
# make demo      install, then train on six synthetic clients
# make test      install the test tools, then the whole test suite
# make test-deploy   the tests with a server and sites as processes, several minutes
# make notebooks   the tutorials as Jupyter notebooks, in docs/tutorials/notebooks
# make gallery   run the commands of docs/gallery and draw its pictures
# make check     lint, format and type checks

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: install demo test test-deploy notebooks gallery check format clean

install: $(VENV)/.installed
demo: install
	$(BIN)/polyphily demo
test: $(VENV)/.tools
	$(BIN)/pytest -n auto
test-deploy: $(VENV)/.tools
	$(BIN)/pytest tests/flower tests/test_tutorials.py -m deploy --durations=0 -rP
notebooks: install
	$(PIP) --editable '.[docs]'
	$(BIN)/jupytext --quiet --set-kernel python3 --to notebooks//ipynb docs/tutorials/*.py
gallery: install
	$(BIN)/python docs/gallery/make.py
check: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

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
