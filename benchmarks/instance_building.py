"""Segment pairs with NSP labels and masked words, beside the way of BERT's own repository (google-research/bert,
create_pretraining_data.py): same documents, same length, same number of sequences.

The peer is a re-implementation of that script's algorithm on plain Python lists with `random.Random`: chunks of
sentences filled up to a target length (a tenth of them to a shorter one), a random border between both segments, a
random second segment from another document for half of the pairs (the unused sentences go back), pairs cut to length a
token at a time from a random end, tokens shuffled and masked 80/10/10. It works on ids where the script works on
strings, and writes no TFRecords: both in the peer's favour. Here: `format.examples` (cutting) and then batches.

    documents   both begin with tokenised documents: lists of lists of ids there, an open store here
    text        both begin with a text file of one sentence a line; the peer encodes it with BERT's tokenizer in Python,
                as its repository has it; here the store is built: sentences cut afresh, hashed and written to disk
    text_fast   the same with the Rust tokenizer for the peer, which its repository does not have; no goal

Gate: as many sequences, the same share of masked text within a hundredth, four of five of them hidden, about half of
the pairs random. Sequences are not the same: how full they are is told on both sides, and `per_token` holds the ratio
by tokens instead of sequences.

    python benchmarks/instance_building.py [--text FILE] [--vocab vocab.txt] [--mb 8] [--rounds 3]

The last line is one JSON object.
"""

import argparse
import dataclasses
import itertools
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from contest import Contestant, Result, Spent, build_store, clock, median, parser, run, tokenizer_option

BATCH, LENGTH, RATE, SHORT = 32, 128, 0.15, 0.1
SLOTS = 19  # targets that a row of 128 positions may have; the script's default for this length is 20
GOALS = {"documents": 4.0, "text": 4.0}
PAIRS = {
    "documents": ("their_documents", "our_documents"),
    "text": ("their_text", "our_text"),
    "text_fast": ("their_text_fast", "our_text"),
}

Documents = list[list[list[int]]]


@dataclasses.dataclass
class Instance:
    """A sequence as the script has it, before padding."""

    ids: list[int]
    segments: list[int]
    places: list[int]
    targets: list[int]
    random_next: bool


@dataclasses.dataclass
class Vocabulary:
    """What building instances must know of the tokenizer."""

    pad: int
    cls: int
    sep: int
    mask: int
    words: list[int]
    """all ids; the script draws random words from the whole vocabulary"""


def masked(ids: list[int], vocabulary: Vocabulary, rng: random.Random) -> tuple[list[int], list[int], list[int]]:
    """(ids with masks, places, what stood there): BERT's 15 % and 80/10/10, tokens one by one."""
    places = [place for place, token in enumerate(ids) if token not in (vocabulary.cls, vocabulary.sep)]
    rng.shuffle(places)
    wanted = min(SLOTS, max(1, round(len(ids) * RATE)))
    chosen = sorted(places[:wanted])
    output = list(ids)
    for place in chosen:
        if rng.random() < 0.8:
            output[place] = vocabulary.mask
        elif rng.random() >= 0.5:
            output[place] = vocabulary.words[rng.randint(0, len(vocabulary.words) - 1)]
    return output, chosen, [ids[place] for place in chosen]


def cut_pair(first: list[int], second: list[int], room: int, rng: random.Random) -> None:
    """Take tokens off the longer segment, from either end, until both fit."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


def stranger(documents: Documents, own: int, wanted: int, rng: random.Random) -> list[int]:
    """Sentences of another document from a random one on, until there are as many tokens as wanted."""
    other = own
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != own:
            break
    found: list[int] = []
    for sentence in documents[other][rng.randint(0, len(documents[other]) - 1) :]:
        found.extend(sentence)
        if len(found) >= wanted:
            break
    return found


def instances_of(documents: Documents, own: int, vocabulary: Vocabulary, rng: random.Random) -> list[Instance]:
    """The instances of one document."""
    document = documents[own]
    room = LENGTH - 3

    def target() -> int:
        return rng.randint(2, room) if rng.random() < SHORT else room

    made: list[Instance] = []
    chunk: list[list[int]] = []
    length, place, wanted = 0, 0, target()
    while place < len(document):
        chunk.append(document[place])
        length += len(document[place])
        if place == len(document) - 1 or length >= wanted:
            border = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            first = [token for sentence in chunk[:border] for token in sentence]
            random_next = len(chunk) == 1 or rng.random() < 0.5
            if random_next:
                second = stranger(documents, own, wanted - len(first), rng)
                place -= len(chunk) - border
            else:
                second = [token for sentence in chunk[border:] for token in sentence]
            cut_pair(first, second, room, rng)
            ids = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
            segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
            ids, places, targets = masked(ids, vocabulary, rng)
            made.append(Instance(ids, segments, places, targets, random_next))
            chunk, length, wanted = [], 0, target()
        place += 1
    return made


def padded(instance: Instance, vocabulary: Vocabulary) -> list[list[int]]:
    """ids, attention, segments [LENGTH], places, targets [SLOTS]."""
    used, slots = LENGTH - len(instance.ids), SLOTS - len(instance.places)
    return [
        instance.ids + [vocabulary.pad] * used,
        [1] * len(instance.ids) + [0] * used,
        instance.segments + [0] * used,
        instance.places + [0] * slots,
        instance.targets + [0] * slots,
    ]


def build_instances(documents: Documents, vocabulary: Vocabulary) -> list[Instance]:
    """All instances, in a random order, padded one after another. Shuffles the documents."""
    rng = random.Random(12345)
    rng.shuffle(documents)
    made = [instance for own in range(len(documents)) for instance in instances_of(documents, own, vocabulary, rng)]
    rng.shuffle(made)
    for instance in made:
        padded(instance, vocabulary)
    return made


def their_vocabulary(work: Path) -> Vocabulary:
    """Of the one tokenizer."""
    made = tokenizer_option(work).load(list, "", work)
    return Vocabulary(made.pad_id, made.cls_id, made.sep_id, made.mask_id, list(range(made.vocab_size)))


def told(work: Path, kind: str, spent: Spent, instances: list[Instance], vocabulary: Vocabulary) -> Result:
    """Times and figures of the peer; our side of the same kind is to make as many sequences."""
    (work / f"{kind}.sequences").write_text(str(len(instances)))
    text = sum(len(instance.ids) - 3 for instance in instances)
    targets = sum(len(instance.places) for instance in instances)
    hidden = sum(instance.ids.count(vocabulary.mask) for instance in instances)
    return spent.per(1) | {
        "sequences": len(instances),
        "text_tokens": text,
        "rate": targets / text,
        "hidden": hidden / targets,
        "random": sum(instance.random_next for instance in instances) / len(instances),
    }


def their_documents(work: Path) -> Result:
    """From lists of ids."""
    store, vocabulary = build_store(work, work / "cache"), their_vocabulary(work)
    ids, ends = store.ids.tolist(), store.sentence_offsets.tolist()
    sentences = [ids[begin:end] for begin, end in itertools.pairwise(ends)]
    borders = store.document_offsets.tolist()
    documents = [sentences[begin:end] for begin, end in itertools.pairwise(borders)]
    with clock() as spent:
        instances = build_instances(documents, vocabulary)
    return told(work, "documents", spent, instances, vocabulary)


def their_text(work: Path, python: bool) -> Result:
    """From a text file of one sentence a line."""
    vocabulary = their_vocabulary(work)
    encode = python_encoder(work) if python else fast_encoder(work)
    with clock() as spent:
        documents: Documents = [[]]
        lines = (work / "text.txt").read_text(encoding="utf-8").split("\n")
        for line, ids in zip(lines, encode(lines), strict=True):
            if not line.strip():
                documents.append([])
            elif len(ids):
                documents[-1].append(ids)
        instances = build_instances([document for document in documents if document], vocabulary)
    return told(work, "text" if python else "text_fast", spent, instances, vocabulary)


def fast_encoder(work: Path) -> Any:
    """Lines to lists of ids by the `tokenizers` library."""
    inner = tokenizer_option(work).load(list, "", work).inner

    def encode(lines: list[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for first in range(0, len(lines), 8192):  # whole texts of encodings would not stay near the processor
            part = inner.encode_batch_fast(lines[first : first + 8192], add_special_tokens=False)
            found += [made.ids for made in part]
        return found

    return encode


def python_encoder(work: Path) -> Any:
    """Lines to lists of ids by BERT's tokenizer in Python (kept in `transformers`)."""
    from transformers.models.bert import tokenization_bert_legacy

    words = (work / "vocab.txt").read_text(encoding="utf-8").split("\n")
    numbers = {word: number for number, word in enumerate(words)}
    legacy: Any = tokenization_bert_legacy
    basic = legacy.BasicTokenizer(do_lower_case=True)
    pieces = legacy.WordpieceTokenizer(vocab=numbers, unk_token="[UNK]")

    def encode(line: str) -> list[int]:
        return [numbers[piece] for word in basic.tokenize(line) for piece in pieces.tokenize(word)]

    return lambda lines: [encode(line) for line in lines]


def ours(work: Path, kind: str) -> Result:
    """As many sequences from an open store, or from the text file."""
    from clozelab.data.batches import Batches
    from clozelab.data.formats.segment_pair import SegmentPair
    from clozelab.data.masking.cloze import ClozeMasking
    from clozelab.data.pairs import pair_objective

    wanted = int((work / f"{kind}.sequences").read_text())
    with tempfile.TemporaryDirectory(dir=work) as empty:
        cache = work / "cache" if kind == "documents" else Path(empty)
        store = build_store(work, cache) if kind == "documents" else None
        with clock() as spent:
            if store is None:
                store = build_store(work, cache)
            form = SegmentPair(LENGTH, short_seq_prob=SHORT)
            examples = form.examples(store, "train")
            with clock() as making:
                batches = Batches(store, examples, form, pair_objective("next"), ClozeMasking(rate=RATE), 0, BATCH)
                steps = -(-wanted // BATCH)
                for step in range(steps):
                    batches.batch(step)
        sequences = text = targets = hidden = strange = 0
        for step in range(steps):
            batch = batches.batch(step)
            sequences += len(batch["input_ids"])
            text += int(batch["attention_mask"].sum()) - 3 * len(batch["input_ids"])
            targets += int((batch["target_ids"] >= 0).sum())
            hidden += int((batch["input_ids"] == store.tokenizer.mask_id).sum())
            strange += int(batch["pair_labels"].sum())
    return spent.per(1) | {
        "sequences": sequences,
        "examples": examples.n,
        "batches_s": making.wall,
        "text_tokens": text,
        "rate": targets / text,
        "hidden": hidden / targets,
        "random": strange / sequences,
    }


def contestants(arguments: argparse.Namespace) -> dict[str, Contestant]:
    """Name -> what it does. The peer goes first: it says how many sequences there are."""
    work = arguments.work
    return {
        "their_documents": lambda: their_documents(work),
        "our_documents": lambda: ours(work, "documents"),
        "their_text": lambda: their_text(work, python=True),
        "our_text": lambda: ours(work, "text"),
        "their_text_fast": lambda: their_text(work, python=False),
    }


def gate(found: dict[str, list[Result]]) -> Result:
    """Sequences, rates and labels of both sides."""
    figures: dict[str, Result] = {}
    passed = True
    for name, (peer, our) in PAIRS.items():
        theirs, mine = found[peer][0], found[our][0]
        passed &= 0 <= mine["sequences"] - theirs["sequences"] < BATCH
        passed &= abs(mine["rate"] - theirs["rate"]) < 0.01
        passed &= all(abs(side["hidden"] - 0.8) < 0.02 and 0.45 < side["random"] < 0.6 for side in (theirs, mine))
        keys = ("sequences", "text_tokens", "rate", "hidden", "random")
        figures[name] = {key: [round(theirs[key], 4), round(mine[key], 4)] for key in keys}
        tokens = mine["text_tokens"] / theirs["text_tokens"]
        figures[name]["per_token"] = round(median(found[peer], "wall") / median(found[our], "wall") * tokens, 2)
    cutting = [run["wall"] - run["batches_s"] for run in found["our_documents"]]
    figures["documents"]["cutting_s"] = round(float(np.median(cutting)), 4)
    return {"passed": passed, "theirs_ours": figures}


if __name__ == "__main__":
    run(__file__, contestants, parser(str(__doc__), 8).parse_args(), "sentences", PAIRS, GOALS, gate)
