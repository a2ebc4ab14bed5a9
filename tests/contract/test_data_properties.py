"""What every format, pair objective and masking policy keeps on any corpus, those of tomorrow too: found by discovery.

Random nasty corpora (`nasty.py`), rows compared with what the table of examples and the store say, in plain loops.
Deterministic: the same corpora on every run. To look further, for example ten times as far from another start:

    CLOZELAB_EXAMPLES=100 CLOZELAB_SEED=1 pytest tests/contract/test_data_properties.py -x

Shapes: N examples, E epochs, R = E x N rows, S positions, K target slots.
"""

import collections
import dataclasses
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from nasty import Corpus, corpora, training_texts, whole

from clozelab.data import batches as batches_module
from clozelab.data.batches import Batch, Batches, fixed_batches
from clozelab.data.corpora.text import Text
from clozelab.data.corpus import sentences
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption
from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import IGNORED, ClozeMasking
from clozelab.data.pairs import PairObjective, pair_objective
from clozelab.data.store import Store, open_store
from clozelab.data.tokenizers import ByteBpeOption, FileOption, TokenizerOption, WordPieceOption
from clozelab.options import discover, registered

discover("clozelab.data")

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CORPORA = int(os.environ.get("CLOZELAB_EXAMPLES", "10"))
START = int(os.environ.get("CLOZELAB_SEED", "0"))
EPOCHS = 3

# A format's settings that cut another way; a format without settings of its own stands for itself.
SETTINGS: dict[str, list[dict[str, Any]]] = {"segment_pair": [{"cut": "greedy"}, {"short_seq_prob": 0.5}]}
FORMATS = [(name, more) for name in registered("format") for more in [{}, *SETTINGS.get(name, [])]]


def make(group: str, name: str, **given_: Any) -> Any:
    """An option, with those of the settings that it has."""
    cls = registered(group)[name]
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{key: value for key, value in given_.items() if key in known})


def carried() -> list[Any]:
    """Every format with every pair objective that it can carry."""
    found = []
    for name, more in FORMATS:
        segments = make("format", name, **more).style.segments
        for pair in registered("pair"):
            if segments or pair_objective(pair).labels is None:
                label = "-".join([name, *(f"{key}={value}" for key, value in more.items()), pair])
                found.append(pytest.param(name, more, pair, id=label))
    return found


POLICIES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"copies": 1},
    "two copies": {"copies": 2},
    "every second epoch": {"refresh": 2},
    "all of it": {"rate": 1.0},
    "bernoulli": {"count": "bernoulli"},
    "uniform": {"rate": 0.1, "rate_law": "uniform", "rate_to": 0.7},
    "linear": {"rate": 0.5, "rate_law": "linear", "rate_to": 0.1, "rate_steps": 5},
    "together": {"rate": 0.5, "together": True},
    "predicted": {"rate": 0.4, "predicted": 0.5, "corruption": [1.0, 0.0, 0.0]},
    "many at once": {
        "rate": 0.1, "rate_law": "uniform", "rate_to": 0.9, "count": "bernoulli", "predicted": 0.3, "together": True,
        "corruption": [1.0, 0.0, 0.0], "copies": 2, "refresh": 2,
    },
}  # fmt: skip


def on_corpora(label: str, examples: int = CORPORA) -> Any:
    """Settings of a property over drawn corpora: no times, no data base, a start that follows from the label."""
    # Shrinking may take five minutes a failure: that is for whoever looks for one.
    phases = [Phase.generate, *([Phase.shrink] if "CLOZELAB_EXAMPLES" in os.environ else [])]

    def decorate(check: Any) -> Any:
        quiet = settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )
        return seed(zlib.crc32(label.encode()) + START)(quiet(check))

    return decorate


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[TokenizerOption]:
    """Both families, trained once, with vocabularies so small that most words are several pieces."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found: list[TokenizerOption] = []
    for option in (WordPieceOption(vocab_size=360), ByteBpeOption(vocab_size=330)):
        made = option.load(training_texts, "nasty", folder)
        found.append(FileOption(path=str(made.save(folder / type(option).__name__))))
    return found


@pytest.fixture(scope="module")
def phrases(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("phrases") / "phrases.txt"
    path.write_text("senate tariff\nvillage railway treaty\nmountain\nriver harvest music\nwow\n", encoding="utf-8")
    return str(path)


class Opened:
    """A drawn corpus as a store, in a folder that is gone afterwards."""

    def __init__(self, corpus: Corpus, tokenizer: TokenizerOption) -> None:
        self.corpus, self.tokenizer = corpus, tokenizer

    def __enter__(self) -> tuple[Text, Store]:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name)
        text = self.corpus.write(path / "text")
        return text, open_store(text, self.tokenizer, path / "cache")

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()


def one_line(error: ValueError, *names: str) -> None:
    """An error for a user: one line, with these words, and a way out."""
    text = str(error)
    assert "\n" not in text
    assert all(name in text for name in (*names, "give")), text


@pytest.mark.parametrize("kind", [0, 1], ids=["wordpiece", "byte_bpe"])
def test_a_store_holds_what_the_library_makes_of_every_sentence(tokenizers: list[TokenizerOption], kind: int) -> None:
    @on_corpora(f"store-{kind}", 6 * CORPORA)
    @given(corpora())
    def check(corpus: Corpus) -> None:
        with Opened(corpus, tokenizers[kind]) as (text, store):
            inner = store.tokenizer.inner
            documents = []
            for document in text.read():
                ids = [inner.encode(s, add_special_tokens=False).ids for s in sentences(document.text, text.language)]
                if any(ids):
                    documents.append((document.split, document.content, [piece for piece in ids if piece]))
            assert len(documents) == len(store.splits)
            for d, (split, content, ids) in enumerate(documents):
                assert d in store.documents_of(split)
                assert store.document_hashes[d] == content
                first, last = store.document_offsets[d : d + 2].tolist()
                assert [store.sentence(n).tolist() for n in range(first, last)] == ids

    check()


@pytest.mark.parametrize("option", [WordPieceOption(vocab_size=400), ByteBpeOption(vocab_size=400)], ids=str)
def test_a_tokenizer_can_be_trained_on_any_corpus(option: TokenizerOption) -> None:
    @on_corpora(str(option), 2 * CORPORA)
    @given(corpora())
    def check(corpus: Corpus) -> None:
        try:
            with Opened(corpus, option) as (_, store):
                assert len(store.tokenizer.ordinary_ids)
                assert store.ids.max() < store.tokenizer.vocab_size
        except ValueError as error:
            # Nothing to train on: all documents may have fallen on the other side.
            assert corpus.validation > 0
            one_line(error, "the training split is empty")

    check()


def rows_file(folder: Path, *texts: str) -> Text:
    """A corpus of these documents, all of them for training, in a JSON-lines file."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    return Text(paths=[str(path)], validation=0)


@pytest.mark.parametrize("kind", [0, 1], ids=["wordpiece", "byte_bpe"])
def test_half_a_sign_becomes_the_replacement_character(
    tokenizers: list[TokenizerOption], tmp_path: Path, kind: int
) -> None:
    halves = "River \ud83d one. \udca9\ud800Mountain two\udfff. Whole \U0001f600."
    text = rows_file(tmp_path, halves, whole(halves))
    one, other = (document.text for document in text.read())
    assert one == "River \ufffd one. \ufffd\ufffdMountain two\ufffd. Whole \U0001f600."
    assert one == other
    store = open_store(text, tokenizers[kind], tmp_path / "cache")
    assert len(store.splits) == 2
    assert store.document_hashes[0] == store.document_hashes[1]
    half = len(store.ids) // 2
    assert half > 0
    assert np.array_equal(store.ids[:half], store.ids[half:])


def test_a_true_continuation_from_elsewhere_is_no_stranger(tokenizers: list[TokenizerOption], tmp_path: Path) -> None:
    """Documents that differ in case alone are two, and the same tokens to an uncased tokenizer."""
    form, pair = make("format", "sentence_pair", max_length=32), pair_objective("next")
    ones = 0
    for n, more in enumerate([(), ("Senate three. Tariff four.",)]):
        folder = tmp_path / str(n)
        folder.mkdir()
        text = rows_file(folder, "River one. Mountain two.", "river one. mountain two.", *more)
        store = open_store(text, tokenizers[0], folder / "cache")
        examples = form.examples(store, "train")
        assert examples.n == len(set(examples.content.tolist())) == 2 + len(more)
        assert np.array_equal(*texts_of(store, examples)[1:4:2])
        batches = Batches(store, examples, form, pair, CausalTargets(), 0, examples.n)
        found = by_example(batches, 40)
        check_text(store, form, pair, examples, found)
        labels_EN = found["pair_labels"]
        true = form.assemble(store, examples, *examples.runs(np.arange(2)), 2)["input_ids"]
        is_true_EN = (found["input_ids"][:, :2] == true).all(axis=2)
        assert np.array_equal(labels_EN[:, :2] == 0, is_true_EN)
        assert labels_EN.any() == bool(more)  # of two that go on alike neither has a stranger
        ones += int(labels_EN.sum())
    assert ones > 0


def cut(store: Store, form: FormatOption, split: str) -> Examples | None:
    """The examples of a split, held against the store; None where it rightly gives none."""
    documents = store.documents_of(split)
    lengths_of = {}
    for d in documents.tolist():
        first, last = store.document_offsets[d : d + 2].tolist()
        lengths_of[d] = np.diff(store.sentence_offsets[first : last + 1])
    try:
        made = form.examples(store, split)
    except ValueError as error:
        one_line(error, f"the {split} split", store.corpus)
        if form.style.segments:
            # Two sentences of which each fills half a row are a pair under every way of cutting.
            half = (form.max_length - 3) // 2
            assert not any((lengths >= half).sum() >= 2 for lengths in lengths_of.values())
        else:
            assert len(documents) == 0
        return None

    begin, end = made.segments.T
    assert made.n > 0
    assert (end > begin).all()
    assert (begin[1:] >= end[:-1]).all()  # in the order of the text, and no token twice
    bounds = store.sentence_offsets[store.document_offsets]
    assert np.isin(made.segment_document, documents).all()
    assert (bounds[made.segment_document] <= begin).all()
    assert (end <= bounds[made.segment_document + 1]).all()
    assert np.isin(begin, store.sentence_offsets).all()
    assert (made.sizes >= 1).all()
    assert (made.first[1:] >= (made.first + made.sizes)[:-1]).all()  # no segment twice
    assert np.array_equal(made.content, store.document_hashes[made.segment_document[made.first]])

    total = sum(int(lengths.sum()) for lengths in lengths_of.values())
    counts = made.counts
    assert counts["sequences"] == made.n
    assert counts["documents"] == len(documents)
    assert counts["segments"] == len(made.segments) == made.sizes.sum() + counts["leftover_segments"]
    assert counts["tokens"] == (end - begin).sum()
    assert counts["tokens"] + counts["lost_tokens"] == total == store.counts[split]["tokens"]
    if made.paired:
        assert (made.sizes == 2).all()
        assert np.array_equal(made.segment_document[made.first], made.segment_document[made.first + 1])
        # B goes on where A's last sentence ends.
        after = np.searchsorted(store.sentence_offsets, end[made.first])
        assert np.array_equal(store.sentence_offsets[after], begin[made.first + 1])
    else:
        # Only a sentence that is longer than a row loses anything.
        assert counts["leftover_segments"] == 0
        kept = np.zeros(len(store.ids), dtype=bool)
        for b, e in made.segments.tolist():
            kept[b:e] = True
        for d, lengths in lengths_of.items():
            where = np.repeat(np.arange(len(lengths)), lengths)
            lost = np.bincount(where[~kept[bounds[d] : bounds[d + 1]]], minlength=len(lengths))
            assert np.array_equal(lost, np.maximum(lengths - (form.max_length - 2), 0))
    return made


def plain_row(store: Store, form: FormatOption, runs: list[Ints]) -> dict[str, list[int]]:
    """A row of these runs of ids as the style of the format says, token by token."""
    tokenizer = store.tokenizer
    ids: list[int] = []
    segment: list[int] = []
    piece: list[int] = []
    position: list[int] = []
    for number, run in enumerate(runs):
        opens = number == 0 or form.style.apart
        part = [tokenizer.cls_id] * opens + [*run.tolist(), tokenizer.sep_id]
        ids += part
        segment += [number if form.style.segments else 0] * len(part)
        piece += [number] * len(part)
        position += range(len(part))
    return {"input_ids": ids, "segment_ids": segment, "piece": piece, "position_ids": position}


def by_example(batches: Batches, epochs: int) -> Batch:
    """[epochs, N, ...]: the rows of some epochs in the order of the examples, and the step [epochs, N] of each."""
    n, size = batches.examples.n, batches.batch_size
    parts = [batches.batch(step) for step in range(-(-epochs * n // size))]
    assert all(len(part["example_ids"]) == size for part in parts)
    rows = {key: np.concatenate([part[key] for part in parts])[: epochs * n] for key in parts[0]}
    rows["step"] = np.arange(epochs * n) // size
    found = {key: value.reshape(epochs, n, *value.shape[1:]) for key, value in rows.items()}
    order_EN = np.argsort(found["example_ids"], axis=1)
    found = {key: np.stack([value[e][order_EN[e]] for e in range(epochs)]) for key, value in found.items()}
    assert (found["example_ids"] == np.arange(n)).all()  # every example once an epoch
    return found


def texts_of(store: Store, examples: Examples) -> list[Ints]:
    return [np.asarray(store.ids[b:e], dtype=np.int64) for b, e in examples.segments.tolist()]


def check_text(store: Store, form: FormatOption, pair: PairObjective, examples: Examples, batch: Batch) -> None:
    """Rows of text, unmasked, [E, N, ...], against the store; labels against where the segments stand."""
    tokenizer = store.tokenizer
    texts = texts_of(store, examples)
    # Text of a second segment -> the documents that have it there, by what they say.
    seconds = collections.defaultdict(set)
    if examples.paired:
        for n in range(examples.n):
            seconds[tuple(texts[examples.first[n] + 1].tolist())].add(int(examples.content[n]))
    for e, n in np.ndindex(*batch["example_ids"].shape):
        row = {key: value[e, n] for key, value in batch.items()}
        used = int(row["attention_mask"].sum())
        first, label = int(examples.first[n]), int(row["pair_labels"])
        runs = texts[first : first + int(examples.sizes[n])]
        if pair.name == "order" and label:
            runs = runs[::-1]
        elif pair.name == "next" and label:
            stranger = row["input_ids"][len(runs[0]) + 2 : used - 1]
            others = seconds[tuple(stranger.tolist())] - {int(examples.content[n])}
            assert others, "the second segment is not that of another document"
            assert stranger.tolist() != runs[1].tolist(), "the true continuation is called random"
            runs = [runs[0], stranger]
        else:
            assert label == 0
        want = plain_row(store, form, runs)
        assert used == len(want["input_ids"]) <= form.max_length
        assert row["attention_mask"][:used].all()
        assert row["input_ids"][:used].tolist() == want["input_ids"]
        assert (row["input_ids"][used:] == tokenizer.pad_id).all()
        assert row["segment_ids"][:used].tolist() == want["segment_ids"]
        assert not row["segment_ids"][used:].any()
        if form.style.apart:
            assert row["position_ids"][:used].tolist() == want["position_ids"]
            assert not row["position_ids"][used:].any()
            assert (row["document_ids"][:used] - 1).tolist() == want["piece"]
            assert not row["document_ids"][used:].any()
    if not examples.paired:
        # All the rows' text, one row after the other, is the text of the split but for what the table says is lost.
        text = np.concatenate(texts)
        for e in range(len(batch["example_ids"])):
            parts = []
            for n in range(examples.n):
                at = 1
                for length in examples.lengths[examples.first[n] : examples.first[n] + examples.sizes[n]].tolist():
                    parts.append(batch["input_ids"][e, n, at : at + length])
                    at += length + 1 + form.style.apart
            assert np.array_equal(np.concatenate(parts), text)


def check_causal(store: Store, batch: Batch) -> None:
    """Every token is asked for by the one before it, but for what opens a sequence."""
    tokenizer = store.tokenizer
    ids, K = batch["input_ids"], batch["target_ids"].shape[-1]
    want = np.where(np.isin(ids[..., 1:], [tokenizer.pad_id, tokenizer.cls_id]), IGNORED, ids[..., 1:])
    assert ids.shape[-1] - 1 == K
    assert np.array_equal(batch["target_ids"], want)
    assert np.array_equal(batch["target_positions"], np.where(want == IGNORED, 0, np.arange(K)))


def begins_word(store: Store, ids_RS: Ints) -> Bools:
    tokenizer = store.tokenizer
    pieces = [tokenizer.inner.id_to_token(n) or "" for n in range(tokenizer.vocab_size)]
    if "[PAD]" in tokenizer.special_tokens.values():
        return ~np.asarray([piece.startswith("##") for piece in pieces])[ids_RS]
    assert tokenizer.word_starts is not None
    return tokenizer.word_starts(ids_RS)


def fixed_count(rate: float | npt.NDArray[np.float64], maskable_R: Ints) -> Ints:
    wanted = np.maximum(1, np.rint(rate * maskable_R)).astype(np.int64)
    return np.asarray(np.minimum(maskable_R, wanted), dtype=np.int64)


def rows_of(batch: Batch) -> Batch:
    """[R, ...] of [E, N, ...]."""
    return {key: value.reshape(-1, *value.shape[2:]) for key, value in batch.items()}


def check_masks(store: Store, masking: ClozeMasking, name: str, text: Batch, batch: Batch) -> None:
    """Masked rows [R, ...] against the same rows as text."""
    tokenizer = store.tokenizer
    for key in text.keys() - {"input_ids", "target_positions", "target_ids"}:
        assert np.array_equal(text[key], batch[key])  # masking changes nothing but what is masked
    ids_RS, new_RS = text["input_ids"], batch["input_ids"]
    at_RK, target_RK, draws_RK = batch["target_positions"], batch["target_ids"], batch["target_draws"]
    R, S = ids_RS.shape
    K = masking.targets(S)
    assert at_RK.shape == target_RK.shape == draws_RK.shape == (R, K)
    assert draws_RK.dtype == np.float32
    assert ((draws_RK >= 0) & (draws_RK < 1)).all()
    used_RK = target_RK != IGNORED
    assert (np.diff(used_RK.astype(int), axis=1) <= 0).all()
    assert (at_RK[~used_RK] == 0).all()
    assert (np.diff(at_RK, axis=1)[used_RK[:, 1:]] > 0).all()
    maskable_RS = text["attention_mask"] & ~np.isin(ids_RS, list(tokenizer.special_ids))
    asked_RS = np.zeros((R, S), dtype=bool)
    row, slot = np.nonzero(used_RK)
    asked_RS[row, at_RK[row, slot]] = True
    assert not (asked_RS & ~maskable_RS).any()
    restored_RS = new_RS.copy()
    restored_RS[row, at_RK[row, slot]] = target_RK[row, slot]
    if masking.predicted == 1:
        assert np.array_equal(restored_RS, ids_RS)
        chosen_RS = asked_RS
    else:
        # All that is chosen is hidden here, so it can be seen; a mask token of the text itself is not maskable.
        assert masking.corruption[0] == 1
        chosen_RS = maskable_RS & (new_RS == tokenizer.mask_id)
        assert np.array_equal(np.where(chosen_RS, ids_RS, new_RS), ids_RS)
        assert np.array_equal(target_RK[row, slot], ids_RS[row, at_RK[row, slot]])
        assert not (asked_RS & ~chosen_RS).any()
    put = new_RS[chosen_RS]
    assert ((put == tokenizer.mask_id) | np.isin(put, tokenizer.ordinary_ids)).all()

    maskable_R, chosen_R, asked_R = (x.sum(axis=1) for x in (maskable_RS, chosen_RS, asked_RS))
    assert np.array_equal(asked_R, fixed_count(masking.predicted, chosen_R))
    whole = name == "token"
    if masking.count == "bernoulli":
        assert (chosen_R <= maskable_R).all()
    elif masking.rate_law == "uniform":
        assert masking.rate_to is not None
        assert (chosen_R <= fixed_count(masking.rate_to, maskable_R)).all()
        assert (chosen_R >= (fixed_count(masking.rate, maskable_R) if whole else maskable_R > 0)).all()
    else:
        rate_R = np.full(R, masking.rate)
        if masking.by_step:
            assert masking.rate_to is not None
            assert masking.rate_steps is not None
            rate_R += (masking.rate_to - masking.rate) * np.minimum(batch["step"] / masking.rate_steps, 1)
        count_R = fixed_count(rate_R, maskable_R)
        assert (chosen_R <= count_R).all()
        assert (chosen_R >= (count_R if whole else maskable_R > 0)).all()
        if masking.selection.needs_words:
            check_words(store, masking, name, ids_RS, new_RS, maskable_RS, chosen_RS, count_R)


def check_words(
    store: Store,
    masking: ClozeMasking,
    name: str,
    ids_RS: Ints,
    new_RS: Ints,
    maskable_RS: Bools,
    chosen_RS: Bools,
    count_R: Ints,
) -> None:
    """A word is chosen as a whole or not at all, but where a row has no unit that is short enough."""
    R, S = ids_RS.shape
    before_RS = np.zeros_like(maskable_RS)
    before_RS[:, 1:] = maskable_RS[:, :-1]
    begins_RS = maskable_RS & (begins_word(store, ids_RS) | ~before_RS)
    word_RS = np.cumsum(begins_RS.ravel()).reshape(R, S)
    size_W = np.bincount(word_RS[maskable_RS], minlength=word_RS.max(initial=0) + 1)
    hidden_W = np.bincount(word_RS[chosen_RS], minlength=len(size_W))
    part_W = (hidden_W > 0) & (hidden_W < size_W)
    in_part_R = (part_W[word_RS] & chosen_RS).any(axis=1)
    for r in np.flatnonzero(in_part_R).tolist():
        (at,) = np.nonzero(chosen_RS[r])
        assert len(at) == count_R[r]
        assert (np.diff(at) == 1).all()
        assert begins_RS[r, at[0]]
        if name == "whole_word":
            assert (size_W[np.unique(word_RS[r][maskable_RS[r]])] > count_R[r]).all()
    if name == "whole_word":
        # Nothing that still fits was left.
        left_R = count_R - chosen_RS.sum(axis=1)
        free_RS = maskable_RS & (hidden_W[word_RS] == 0)
        assert (size_W[word_RS][free_RS] > np.repeat(left_R, free_RS.sum(axis=1))).all()
    if masking.together:
        masked_W = np.bincount(word_RS[chosen_RS & (new_RS == store.tokenizer.mask_id)], minlength=len(size_W))
        assert ((masked_W == 0) | (masked_W == hidden_W)).all()


def check_turns(masking: ClozeMasking, text: Batch, batch: Batch) -> None:
    """[E, N, ...]: which epochs have the same masks, where they have the same text."""
    for one in range(EPOCHS):
        for two in range(one + 1, EPOCHS):
            same_N = (text["input_ids"][one] == text["input_ids"][two]).all(axis=1)
            equal_N = np.ones_like(same_N)
            for key in ("input_ids", "target_positions", "target_ids"):
                equal_N &= (batch[key][one] == batch[key][two]).all(axis=1)
            turns = [e // masking.refresh % (masking.copies or EPOCHS) for e in (one, two)]
            if turns[0] == turns[1] and not masking.by_step:
                assert equal_N[same_N].all()
            elif (batch["target_ids"][one][same_N] != IGNORED).sum() > 60:
                assert not equal_N[same_N].all()


def same(one: Batch, two: Batch) -> bool:
    return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


def check_pure(batches: Batches, found: Batch, size: int, step: int) -> None:
    """Batch `step` of batches of another size, and its parts for ranks, hold the same rows."""
    other = dataclasses.replace(batches, batch_size=size)
    n = batches.examples.n
    step %= max(1, EPOCHS * n // size)
    batch = other.batch(step)
    place_B = np.arange(step * size, (step + 1) * size)
    here_B = place_B < EPOCHS * n
    epoch_B, id_B = (place_B // n)[here_B], batch["example_ids"][here_B]
    assert all(np.array_equal(batch[key][here_B], found[key][epoch_B, id_B]) for key in batch)
    world = next(ranks for ranks in (2, 3, 1) if size % ranks == 0)
    for rank in range(world):
        part = dataclasses.replace(other).batch(step, rank, world)
        assert same(part, {key: value[rank::world] for key, value in batch.items()})


def view(batches: Batches, size: int, limit: int | None = None) -> Batch:
    store, examples, pair, masking = batches.store, batches.examples, batches.pair, batches.masking
    parts = list(fixed_batches(store, examples, batches.format, pair, masking, 7, size, limit, batches.sampled))
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def check_view(batches: Batches, size: int, limit: int) -> None:
    """The fixed view: every example once, in order, whatever was read before and in whatever batches."""
    one, two, few = view(batches, 50), view(batches, size), view(batches, size, limit)
    assert np.array_equal(one["example_ids"], np.arange(batches.examples.n))
    assert same(one, two)
    assert len(few["example_ids"]) == limit
    assert (np.diff(few["example_ids"]) > 0).all()
    assert same(few, {key: value[few["example_ids"]] for key, value in one.items()})


def maskings(phrases: str) -> list[tuple[str, str, ClozeMasking]]:
    return [
        (name, policy, ClozeMasking(selection=make("masking/selection", name, path=phrases), **more))
        for policy, more in POLICIES.items()
        for name in registered("masking/selection")
    ]


@pytest.fixture(autouse=True)
def few_rows_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches are made 256 rows at a time: of a corpus of one example that would be 256 epochs."""
    monkeypatch.setattr(batches_module, "_ROWS", 24, raising=False)


@pytest.mark.parametrize(("name", "more", "pair_name"), carried())
def test_rows_labels_and_masks(
    tokenizers: list[TokenizerOption], phrases: str, name: str, more: dict[str, Any], pair_name: str
) -> None:
    reached: collections.Counter[str] = collections.Counter()
    few = 5 if make("format", name, **more).style.segments else 1  # pairs need more text, and strangers

    @on_corpora(f"{name}-{more}-{pair_name}")
    @given(
        corpora(few),
        st.sampled_from(tokenizers),
        st.integers(8, 64),
        st.integers(1, 9),
        st.integers(1, 40),
        st.integers(0, 99),
    )
    def check(corpus: Corpus, tokenizer: TokenizerOption, max_length: int, size: int, other: int, seed_: int) -> None:
        form = make("format", name, max_length=max_length, **more)
        pair = pair_objective(pair_name)
        with Opened(corpus, tokenizer) as (_, store):
            for split in ("train", "validation", "test"):
                examples = cut(store, form, split)
                if examples is None:
                    continue
                try:
                    plain = Batches(store, examples, form, pair, CausalTargets(), seed_, size)
                except ValueError as error:
                    one_line(error, f"the {split} split", store.corpus)
                    assert pair.name == "next"
                    assert len(set(examples.content.tolist())) == 1
                    continue
                assert pair.name != "next" or len(set(examples.content.tolist())) > 1
                text = by_example(plain, EPOCHS)
                check_text(store, form, pair, examples, text)
                check_causal(store, text)
                check_pure(plain, text, other, seed_)
                reached["examples"] += examples.n
                reached["label 1"] += int(text["pair_labels"].sum())
                if examples.n > 60:
                    continue  # more rows have nothing new in them, and there are many policies
                # A fifth of the policies for each corpus, in turns.
                reached["corpora"] += 1
                for selection, policy, masking in maskings(phrases)[reached["corpora"] % 5 :: 5]:
                    batches = dataclasses.replace(plain, masking=masking, sampled=True)
                    batch = by_example(batches, EPOCHS)
                    check_masks(store, masking, selection, rows_of(text), rows_of(batch))
                    check_turns(masking, text, batch)
                    if not masking.by_step:
                        check_pure(batches, batch, other, seed_)
                    check_view(batches, other, limit=1 + seed_ % examples.n)
                    reached[f"{selection}, {policy}"] += int((batch["target_ids"] != IGNORED).sum())

    check()
    assert reached["examples"] >= 5 * CORPORA, reached
    assert all(reached[f"{selection}, {policy}"] for selection, policy, _ in maskings(phrases)), reached
    assert (reached["label 1"] > 0) == (pair_objective(pair_name).labels is not None)
