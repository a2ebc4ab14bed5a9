"""Building a store: by any number of processes, after any interruption, the same bytes; and told of on the way."""

import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from datahelp import document

from clozelab.data import building, pieces, progress, workers
from clozelab.data.building import Sizes
from clozelab.data.corpora.text import Text
from clozelab.data.corpus import Raw, digest, sentences
from clozelab.data.pieces import Encoded, Encoder
from clozelab.data.progress import Progress
from clozelab.data.store import Store, data_fingerprint, open_store
from clozelab.data.tokenizers import FileOption, TokenizerOption, WordPieceOption
from clozelab.data.workers import WorkerLost, processes

VOCABULARY = (
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz0123456789.,!?=",
    *(f"##{sign}" for sign in "abcdefghijklmnopqrstuvwxyz0123456789"), *"我来到北京清华大学他在里习自然语言处理。",
)  # fmt: skip
TINY = Sizes(piece=3000, alone=3000)


def write_corpus(folder: Path, documents: int = 60) -> Text:
    """Documents of every kind: BOM, CRLF, emoji, lone CR, no token, equal twice, long, one line."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    for n in range(documents):
        text = document(rng, int(rng.integers(1, 60)))
        kinds = {
            0: "\ufeff" + text.replace("\n", "\r\n"),
            1: text.replace(".", " 😀 naïve “quoted” — end.\u2028"),
            2: text.replace("\n\n", "\r\r"),
            3: "\x07",
            4: "The same text stands here. Twice or more.",
            5: text.replace("\n\n", " ") * 5,
            6: "我来到北京清华大学。他在大学里学习自然语言处理。" * 9,
        }
        (folder / f"{n:03}.txt").write_bytes(kinds.get(n % 9, text).encode())
    return Text(paths=[str(folder / "*.txt")], validation=0.2, test=0.1)


def option(folder: Path, words: str | None = None) -> FileOption:
    path = folder / "vocab.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(VOCABULARY), encoding="utf-8")
    return FileOption(path=str(path), words=words)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, other processes from the first on, a checkpoint after each."""
    monkeypatch.setattr(building, "PLAIN", TINY)
    monkeypatch.setattr(building, "SEGMENTED", TINY)
    monkeypatch.setattr(building, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture
def built(tmp_path: Path) -> tuple[Text, FileOption, Store]:
    """A store as one process makes it in one go, with the sizes that are usual."""
    corpus, tokenizer = write_corpus(tmp_path / "text"), option(tmp_path)
    return corpus, tokenizer, open_store(corpus, tokenizer, tmp_path / "whole")


def unfinished(cache: Path, corpus: Text, tokenizer: TokenizerOption) -> Path:
    return cache / f".{data_fingerprint(corpus, tokenizer)}.unfinished"


def ended(pids: list[int]) -> bool:
    """Whether the processes end within some seconds."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.05)
    return False


class Counted:
    """Stands in for `Encoder.__call__` and counts the documents that pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> None:
        self.documents = 0
        encode = Encoder.__call__

        def counting(encoder: Encoder, texts: list[bytes]) -> Encoded:
            if stop_after is not None and self.documents >= stop_after:
                raise KeyboardInterrupt
            self.documents += len(texts)
            return encode(encoder, texts)

        monkeypatch.setattr(Encoder, "__call__", counting)


@pytest.mark.parametrize(("count", "words"), [(1, None), (2, None), (3, None), (1, "jieba"), (3, "jieba")])
def test_any_number_of_processes_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, words: str | None
) -> None:
    if words is not None:
        pytest.importorskip("jieba", reason="needs jieba: pip install clozelab[zh]")
    corpus, tokenizer = write_corpus(tmp_path / "text"), option(tmp_path, words)
    whole = open_store(corpus, tokenizer, tmp_path / "whole")
    monkeypatch.setattr(building, "PLAIN", TINY)
    monkeypatch.setattr(building, "SEGMENTED", TINY)
    monkeypatch.setattr(pieces, "BATCH", 7)
    monkeypatch.setenv("CLOZELAB_PROCESSES", str(count))
    started = list[Any]()
    worker = workers._Worker.__init__
    monkeypatch.setattr(
        workers._Worker, "__init__", lambda self, encoder: started.append(self) or worker(self, encoder)
    )
    here = Counted(monkeypatch)
    parts = open_store(corpus, tokenizer, tmp_path / "parts")
    assert contents(whole.path) == contents(parts.path)
    assert len(started) == (0 if count == 1 else count)
    assert here.documents == (0 if count > 1 else 60)
    assert sum(counts["duplicates"] for counts in parts.counts.values()) == 6 + 5  # of kind 4, and of kind 6
    assert (parts.words is not None) == (words is not None)
    assert all(one._process.returncode is not None for one in started)


def test_the_store_holds_what_the_corpus_says(built: tuple[Text, FileOption, Store]) -> None:
    corpus, _, store = built
    documents = [d for d in corpus.read() if d.text != "\x07"]
    assert store.document_hashes.tolist() == [d.content for d in documents]
    for d in (0, 1, 4, 5, 6):
        found = [ids for ids in store.tokenizer.encode_batch(sentences(documents[d].text, "en")) if len(ids)]
        first, end = store.document_offsets[d : d + 2]
        assert [store.sentence(n).tolist() for n in range(first, end)] == [ids.tolist() for ids in found]


def test_a_small_corpus_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers, "_Worker", refuse)
    monkeypatch.setenv("CLOZELAB_PROCESSES", "4")
    open_store(write_corpus(tmp_path / "text"), option(tmp_path), tmp_path / "cache")
    monkeypatch.setattr(building, "PLAIN", TINY)
    with pytest.raises(AssertionError, match="a process was started"):
        open_store(write_corpus(tmp_path / "text"), option(tmp_path), tmp_path / "cache2")


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_processes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("CLOZELAB_PROCESSES", given)
    with pytest.raises(ValueError, match=rf"^CLOZELAB_PROCESSES is '{given}'; give .*") as caught:
        open_store(write_corpus(tmp_path / "text"), option(tmp_path), tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_processes_are_the_cpus_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOZELAB_PROCESSES", raising=False)
    for cpus, expected in ((1, 1), (5, 5), (200, workers.MOST)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: set(range(cpus)), raising=False)
        assert processes() == expected
    monkeypatch.setenv("CLOZELAB_PROCESSES", "40")
    assert processes() == 40


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("count", ["1", "3"])
def test_an_interrupted_build_goes_on(
    tmp_path: Path, built: tuple[Text, FileOption, Store], monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    corpus, tokenizer, whole = built
    monkeypatch.setenv("CLOZELAB_PROCESSES", count)
    with monkeypatch.context() as patch:
        add, calls = building._Writer.add, list[int]()

        def interrupted(self: Any, encoded: Encoded, documents: int) -> None:
            if len(calls) == 4:
                self._files["ids"].write(
                    b"torn" * 100_000
                )  # in the middle of a piece, and longer than all that follows
                raise KeyboardInterrupt
            calls.append(documents)
            add(self, encoded, documents)

        patch.setattr(building._Writer, "add", interrupted)
        patch.setattr(building, "CHECKPOINT_SECONDS", 1e9)  # the interruption itself must write the state
        with pytest.raises(KeyboardInterrupt):
            open_store(corpus, tokenizer, tmp_path / "cache")
    left = unfinished(tmp_path / "cache", corpus, tokenizer)
    state = json.loads((left / "state.json").read_text())["state"]
    assert state["read"] == sum(calls) > 0
    monkeypatch.setenv("CLOZELAB_PROCESSES", "1")
    counted = Counted(monkeypatch)
    store = open_store(corpus, tokenizer, tmp_path / "cache")
    assert counted.documents == 60 - sum(calls)
    assert contents(store.path) == contents(whole.path)
    assert not left.exists()


KILLED = """
import sys, time
from pathlib import Path
from clozelab.data import building
from clozelab.data.building import Sizes
from clozelab.data.corpora.text import Text
from clozelab.data.store import open_store
from clozelab.data.tokenizers import FileOption
building.PLAIN = Sizes(3000, 3000)
building.CHECKPOINT_SECONDS = 0.0
add = building._Writer.add
def slow(self, encoded, documents):
    add(self, encoded, documents)
    if self.state.read > 20:
        print("ready", flush=True)
        time.sleep(60)
building._Writer.add = slow
corpus = Text(paths=[sys.argv[1] + "/text/*.txt"], validation=0.2, test=0.1)
open_store(corpus, FileOption(path=sys.argv[1] + "/vocab.txt"), Path(sys.argv[1]) / "cache")
"""


@contextlib.contextmanager
def halfway(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """(a build that stands still after some pieces, its workers)."""
    environment = os.environ | {"CLOZELAB_PROCESSES": "2"}
    command = [sys.executable, "-c", KILLED, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
            yield run, [child.pid for child in psutil.Process(run.pid).children()]
        finally:
            run.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_build_goes_on_and_leaves_no_process(
    tmp_path: Path, built: tuple[Text, FileOption, Store], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    corpus, tokenizer, whole = built
    with halfway(tmp_path) as (run, children):
        assert len(children) == 2
        for child in children:
            assert psutil.Process(child).environ()["TOKENIZERS_PARALLELISM"] == "false"
        run.send_signal(number)
        _, errors = run.communicate(timeout=30)
    assert ended(children)
    assert "fork" not in errors
    left = unfinished(tmp_path / "cache", corpus, tokenizer)
    read = json.loads((left / "state.json").read_text())["state"]["read"]
    assert 20 < read < 60
    with (left / "ids.bin").open("ab") as file:
        file.write(b"what had been written after the state")
    counted = Counted(monkeypatch)
    store = open_store(corpus, tokenizer, tmp_path / "cache")
    assert counted.documents == 60 - read
    assert contents(store.path) == contents(whole.path)


def _cut(folder: Path) -> None:
    with (folder / "ids.bin").open("r+b") as file:
        file.truncate(10)


def _zeros(folder: Path) -> None:
    path = folder / "sentence_offsets.bin"
    path.write_bytes(bytes(path.stat().st_size))


def _state(change: Any, sealed: bool = False) -> Any:
    def apply(folder: Path) -> None:
        path = folder / "state.json"
        found = change(json.loads(path.read_text()))
        path.write_text(json.dumps(found | {"digest": digest(found["state"])} if sealed else found))

    return apply


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "state.json").write_text('{"version": [1, 1], "sta'),
        lambda folder: (folder / "state.json").write_bytes(b"\0" * 200),
        lambda folder: (folder / "state.json").write_text("[]"),
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / "splits.bin").unlink(),
        _cut,
        _zeros,
        _state(lambda state: state | {"version": [0, 0]}),
        _state(lambda state: state | {"tokenizer": "another"}),
        _state(lambda state: state | {"state": state["state"] | {"read": "x"}}),
        _state(lambda state: state | {"state": state["state"] | {"last": 1}}, sealed=True),
        _state(lambda state: state | {"state": state["state"] | {"read": 1000}}, sealed=True),
        _state(lambda state: state | {"state": state["state"] | {"counts": {}}}),
        _state(lambda state: state | {"state": {"read": 1}}),
        _state(lambda state: {key: value for key, value in state.items() if key != "digest"}),
    ],
)
def test_what_cannot_be_gone_on_with_is_started_again(
    tmp_path: Path, built: tuple[Text, FileOption, Store], monkeypatch: pytest.MonkeyPatch, harm: Any
) -> None:
    corpus, tokenizer, whole = built
    monkeypatch.setenv("CLOZELAB_PROCESSES", "1")
    with monkeypatch.context() as patch:
        Counted(patch, stop_after=20)
        with pytest.raises(KeyboardInterrupt):
            open_store(corpus, tokenizer, tmp_path / "cache")
    harm(unfinished(tmp_path / "cache", corpus, tokenizer))
    counted = Counted(monkeypatch)
    store = open_store(corpus, tokenizer, tmp_path / "cache")
    assert counted.documents == 60
    assert contents(store.path) == contents(whole.path)


@pytest.mark.usefixtures("tiny")
def test_train_documents_and_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, tokenizer = write_corpus(tmp_path / "text"), option(tmp_path)
    corpus.train_documents = 25
    whole = open_store(corpus, tokenizer, tmp_path / "whole")
    total = whole.counts["train"]["documents"]
    assert total <= 25
    monkeypatch.setenv("CLOZELAB_PROCESSES", "1")
    with monkeypatch.context() as patch:
        Counted(patch, stop_after=15)
        with pytest.raises(KeyboardInterrupt):
            open_store(corpus, tokenizer, tmp_path / "cache")
    assert contents(open_store(corpus, tokenizer, tmp_path / "cache").path) == contents(whole.path)


def _open(folder: Path) -> bool:
    building.PLAIN = TINY
    os.environ["CLOZELAB_PROCESSES"] = "2"
    corpus = Text(paths=[str(folder / "text" / "*.txt")], validation=0.2, test=0.1)
    return open_store(corpus, FileOption(path=str(folder / "vocab.txt")), folder / "cache").hit


def test_two_builds_at_once_make_one_store(tmp_path: Path, built: tuple[Text, FileOption, Store]) -> None:
    _, _, whole = built
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        hits = pool.map(_open, [tmp_path] * 2, chunksize=1)
    assert sorted(hits) == [False, True]
    assert contents(tmp_path / "cache" / whole.path.name) == contents(whole.path)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [whole.path.name]


class Failing(Encoder):
    """Raises at a document that says so, kills its own process at another."""

    def __call__(self, texts: list[bytes]) -> Encoded:
        if any(b"RAISE" in text for text in texts):
            raise ValueError("this document cannot be encoded")
        if any(b"UNSENDABLE" in text for text in texts):
            raise Unsendable(1, 2)
        if any(b"KILL" in text for text in texts) and multiprocessing.current_process().pid != self.__dict__["parent"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(texts)


class Unsendable(Exception):
    """Cannot be made again from its pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def failing(tokenizer: Any, language: str, words: str | None) -> Failing:
    made = Failing(tokenizer, language, words)
    made.__dict__["parent"] = os.getpid()
    return made


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("count", ["1", "2"])
@pytest.mark.parametrize("cause", ["worker", "source", "disk", "unsendable"])
def test_an_error_comes_out_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: str, cause: str) -> None:
    corpus, tokenizer, cache = write_corpus(tmp_path / "text"), option(tmp_path), tmp_path / "cache"
    message: str = "this document cannot be encoded"
    kind: type[Exception] = ValueError
    if cause == "worker":
        (tmp_path / "text" / "030.txt").write_text("RAISE")
    elif cause == "unsendable":
        (tmp_path / "text" / "030.txt").write_text("UNSENDABLE")
        kind, message = (Unsendable, "1 2") if count == "1" else (RuntimeError, "Unsendable: 1 2")
    elif cause == "source":
        (tmp_path / "text" / "030.txt").write_bytes(b"good\nb\xe9d\n")
        message = r"030\.txt, line 2: the bytes are not UTF-8"
    else:
        message = f"no room in the cache folder {cache}"
        add = building._Writer.add

        def full(self: Any, encoded: Encoded, documents: int) -> None:
            if self.state.read > 20:
                self._files["ids"] = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
            add(self, encoded, documents)

        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        monkeypatch.setattr(building._Writer, "add", full)
    monkeypatch.setattr(building, "Encoder", failing)
    monkeypatch.setenv("CLOZELAB_PROCESSES", count)
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(kind, match=message) as caught:
        open_store(corpus, tokenizer, cache)
    assert "\n" not in str(caught.value)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert not [path for path in cache.iterdir() if path.is_dir()]


@pytest.mark.usefixtures("tiny")
def test_a_killed_worker_is_told_and_the_rest_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, tokenizer = write_corpus(tmp_path / "text"), option(tmp_path)
    (tmp_path / "text" / "040.txt").write_text("KILL")
    whole = open_store(corpus, tokenizer, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(building, "Encoder", failing)
        patch.setenv("CLOZELAB_PROCESSES", "2")
        with pytest.raises(WorkerLost, match=r"was ended by SIGKILL.*CLOZELAB_PROCESSES") as caught:
            open_store(corpus, tokenizer, tmp_path / "cache")
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CLOZELAB_PROCESSES", "1")
    counted = Counted(monkeypatch)
    assert contents(open_store(corpus, tokenizer, tmp_path / "cache").path) == contents(whole.path)
    assert 20 <= counted.documents < 60


def test_workers_say_nothing_about_forks_and_print_nothing_between_answers(tmp_path: Path) -> None:
    # The parent has threads and has used the library in parallel: what makes a forked child warn or hang.
    write_corpus(tmp_path / "text")
    option(tmp_path)
    code = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "import tokenizers; tokenizers.Tokenizer(tokenizers.models.BPE()).encode_batch(['a'] * 1000)\n"
    ) + KILLED.replace("> 20", "> 10**6")
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    environment["CLOZELAB_PROCESSES"] = "2"
    command = [sys.executable, "-W", "always", "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == ""
    assert "fork" not in done.stderr.lower()
    assert "parallelism" not in done.stderr.lower()


class Long(Text):
    """A corpus that never stands in memory."""

    number = 3000

    def source(self) -> Iterator[Raw]:
        text = document(np.random.default_rng(5), 200)
        for n in range(self.number):
            yield Raw(str(n), f"Number {n}. {text}", (n + 1) / self.number)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "text", 1)
    monkeypatch.setattr(building, "PLAIN", Sizes(1 << 18, 1 << 19))
    monkeypatch.setenv("CLOZELAB_PROCESSES", "2")
    peaks = {}
    for number in (400, 3000):  # 6 and 45 MB
        corpus = Long(paths=[str(tmp_path / "text" / "*.txt")], validation=number / 1e5)
        monkeypatch.setattr(Long, "number", number)
        tracemalloc.start()
        try:
            store = open_store(corpus, option(tmp_path), tmp_path / "cache")
            peaks[number] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(store.splits) == number
    assert peaks[3000] < 1.3 * peaks[400]
    assert peaks[3000] < 12e6


def test_a_long_document_is_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = option(tmp_path).load(list, "", tmp_path)
    sizes = list[int]()
    flat = type(tokenizer).encode_flat
    monkeypatch.setattr(
        type(tokenizer), "encode_flat", lambda self, batch: sizes.append(len(batch)) or flat(self, batch)
    )
    one_paragraph = b"A river runs here. " * 20_000
    texts = [b"First.", one_paragraph, b"Last one. It ends."]
    encoded = Encoder(tokenizer, "en", None)(texts)
    assert texts == []
    assert encoded.sentences_D.tolist() == [1, 20_000, 2]
    assert encoded.tokens_D.sum() == len(encoded.ids_T) == encoded.lengths_N.sum()
    assert max(sizes) == pieces.BATCH


def test_an_encoder_travels(tmp_path: Path) -> None:
    made = Encoder(option(tmp_path).load(list, "", tmp_path), "en", None)
    again = pickle.loads(pickle.dumps(made))
    assert np.array_equal(made([b"A river."]).ids_T, again([b"A river."]).ids_T)


def test_the_log_tells_of_a_large_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, tokenizer = write_corpus(tmp_path / "text"), option(tmp_path)
    monkeypatch.setattr(building, "PLAIN", TINY)
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="clozelab")
    open_store(corpus, tokenizer, tmp_path / "small")
    assert caplog.messages == []
    monkeypatch.setattr(progress, "QUIET", 10_000)
    store = open_store(corpus, tokenizer, tmp_path / "large")
    tokens, documents = f"{len(store.ids):,} tokens", "60 documents"
    assert tokens in caplog.messages[-1]
    assert documents in caplog.messages[-1]
    assert "100% done" in caplog.messages[-1]
    assert any("MB/s" in message and "left" in message for message in caplog.messages[:-1])


def test_a_terminal_is_shown_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    with Progress("corpus quiet") as small:
        small.add(1, 10, progress.QUIET - 1, 0.5)
    assert capsys.readouterr().err == ""
    with Progress("corpus [one]") as large:
        large.add(3, 1234, 9_000_000, 0.25)
    assert "corpus [one]: 3 documents, 1,234 tokens" in (shown := capsys.readouterr().err)
    assert "25% done" in shown
    assert " left" in shown


def test_time_left_follows_from_this_start_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    fresh = Progress("x")
    now[0] = 10.0
    fresh.add(1, 1, 20_000_000, 0.2)
    assert fresh.seconds_left == pytest.approx(40)
    assert "2.0 MB/s" in fresh.line()
    fresh.add(1, 1, 1, None)
    assert fresh.seconds_left is None
    now[0] = 0.0
    resumed = Progress("x")
    resumed.resume(100, 100, 50_000_000)
    now[0] = 7.0  # spent on skipping
    resumed.add(1, 1, 1_000_000, 0.5)
    assert resumed.seconds_left is None
    now[0] = 17.0
    resumed.add(1, 1, 10_000_000, 0.6)
    assert resumed.seconds_left == pytest.approx(40)
    assert "102 documents" in resumed.line()
    assert "1.0 MB/s" in resumed.line()


def test_a_trained_tokenizer_is_told_of_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(progress, "QUIET", 10_000)
    caplog.set_level(logging.INFO, logger="clozelab")
    open_store(write_corpus(tmp_path / "text"), WordPieceOption(vocab_size=400), tmp_path / "cache")
    assert any(message.startswith("tokenizer for text (") for message in caplog.messages)
