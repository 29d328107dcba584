# make install   .venv with polyphily and the extra all: partitions, files, figures, Flower, privacy
# make demo      install, then train on six synthetic clients
# make test      install the test tools, then the whole test suite
# make test-deploy   the tests with a server and sites as processes, several minutes
# make notebooks   the tutorials as Jupyter notebooks, in docs/tutorials/notebooks
# make gallery   run the commands of docs/gallery and draw its pictures
# make test-oldest   the suite with the oldest supported versions, in .venv-oldest (Python 3.11)
# make test-newest   the suite with the newest versions, in .venv-newest
# make check     lint, format and type checks
# make docs      the documentation as a website, in site/; a broken link is an error
# make dist      wheel and sdist in dist/, checked
# make test-wheel    install the wheel in .venv-wheel, then the demo and each extra

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := install --quiet --disable-pip-version-check --constraint
PIP := $(BIN)/pip $(INSTALL) constraints.txt

.PHONY: install demo test test-deploy test-oldest test-newest notebooks gallery check docs format dist test-wheel clean

install: $(VENV)/.installed
demo: install
	$(BIN)/polyphily demo
test: $(VENV)/.tools
	$(BIN)/pytest -n auto
test-deploy: $(VENV)/.tools
	$(BIN)/pytest tests/flower tests/test_tutorials.py -m deploy --durations=0 -rP
notebooks: $(VENV)/.docs
	$(BIN)/jupytext --quiet --set-kernel python3 --to notebooks//ipynb docs/tutorials/*.py
gallery: install
	$(BIN)/python docs/gallery/make.py
test-oldest test-newest: test-%: .venv-%/.installed
	.venv-$*/bin/pytest -n auto
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
dist: .venv-dist/.installed
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
test-wheel: dist
	$(PYTHON) tests/wheel_trial.py dist/*.whl
clean:
	rm -rf $(VENV) .venv-* dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Before an environment is made: with an older Python, pip would fail over some package instead.
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
  sys.exit("Polyphily needs Python 3.11 or later, this is %d.%d. Name another, for example: make install PYTHON=python3.12" % sys.version_info[:2])'

$(BIN)/pip:
	@$(CHECK_PYTHON)
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

# By themselves: twine 7 needs a newer packaging than flwr and optuna allow.
.venv-dist/.installed:
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6.1'
	touch $@

.venv-%/.installed: constraints-%.txt pyproject.toml
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip $(INSTALL) $< torch
	.venv-$*/bin/pip $(INSTALL) $< --editable '.[test]'
	touch $@
