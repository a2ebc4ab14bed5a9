# `make reproduce`: from nothing to a verdict.  `make test`: everything that is checked.  Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup reproduce test parity lint types format

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

reproduce: $(READY)
	$(BIN)/clozelab run static-vs-dynamic-masking --scale cpu

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# A process a core, each with one thread; the tests of a file stay together.
test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=loadfile

# Against Hugging Face's classes; ends with a table of the largest differences.
parity: $(READY)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest tests/parity

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
