"""Masked batches (32 x 128) beside dataset rows through Hugging Face's collator, same text, same vocabulary, one run.

    token        this project's token masking    | DataCollatorForLanguageModeling
    whole_word   whole-word masking              | the same collator with whole_word_mask=True
    span         spans as SpanBERT's             | again the whole-word collator: there is none for spans

Both give torch tensors. The peer's rows are [CLS] 126 tokens [SEP], made beforehand, with the columns that its collator
asks for (for whole words the offsets of tokens in their line, by which it tells where words begin); they are fetched in
every way that a `datasets.Dataset` has, and the fastest counts. The whole-word collator hides all that it chooses and
chooses by coin; here 80/10/10 and a fixed number a row are on, and rows are cut from the store at every batch.

Gate: batches of the same size, the same share of masked text within a hundredth, and of the words of which a piece is
masked all pieces are, but for one in a hundred (a row's last word may be too long for what is left); with single
tokens that is not so.

    python benchmarks/masking_speed.py [--text FILE] [--vocab vocab.txt] [--mb 8] [--rounds 3] [--steps 1600]

The last line is one JSON object.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contestant, Result, build_store, clock, hf_tokenizer, parser, run, tokenizer_option

BATCH, LENGTH = 32, 128
GOALS = {"token": 10.0, "whole_word": 15.0, "span": 15.0}
PAIRS = {
    "token": ("hf_token", "token"),
    "whole_word": ("hf_whole_word", "whole_word"),
    "span": ("hf_whole_word", "span"),
}
WARM = 8  # batches before the clock starts; also a multiple of how many small ones are made in one go
LOOKED_AT = 64  # batches of the gate

Make = Callable[[int], dict[str, Any]]


def timed(make: Make, steps: int) -> Result:
    """Seconds a batch, with freed memory kept by the process: a training cell does that, and the peer gets it too."""
    from clozelab.training.allocator import keep_heap

    keep_heap()
    for step in range(WARM):
        make(step)
    with clock() as spent:
        for step in range(WARM, WARM + steps):
            make(step)
    return spent.per(steps)


def masked_share(batches: Iterator[tuple[np.ndarray, np.ndarray]], continues_V: np.ndarray) -> Result:
    """Share of masked text, and of the words touched by a mask those masked in part.

    Args:
        batches: (ids before masking [B, S], -1 at what is not text; which are masked [B, S]).
        continues_V: which ids go on with a word.
    """
    text = masked = touched = broken = rows = 0
    for ids_BS, masked_BS in batches:
        text_BS = ids_BS >= 0
        begins_BS = text_BS & ~continues_V[np.maximum(ids_BS, 0)]
        begins_BS[:, 1:] |= text_BS[:, 1:] & ~text_BS[:, :-1]
        begins_BS[:, 0] = text_BS[:, 0]
        word_T = np.cumsum(begins_BS.ravel())[text_BS.ravel()]
        size_W = np.bincount(word_T)
        masked_W = np.bincount(word_T, weights=masked_BS.ravel()[text_BS.ravel()])
        text += int(text_BS.sum())
        masked += int(masked_BS.sum())
        touched += int((masked_W > 0).sum())
        broken += int(((masked_W > 0) & (masked_W < size_W)).sum())
        rows += len(ids_BS)
    return {"rate": masked / text, "broken": broken / touched, "rows": rows}


def continuing(work: Path) -> np.ndarray:
    """[V]: which ids go on with a word."""
    vocabulary = tokenizer_option(work).load(list, "", work).inner.get_vocab(with_added_tokens=True)
    flags = np.zeros(len(vocabulary), dtype=bool)
    flags[[number for word, number in vocabulary.items() if word.startswith("##")]] = True
    return flags


def ours(work: Path, selection: str, steps: int) -> Result:
    """Batches from a store, as training reads them."""
    import torch

    from clozelab.data.batches import Batches
    from clozelab.data.formats.full_sentences import FullSentences
    from clozelab.data.masking.cloze import ClozeMasking
    from clozelab.data.masking.selections.span import SpanSelection
    from clozelab.data.masking.selections.token import TokenSelection
    from clozelab.data.masking.selections.whole_word import WholeWordSelection
    from clozelab.data.pairs import pair_objective

    made = {"token": TokenSelection, "whole_word": WholeWordSelection, "span": SpanSelection}[selection]()
    store = build_store(work, work / "cache")
    form = FullSentences(LENGTH)
    masking = ClozeMasking(selection=made)
    batches = Batches(store, form.examples(store, "train"), form, pair_objective("none"), masking, 0, BATCH)

    def make(step: int) -> dict[str, Any]:
        return {name: torch.from_numpy(array) for name, array in batches.batch(step).items()}

    def looked_at() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(LOOKED_AT):
            batch = batches.batch(step)
            ids_BS, masked_BS = batch["input_ids"].copy(), np.zeros(batch["input_ids"].shape, dtype=bool)
            rows_N, slots_N = np.nonzero(batch["target_ids"] >= 0)
            places_N = batch["target_positions"][rows_N, slots_N]
            ids_BS[rows_N, places_N] = batch["target_ids"][rows_N, slots_N]
            masked_BS[rows_N, places_N] = True
            special_BS = np.isin(ids_BS, list(store.tokenizer.special_ids)) & ~masked_BS
            yield np.where(special_BS, -1, ids_BS), masked_BS

    return timed(make, steps) | masked_share(looked_at(), continuing(work))


def hugging_face(work: Path, whole_words: bool, steps: int) -> Result:
    """Rows of a dataset through the collator."""
    import warnings

    import datasets
    import transformers

    warnings.filterwarnings("ignore", message="Random token replacement is not supported")
    tokenizer = hf_tokenizer(work)
    rows = datasets.Dataset.from_dict(columns(work, whole_words))
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, whole_word_mask=whole_words)
    order = np.random.default_rng(0).permutation(len(rows))
    arrays = rows.with_format("numpy")
    tensors = rows.with_format("torch")

    def chosen(step: int) -> list[int]:
        return [int(i) for i in order[np.arange(step * BATCH, (step + 1) * BATCH) % len(order)]]

    def each(step: int) -> Any:
        return collate([rows[i] for i in chosen(step)])

    def fetched(step: int) -> Any:  # what a DataLoader does with a datasets.Dataset
        return collate(rows.__getitems__(chosen(step)))

    def fetched_arrays(step: int) -> Any:
        return collate(arrays.__getitems__(chosen(step)))

    def fetched_tensors(step: int) -> Any:
        return collate(tensors.__getitems__(chosen(step)))

    def looked_at() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(LOOKED_AT):
            batch = {name: tensor.numpy() for name, tensor in fetched(step).items()}
            masked_BS = batch["labels"] >= 0
            ids_BS = np.where(masked_BS, batch["labels"], batch["input_ids"])
            ids_BS[:, [0, -1]] = -1
            ids_BS[np.isin(ids_BS, tokenizer.all_special_ids) & ~masked_BS] = -1
            yield ids_BS, masked_BS

    tried = {way.__name__: timed(way, steps) for way in (each, fetched, fetched_arrays, fetched_tensors)}
    fastest = min(tried, key=lambda name: float(tried[name]["wall"]))
    return tried[fastest] | {"way": fastest} | masked_share(looked_at(), continuing(work))


def columns(work: Path, offsets: bool) -> dict[str, np.ndarray]:
    """Rows of [CLS] 126 tokens [SEP] with the columns that the collator asks for."""
    tokenizer = tokenizer_option(work).load(list, "", work)
    lines = (work / "text.txt").read_text(encoding="utf-8").split("\n")
    encodings = tokenizer.inner.encode_batch(lines, add_special_tokens=False)
    ids_T = np.concatenate([np.asarray(made.ids, dtype=np.int64) for made in encodings])
    room = LENGTH - 2
    N = len(ids_T) // room
    ids_NS = np.full((N, LENGTH), tokenizer.cls_id)
    ids_NS[:, 1:-1] = ids_T[: N * room].reshape(N, room)
    ids_NS[:, -1] = tokenizer.sep_id
    made = {"input_ids": ids_NS, "special_tokens_mask": tokenizer.is_special_V[ids_NS].astype(np.int64)}
    if offsets:
        spans_T2 = np.concatenate([np.asarray(made.offsets, dtype=np.int64).reshape(-1, 2) for made in encodings])
        spans_NS2 = np.zeros((N, LENGTH, 2), dtype=np.int64)
        spans_NS2[:, 1:-1] = spans_T2[: N * room].reshape(N, room, 2)
        made["offset_mapping"] = spans_NS2
    return made


def contestants(arguments: argparse.Namespace) -> dict[str, Contestant]:
    """Name -> what it does."""
    work, steps = arguments.work, arguments.steps
    few = max(WARM, steps // 20)
    return {
        "token": lambda: ours(work, "token", steps),
        "hf_token": lambda: hugging_face(work, False, few),
        "whole_word": lambda: ours(work, "whole_word", steps),
        "hf_whole_word": lambda: hugging_face(work, True, few),
        "span": lambda: ours(work, "span", steps),
    }


def gate(found: dict[str, list[Result]]) -> Result:
    """Rates of masked text, broken words, and how the peer's rows were fetched."""
    runs = {name: made[0] for name, made in found.items()}
    passed = len({made["rows"] for made in runs.values()}) == 1
    passed &= all(abs(made["rate"] - 0.15) < 0.01 for made in runs.values())
    passed &= all(runs[name]["broken"] < 0.01 for name in ("whole_word", "hf_whole_word", "span"))
    passed &= runs["token"]["broken"] > 0.01  # else the vocabulary has every word as one piece, and nothing was tested
    figures: Result = {key: {name: round(made[key], 4) for name, made in runs.items()} for key in ("rate", "broken")}
    ways = {name: sorted({made["way"] for made in found[name]}) for name in ("hf_token", "hf_whole_word")}
    return {"passed": passed, **figures, "fetched": ways}


def main() -> None:
    """Race."""
    made = parser(str(__doc__), 8)
    made.add_argument("--steps", type=int, default=1600, help="batches per measurement; the peer makes a twentieth")
    run(__file__, contestants, made.parse_args(), "sentences", PAIRS, GOALS, gate)


if __name__ == "__main__":
    main()
