# `make reproduce`: from nothing to a verdict.  `make test`: everything that is checked.  Both set up .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup reproduce test parity launchers lint types zh format

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

# Every way in which a cell can die, on every launcher; `make test` leaves out those whose packages are not installed.
launchers: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[joblib,slurm,ray,optuna]'
	$(BIN)/python -m pytest tests/e2e/test_failure_matrix.py

# Two minutes of a tiny Chinese BERT with whole words hidden, and what it then puts in the place of [MASK].
# DATA holds zh_novels/ (texts) and vocab/bert-base-chinese-vocab.txt.
DATA ?= ../shared/data
zh: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[zh]'
	$(BIN)/clozelab train corpus=text 'corpus.paths=[$(DATA)/zh_novels/*.jsonl.xz]' corpus.language=zh \
		tokenizer=file tokenizer.path=$(DATA)/vocab/bert-base-chinese-vocab.txt tokenizer.words=jieba \
		masking=whole_word model=bert_tiny optimizer.lr=3e-3 budget=seconds budget.seconds=120 batch_size=32 \
		evaluation=[heldout_mlm] tracker=none runs_dir=runs/zh
	$(BIN)/clozelab fill "$$(ls -td runs/zh/train/*/ | head -1)" '话说[MASK][MASK]听了大怒。' '宝玉笑[MASK]：“你来了。”' '却[MASK]孙行者驾云而去。'

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
