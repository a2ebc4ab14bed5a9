"""What a user gets wrong: one line that names the file or key and the way out, exit code 2, nothing trained."""

import subprocess
import sys
from pathlib import Path

import pytest

from clozelab.data.corpus import split_of
from tests.e2e.conftest import TINY


def train(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    base = [override for override in TINY if not override.startswith(("corpus.", "tracker"))]
    command = [sys.executable, "-m", "clozelab.cli", "train", *base, f"runs_dir={tmp_path / 'runs'}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)


def refused(done: subprocess.CompletedProcess[str], tmp_path: Path, *named: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in named:
        assert word in lines[0]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/**/record.json"))
    assert not list(tmp_path.glob("runs/**/metrics.jsonl"))


def text(tmp_path: Path, content: str) -> list[str]:
    (tmp_path / "mine.txt").write_text(content)
    return ["corpus=text", f"corpus.paths=[{tmp_path / 'mine.txt'}]"]


def test_missing_file(tmp_path: Path) -> None:
    refused(train(tmp_path, "corpus=text", "corpus.paths=[nowhere.txt]"), tmp_path, "nowhere.txt")


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_empty_or_blank_file(tmp_path: Path, content: str) -> None:
    refused(train(tmp_path, *text(tmp_path, content)), tmp_path, "mine.txt")


def test_one_document_with_nsp(tmp_path: Path) -> None:
    one = "".join(f"It is sentence {n} of some words. " for n in range(400))
    done = train(tmp_path, *text(tmp_path, one), "task=mlm_nsp", "corpus.validation=0", "tokenizer.vocab_size=300")
    refused(done, tmp_path, "task.pair=next", "document")


def test_a_yardstick_without_its_data_is_refused_before_training(tmp_path: Path) -> None:
    texts = [f"Document {n} has words of its own. It says {n} twice. " * 60 for n in range(60)]
    by_split = {split: [t for t in texts if split_of(t, 0.1, 0.0) == split] for split in ("train", "validation")}
    for n, text_ in enumerate([*by_split["train"][:11], by_split["validation"][0]]):
        (tmp_path / f"{n}.txt").write_text(text_)
    many = ["corpus=text", f"corpus.paths=[{tmp_path}/*.txt]", "corpus.validation=0.1"]
    done = train(tmp_path, *many, "task=mlm", "tokenizer.vocab_size=300")
    refused(done, tmp_path, "evaluation.sentence_pairs", "next")


def test_vocabulary_without_mask(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##a"]) + "\n")
    base = [o for o in TINY if not o.startswith("tokenizer")]
    command = [sys.executable, "-m", "clozelab.cli", "train", *base, "tokenizer=file"]
    command += [f"tokenizer.path={tmp_path / 'vocab.txt'}", f"runs_dir={tmp_path / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    refused(done, tmp_path, "vocab.txt", "[MASK]")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task=mlm_nps", "mlm_nps"),
        ("model.hiden=64", "did you mean model.hidden?"),
        ("model.layers=many", "layers"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("model.heads=5", "heads"),
        ("masking.rate=2", "masking.rate"),
        ("format.max_length=4096", "max_length"),
        ("batch_size=0", "batch_size"),
        ("trainer.accumulate=3", "accumulate"),
        ("trainer.precision=fp16", "trainer.precision"),
        ("trainer.strategy=zero", "trainer.strategy is 'zero'"),
        ("trainer.strategy=fsdp", "trainer.devices is 1"),
        ("nonsense=1", "nonsense"),
        ("seed", "seed"),
    ],
)
def test_unknown_option_or_wrong_value(tmp_path: Path, override: str, named: str) -> None:
    refused(train(tmp_path, override), tmp_path, named)


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    refused(train(tmp_path, "corpus.train_documents=4", f"runs_dir={tmp_path / 'taken'}"), tmp_path, "taken")


def test_unknown_claim_and_scale(tmp_path: Path) -> None:
    for arguments, named in ((["run", "sop-vs-npp"], "sop-vs-nsp"), (["run", "sop-vs-nsp", "--scale", "huge"], "huge")):
        command = [sys.executable, "-m", "clozelab.cli", *arguments]
        refused(subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path), tmp_path, named)
