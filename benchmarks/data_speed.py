"""Speed of the data engine beside Hugging Face as delivered, same text, same vocabulary, same machine, one run.

(a) text to packed ids: this project (WordPiece on plain text, and with the word cache in front) against what
    `run_mlm.py` does: `datasets.map` with a fast tokenizer, then again to group the ids, with num_proc=2.
(b) ids to masked batches (32 x 128): this project against dataset rows + DataCollatorForLanguageModeling.

Every measurement is a process of its own, the contestants take turns, medians are compared. Ids must be identical.

    python benchmarks/data_speed.py [--text FILE] [--vocab vocab.txt] [--mb 24] [--rounds 3]

The last line is one JSON object.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, LENGTH = 32, 128
GOALS = {"wordpiece": 1.7, "word_cache": 3.0, "batches": 10.0}


def ours(work: Path, cache: bool) -> dict[str, Any]:
    """Lines to one file of uint16 ids."""
    import numpy as np

    from clozelab.data.plain import PlainWordPiece
    from clozelab.data.tokenizers import FileOption
    from clozelab.data.wordcache import WordCache

    tokenizer = FileOption(path=str(work / "vocab.txt"), lowercase=True).load(list, "", work)
    encoder = (WordCache if cache else PlainWordPiece).of(tokenizer.inner)
    assert encoder is not None
    lines = (work / "text.txt").read_text(encoding="utf-8").splitlines()
    start = time.perf_counter()
    state = hashlib.blake2b()
    with (work / "ids.bin").open("wb") as file:
        for first in range(0, len(lines), 8192):
            ids, _ = encoder.encode_flat(lines[first : first + 8192])
            ids.astype(np.uint16).tofile(file)
    seconds = time.perf_counter() - start
    state.update((work / "ids.bin").read_bytes())
    return {"seconds": seconds, "ids": state.hexdigest()}


def hugging_face(work: Path) -> dict[str, Any]:
    """`run_mlm.py`: load_dataset("text"), map(tokenize), map(group_texts), here with num_proc=2 and a fresh cache."""
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    tokenizer = _fast_tokenizer(work)
    with tempfile.TemporaryDirectory() as cache:
        raw = datasets.load_dataset("text", data_files=str(work / "text.txt"), split="train", cache_dir=cache)

        def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            encoded = tokenizer(rows["text"], add_special_tokens=False, return_attention_mask=False)
            return {"input_ids": encoded["input_ids"]}

        def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
            flat = [i for ids in rows["input_ids"] for i in ids]
            return {"input_ids": [flat[first : first + LENGTH] for first in range(0, len(flat), LENGTH)]}

        start = time.perf_counter()
        tokenized = raw.map(tokenize, batched=True, num_proc=2, remove_columns=["text"])
        grouped = tokenized.map(group, batched=True, num_proc=2)
        seconds = time.perf_counter() - start
        state = hashlib.blake2b()
        for batch in grouped.with_format("arrow").iter(batch_size=1000):
            state.update(batch["input_ids"].combine_chunks().flatten().to_numpy().astype(np.uint16).tobytes())
    return {"seconds": seconds, "ids": state.hexdigest()}


def our_batches(work: Path, steps: int) -> dict[str, Any]:
    """Seconds a batch from a store."""
    from clozelab.data.batches import Batches
    from clozelab.data.formats.segment_pair import SegmentPair
    from clozelab.data.masking.cloze import ClozeMasking
    from clozelab.data.pairs import pair_objective

    store = _store(work)
    form = SegmentPair(LENGTH)
    pair = pair_objective("none")
    batches = Batches(store, form.examples(store, "train"), form, pair, ClozeMasking(), 0, BATCH)
    return {"seconds": _each(batches.batch, steps)}


def their_batches(work: Path, steps: int) -> dict[str, Any]:
    """Seconds a batch from dataset rows of the same length through the collator."""
    import datasets
    import numpy as np
    import transformers

    ids = _store(work).ids
    rows = np.asarray(ids[: len(ids) // LENGTH * LENGTH], dtype=np.int64).reshape(-1, LENGTH)
    made = datasets.Dataset.from_dict({"input_ids": rows, "special_tokens_mask": np.zeros_like(rows)})
    tokenizer = _fast_tokenizer(work)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer)
    order = np.random.default_rng(0).permutation(len(rows))

    def batch(step: int) -> Any:
        chosen = order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        return collate([made[int(i)] for i in chosen])

    def fetched(step: int) -> Any:  # what a DataLoader does with a datasets.Dataset
        chosen = order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        return collate(made.__getitems__(chosen.tolist()))

    return {"seconds": min(_each(batch, steps // 10), _each(fetched, steps // 10))}


def _fast_tokenizer(work: Path) -> Any:
    """The same definition as a tokenizer of `transformers`."""
    import transformers

    from clozelab.data.tokenizers import FileOption

    inner = FileOption(path=str(work / "vocab.txt"), lowercase=True).load(list, "", work).inner
    names = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    make: Any = transformers.PreTrainedTokenizerFast
    return make(tokenizer_object=inner, **names)


def _store(work: Path) -> Any:
    from clozelab.data.corpora.text import Text
    from clozelab.data.store import open_store
    from clozelab.data.tokenizers import FileOption

    corpus = Text(paths=[str(work / "text.txt")], document_separator="blank_line", paragraphs="line", validation=0)
    return open_store(corpus, FileOption(path=str(work / "vocab.txt"), lowercase=True), work / "cache")


def _each(call: Callable[[int], Any], steps: int) -> float:
    for step in range(5):
        call(step)
    start = time.perf_counter()
    for step in range(steps):
        call(step)
    return (time.perf_counter() - start) / steps


def prepare(work: Path, text: Path | None, vocabulary: Path | None, megabytes: float) -> None:
    """One line a sentence, a blank line between paragraphs' worth of documents; the text repeated up to its size."""
    from clozelab.data.corpora.sotu import Sotu
    from clozelab.data.corpus import sentences
    from clozelab.data.tokenizers import WordPieceOption

    if text is None:
        documents = ["\n".join(sentences(document.text, "en")) for document in Sotu().read()]
        whole = "\n\n".join(documents) + "\n\n"
    else:
        whole = text.read_text(encoding="utf-8-sig")
    size = int(megabytes * 1e6)
    whole = (whole * (size // len(whole) + 1))[:size]
    (work / "text.txt").write_text(whole, encoding="utf-8")
    if vocabulary is None:
        tokenizer = WordPieceOption(vocab_size=30522).load(lambda: [whole], "benchmark", work)
        entries = sorted(tokenizer.inner.get_vocab().items(), key=lambda item: item[1])
        (work / "vocab.txt").write_text("\n".join(word for word, _ in entries), encoding="utf-8")
    else:
        (work / "vocab.txt").write_bytes(vocabulary.read_bytes())


def measure(work: Path, names: list[str], rounds: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Every contestant in turn, each in a fresh process."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            command = [sys.executable, __file__, "--work", str(work), "--only", name, "--steps", str(steps)]
            got = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
            found[name].append(json.loads(got.stdout.splitlines()[-1]))
            print(f"round {number + 1}: {name:16} {found[name][-1]['seconds']:.6f} s", flush=True)
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a UTF-8 text file (default: the packaged messages)")
    parser.add_argument("--vocab", type=Path, help="a WordPiece vocab.txt (default: trained on the text)")
    parser.add_argument("--mb", type=float, default=24, help="size of the text in megabytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000, help="batches per measurement")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    contestants: dict[str, Callable[[], dict[str, Any]]] = {
        "wordpiece": lambda: ours(arguments.work, cache=False),
        "word_cache": lambda: ours(arguments.work, cache=True),
        "hugging_face": lambda: hugging_face(arguments.work),
        "our_batches": lambda: our_batches(arguments.work, arguments.steps),
        "their_batches": lambda: their_batches(arguments.work, arguments.steps),
    }
    if arguments.only:
        print(json.dumps(contestants[arguments.only]()))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work, arguments.text, arguments.vocab, arguments.mb)
        _store(work)
        found = measure(work, list(contestants), arguments.rounds, arguments.steps)
    medians = {name: statistics.median(run["seconds"] for run in runs) for name, runs in found.items()}
    ratios = {
        "wordpiece": medians["hugging_face"] / medians["wordpiece"],
        "word_cache": medians["hugging_face"] / medians["word_cache"],
        "batches": medians["their_batches"] / medians["our_batches"],
    }
    hashes = {run["ids"] for name in ("wordpiece", "word_cache", "hugging_face") for run in found[name]}
    result = {
        "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
        "goals": GOALS,
        "met": {name: ratios[name] >= goal for name, goal in GOALS.items()},
        "ids_identical": len(hashes) == 1,
        "medians_s": medians,
        "mb": arguments.mb,
        "rounds": arguments.rounds,
        "cpus": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
