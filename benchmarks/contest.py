"""What the benchmarks of the data engine share: the text, the clock, and contestants that take turns.

Every measurement is a process of its own: the script calls itself with `--only NAME`, and the last line of what that
prints is one JSON object. A contestant gives wall and CPU seconds of its timed part; CPU time counts the process and
the children it waited for, and is the steadier one on a busy machine.
"""

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clozelab.data.store import Store
from clozelab.data.tokenizers import FileOption

Result = dict[str, Any]
Contestant = Callable[[], Result]

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclasses.dataclass
class Spent:
    """Seconds of a timed part."""

    wall: float = 0.0
    cpu: float = 0.0

    def per(self, times: int) -> Result:
        """Both, divided by how often the thing was done."""
        return {"wall": self.wall / times, "cpu": self.cpu / times}


def _cpu() -> float:
    every = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in every)


@contextmanager
def clock() -> Iterator[Spent]:
    """Fills what it gives when the block ends."""
    spent = Spent()
    wall, cpu = time.perf_counter(), _cpu()
    yield spent
    spent.wall, spent.cpu = time.perf_counter() - wall, _cpu() - cpu


def parser(text: str, megabytes: float) -> argparse.ArgumentParser:
    """The arguments that all have."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--text", help="a file as corpus.paths takes it (default: the packaged messages)")
    made.add_argument(
        "--documents", default="blank_line", help="what parts documents of plain text: blank_line, heading or file"
    )
    made.add_argument("--vocab", type=Path, help="a WordPiece vocab.txt (default: 8192 entries trained on the text)")
    made.add_argument("--mb", type=float, default=megabytes, help="size of the text in millions of signs")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--only", help=argparse.SUPPRESS)
    return made


def prepare(work: Path, arguments: argparse.Namespace, lines: str) -> None:
    """Write `work`/text.txt and `work`/vocab.txt.

    Args:
        work: where to.
        arguments: of `parser`.
        lines: sentences or paragraphs: what a line of the text is. A blank line parts documents. The text is repeated,
            or cut off, to have the size asked for.
    """
    from clozelab.data.corpora.sotu import Sotu
    from clozelab.data.corpora.text import Text
    from clozelab.data.corpus import sentences
    from clozelab.data.tokenizers import WordPieceOption

    text = arguments.text
    corpus = Sotu() if text is None else Text(paths=[text], document_separator=arguments.documents)
    size = int(arguments.mb * 1e6)
    parts: list[str] = []
    length = 0
    for document in corpus.read():
        made = sentences(document.text, "en") if lines == "sentences" else document.text.split("\n\n")
        parts.append("\n".join(made) + "\n\n")
        length += len(parts[-1])
        if length >= size:
            break
    whole = "".join(parts)
    whole = (whole * (size // len(whole) + 1))[:size]
    (work / "text.txt").write_text(whole, encoding="utf-8")
    if arguments.vocab is not None:
        (work / "vocab.txt").write_bytes(arguments.vocab.read_bytes())
        return
    tokenizer = WordPieceOption().load(lambda: parts, "benchmark", work / "trained")
    entries = sorted(tokenizer.inner.get_vocab().items(), key=lambda item: item[1])
    (work / "vocab.txt").write_text("\n".join(word for word, _ in entries), encoding="utf-8")


def tokenizer_option(work: Path) -> FileOption:
    """The one tokenizer of all contestants."""
    return FileOption(path=str(work / "vocab.txt"), lowercase=True)


def build_store(work: Path, cache: Path) -> Store:
    """The store of the text, built if `cache` has none."""
    from clozelab.data.corpora.text import Text
    from clozelab.data.store import open_store

    corpus = Text(paths=[str(work / "text.txt")], document_separator="blank_line", paragraphs="line", validation=0)
    return open_store(corpus, tokenizer_option(work), cache)


def hf_tokenizer(work: Path) -> Any:
    """The same definition as a tokenizer of `transformers`."""
    import transformers

    inner = tokenizer_option(work).load(list, "", work).inner
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIALS}
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=inner, **names)


def race(script: str, names: list[str], arguments: argparse.Namespace, work: Path) -> dict[str, list[Result]]:
    """What every contestant gave in every round; they take turns."""
    passed = {key: value for key, value in vars(arguments).items() if key not in ("text", "vocab", "work", "only")}
    options = [word for key, value in passed.items() for word in (f"--{key}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    found: dict[str, list[Result]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name in names:
            command = [sys.executable, script, "--work", str(work), "--only", name, *options]
            got = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            result = json.loads(got.stdout.splitlines()[-1])
            found[name].append(result)
            print(f"round {number + 1}: {name:20} {result['wall']:.6f} s, CPU {result['cpu']:.6f} s", flush=True)
    return found


def median(runs: list[Result], key: str) -> float:
    """Median over the rounds."""
    return float(statistics.median(run[key] for run in runs))


def ratios(found: dict[str, list[Result]], pairs: dict[str, tuple[str, str]], key: str) -> dict[str, float]:
    """How many times as long the peer takes: `pairs` gives (peer, ours) of each ratio."""
    return {name: round(median(found[peer], key) / median(found[ours], key), 2) for name, (peer, ours) in pairs.items()}


def run(
    script: str,
    contestants: Callable[[argparse.Namespace], dict[str, Contestant]],
    arguments: argparse.Namespace,
    lines: str,
    pairs: dict[str, tuple[str, str]],
    goals: dict[str, float],
    gate: Callable[[dict[str, list[Result]]], Result],
) -> None:
    """Be one contestant, or let all of them race and print the last line.

    Args:
        script: file of the benchmark.
        contestants: name -> what it does, of the arguments.
        arguments: of `parser`.
        lines: what a line of the text is (`prepare`).
        pairs: ratio -> (peer, ours).
        goals: ratio -> at least; a ratio without a goal is told all the same.
        gate: quality of what was made: figures, and `passed`.
    """
    if arguments.only:
        print(json.dumps(contestants(arguments)[arguments.only]()))
        return
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, arguments, lines)
        build_store(work, work / "cache")
        found = race(script, list(contestants(arguments)), arguments, work)
    wall, cpu = (ratios(found, pairs, key) for key in ("wall", "cpu"))
    result = {
        "benchmark": Path(script).stem,
        "ratios": wall,
        "cpu_ratios": cpu,
        "goals": goals,
        "met": {name: wall[name] >= goal for name, goal in goals.items()},
        "quality": gate(found),
        "wall_s": {name: median(runs, "wall") for name, runs in found.items()},
        "cpu_s": {name: median(runs, "cpu") for name, runs in found.items()},
        "mb": arguments.mb,
        "rounds": arguments.rounds,
        "cpus": os.cpu_count(),
        "seconds": round(time.perf_counter() - begin),
    }
    print(json.dumps(result))
