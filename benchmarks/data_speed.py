"""Text to ids on disk beside Hugging Face as delivered: same text, same vocabulary, same machine, one run.

Whole paths, each from a text file to ids that training can read:

    open_store     parts documents and paragraphs, hashes and splits them, cuts sentences, encodes them, and writes ids
                   with the offsets of sentences and documents
    hugging_face   `run_mlm.py`: load_dataset("text"), map(tokenize), map(group_texts), num_proc=2, fresh cache

Encoding alone (lines to one file of ids, one process; no sentences, no offsets), beside the two maps of the latter:

    wordpiece      WordPiece on plain text without BERT's normaliser
    word_cache     with the word cache in front

Reading the lines is no part of encoding, and neither is load_dataset. Starting Python and importing is no part of
anything. All four must give identical ids.

    python benchmarks/data_speed.py [--text FILE] [--vocab vocab.txt] [--mb 24] [--rounds 3]

The last line is one JSON object.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

import numpy as np
from contest import Contestant, Result, build_store, clock, hf_tokenizer, parser, run, tokenizer_option

LENGTH = 128
GOALS = {"wordpiece": 1.7, "word_cache": 3.0, "open_store": 3.0}
PAIRS = {
    "wordpiece": ("hf_maps", "wordpiece"),
    "word_cache": ("hf_maps", "word_cache"),
    "open_store": ("hf_whole", "open_store"),
}


def _hash(ids: np.ndarray) -> str:
    return hashlib.blake2b(np.asarray(ids, dtype="<u2").tobytes(), digest_size=16).hexdigest()


def encode(work: Path, cache: bool) -> Result:
    """Lines to one file of uint16 ids."""
    from clozelab.data.plain import PlainWordPiece
    from clozelab.data.wordcache import WordCache

    inner = tokenizer_option(work).load(list, "", work).inner
    encoder = (WordCache if cache else PlainWordPiece).of(inner)
    assert encoder is not None
    lines = (work / "text.txt").read_text(encoding="utf-8").split("\n")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        path = Path(folder) / "ids.bin"
        with clock() as spent, path.open("wb") as file:
            for first in range(0, len(lines), 8192):
                ids, _ = encoder.encode_flat(lines[first : first + 8192])
                ids.astype(np.uint16).tofile(file)
        return spent.per(1) | {"ids": _hash(np.fromfile(path, dtype=np.uint16))}


def whole_store(work: Path) -> Result:
    """`open_store` into an empty cache."""
    with tempfile.TemporaryDirectory(dir=work) as cache:
        with clock() as spent:
            store = build_store(work, Path(cache))
        assert not store.hit
        counts = {key: sum(split[key] for split in store.counts.values()) for key in ("documents", "sentences")}
        return spent.per(1) | {"ids": _hash(store.ids), "tokens": len(store.ids)} | counts


def hugging_face(work: Path, whole: bool) -> Result:
    """The two maps, or all of it."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = hf_tokenizer(work)

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(rows["text"], add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": encoded["input_ids"]}

    def group(rows: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        flat = [i for ids in rows["input_ids"] for i in ids]
        return {"input_ids": [flat[first : first + LENGTH] for first in range(0, len(flat), LENGTH)]}

    with tempfile.TemporaryDirectory(dir=work) as cache:
        with clock() as loading:
            raw = datasets.load_dataset("text", data_files=str(work / "text.txt"), split="train", cache_dir=cache)
        with clock() as spent:
            tokenized = raw.map(tokenize, batched=True, num_proc=2, remove_columns=["text"])
            grouped = tokenized.map(group, batched=True, num_proc=2)
        if whole:
            spent.wall += loading.wall
            spent.cpu += loading.cpu
        columns = (batch["input_ids"] for batch in grouped.with_format("arrow").iter(batch_size=1000))
        ids = np.concatenate([column.combine_chunks().flatten().to_numpy() for column in columns])
    return spent.per(1) | {"ids": _hash(ids)}


def contestants(arguments: argparse.Namespace) -> dict[str, Contestant]:
    """Name -> what it does."""
    work = arguments.work
    return {
        "wordpiece": lambda: encode(work, cache=False),
        "word_cache": lambda: encode(work, cache=True),
        "hf_maps": lambda: hugging_face(work, whole=False),
        "open_store": lambda: whole_store(work),
        "hf_whole": lambda: hugging_face(work, whole=True),
    }


def gate(found: dict[str, list[Result]]) -> Result:
    """Identical ids, whoever made them."""
    same = len({run["ids"] for runs in found.values() for run in runs}) == 1
    counts = {key: found["open_store"][0][key] for key in ("documents", "sentences", "tokens")}
    return {"passed": same, "ids_identical": same, **counts}


if __name__ == "__main__":
    run(__file__, contestants, parser(str(__doc__), 24).parse_args(), "paragraphs", PAIRS, GOALS, gate)
