"""Tokenizers: training repeats itself, files of every layout open, the word cache changes no id."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from datahelp import document, shared
from hypothesis import given, settings
from hypothesis import strategies as st

from clozelab.data.plain import PlainWordPiece
from clozelab.data.tokenizers import ByteBpeOption, FileOption, Tokenizer, WordPieceOption

TEXTS = [document(np.random.default_rng(n), 30) for n in range(10)]


def trained(folder: Path, option: WordPieceOption | ByteBpeOption | None = None) -> Tokenizer:
    return (option or WordPieceOption(vocab_size=400)).load(lambda: TEXTS, "corpus", folder)


@pytest.mark.parametrize("option", [WordPieceOption(vocab_size=400), ByteBpeOption(vocab_size=400)])
def test_training_twice_gives_the_same_bytes(tmp_path: Path, option: WordPieceOption | ByteBpeOption) -> None:
    one, two = trained(tmp_path / "1", option), trained(tmp_path / "2", option)
    assert one.inner.to_str() == two.inner.to_str()
    assert one.fingerprint == two.fingerprint
    assert one.vocab_size <= 400
    assert one.id_dtype == np.uint16


def test_training_does_not_hang_on_the_process(tmp_path: Path) -> None:
    """A hash table's order changes from process to process, not only from training to training."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import test_tokenizers as t;"
        "print(t.trained(Path(sys.argv[2])).fingerprint)"
    )
    here = str(Path(__file__).parent)
    got = {
        subprocess.run(
            [sys.executable, "-c", code, here, str(tmp_path / str(n))], check=True, capture_output=True, text=True
        ).stdout
        for n in range(3)
    }
    assert got == {trained(tmp_path / "here").fingerprint + "\n"}


def test_too_few_entries_for_the_signs(tmp_path: Path) -> None:
    signs = "".join(chr(code) for code in range(0x4E00, 0x4E00 + 500))
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size is 300, but the signs .* need 5\d\d entries"):
        WordPieceOption(vocab_size=300).load(lambda: [signs], "corpus", tmp_path)


def test_second_load_trains_nothing(tmp_path: Path) -> None:
    def never() -> Iterator[str]:
        raise AssertionError("trained again")

    option = WordPieceOption(vocab_size=400)
    one = option.load(lambda: TEXTS, "corpus", tmp_path)
    assert option.load(never, "corpus", tmp_path).fingerprint == one.fingerprint
    for other, corpus in ((WordPieceOption(vocab_size=401), "corpus"), (option, "other")):
        assert other.fingerprint(corpus) != option.fingerprint("corpus")
        with pytest.raises(AssertionError, match="trained again"):
            other.load(never, corpus, tmp_path)


@pytest.mark.parametrize("option", [WordPieceOption(vocab_size=400), ByteBpeOption(vocab_size=400)])
def test_roles_and_ordinary_ids(tmp_path: Path, option: WordPieceOption | ByteBpeOption) -> None:
    made = trained(tmp_path, option)
    roles = {made.pad_id, made.unk_id, made.cls_id, made.sep_id, made.mask_id}
    assert len(roles) == 5
    assert roles <= made.special_ids
    assert not set(made.ordinary_ids.tolist()) & made.special_ids
    assert len(made.ordinary_ids) + len(made.special_ids) == made.vocab_size
    ids = made.encode_batch(["river mountain 7."])[0]
    assert not set(ids.tolist()) & roles
    assert made.decode(ids) == "river mountain 7."
    again = FileOption(path=str(made.save(tmp_path / "saved"))).load(list, "", tmp_path)
    assert again.fingerprint == made.fingerprint


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="training split is empty"):
        WordPieceOption(vocab_size=400).load(list, "corpus", tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size is 10"):
        WordPieceOption(vocab_size=10)
    with pytest.raises(ValueError, match=r"tokenizer\.path is empty"):
        FileOption()
    with pytest.raises(ValueError, match=r"no file .*nothing"):
        FileOption(path=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        FileOption(path=str(tmp_path))
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.txt: the vocabulary lacks \[MASK\]; a BERT-style"):
        FileOption(path=str(tmp_path)).load(list, "", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        FileOption(path=str(tmp_path / "tokenizer.json")).load(list, "", tmp_path)
    with pytest.raises(ValueError, match="states its own case folding"):
        FileOption(path=str(tmp_path / "tokenizer.json"), lowercase=True)


def test_bert_vocabulary(tmp_path: Path) -> None:
    path = shared("vocab", "bert-base-uncased-vocab.txt")
    made = FileOption(path=str(path)).load(list, "", tmp_path)
    assert (made.vocab_size, made.pad_id, made.unk_id, made.cls_id, made.sep_id, made.mask_id) == (
        30522, 0, 100, 101, 102, 103,
    )  # fmt: skip
    assert made.encode_batch(["Hello, World!"])[0].tolist() == [7592, 1010, 2088, 999]
    unused = made.inner.token_to_id("[unused5]")
    assert unused in made.special_ids  # never a random replacement


def test_the_chinese_vocabulary_holds_signs_that_end_lines_elsewhere(tmp_path: Path) -> None:
    made = FileOption(path=str(shared("vocab", "bert-base-chinese-vocab.txt"))).load(list, "", tmp_path)
    assert (made.vocab_size, made.pad_id, made.mask_id) == (21128, 0, 103)
    assert len(made.encode_batch(["宝玉笑道"])[0]) == 4


def test_gpt2_vocabulary_lacks_special_tokens(tmp_path: Path) -> None:
    vocab, merges = shared("vocab", "gpt2-encoder.json"), shared("vocab", "gpt2-vocab.bpe")
    with pytest.raises(ValueError, match=r"gpt2-encoder\.json: the vocabulary lacks .*<mask>.*add them"):
        FileOption(path=str(vocab), merges=str(merges)).load(list, "", tmp_path)
    words = json.loads(vocab.read_text(encoding="utf-8"))
    for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>"):
        words[token] = len(words)
    (tmp_path / "vocab.json").write_text(json.dumps(words), encoding="utf-8")
    (tmp_path / "merges.txt").write_bytes(merges.read_bytes())
    made = FileOption(path=str(tmp_path)).load(list, "", tmp_path)
    assert made.encode_batch(["Hello world"])[0].tolist() == [15496, 995]
    assert made.mask_id == 50257 + 4
    assert made.decode(made.encode_batch(["Ünïcode – 語."])[0]) == "Ünïcode – 語."


def reference(made: Tokenizer, lines: list[str]) -> list[list[int]]:
    return [e.ids for e in made.inner.encode_batch(lines, add_special_tokens=False)]


_ODD = "\t\r\n\x00\x07\x0b\x1f\x7f\u0301\u00a0\u2009\u2028"
_signs = st.text(
    st.sampled_from(list("abcABCxyz01,.!?'-_@^`~ féÉñØÆœİıȺ×÷語ß–—…“”‘’«»¿§·•[]MASK#" + _ODD)),
    max_size=40,
)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = trained(tmp_path_factory.mktemp("tokenizer"))
    assert made._cache is not None
    return made


@settings(max_examples=300, deadline=None)
@given(st.lists(_signs | st.just("a [MASK] b") | st.just("x" * 150) | st.text(max_size=20), max_size=8))
def test_plain_text_and_word_cache_change_no_id(cached: Tokenizer, lines: list[str]) -> None:
    expected = reference(cached, lines)
    assert [ids.tolist() for ids in cached.encode_batch(lines)] == expected
    plain = PlainWordPiece.of(cached.inner)
    assert plain is not None
    ids_T, lengths_N = plain.encode_flat(lines)
    assert ids_T.tolist() == [i for ids in expected for i in ids]
    assert lengths_N.tolist() == [len(ids) for ids in expected]


def test_word_cache_on_text_and_after_a_reset(cached: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clozelab.data.wordcache.MAX_WORDS", 5)
    lines = [line for text in TEXTS for line in text.split(". ")]
    for start in range(0, len(lines), 50):
        part = lines[start : start + 50]
        assert [ids.tolist() for ids in cached.encode_batch(part)] == reference(cached, part)


def test_word_cache_only_where_words_are_independent(tmp_path: Path) -> None:
    assert trained(tmp_path, ByteBpeOption(vocab_size=400))._cache is None
    inner = trained(tmp_path).inner
    inner.normalizer = tokenizers.normalizers.Lowercase()
    assert Tokenizer(inner, "test")._cache is None
    inner = trained(tmp_path).inner
    inner.add_tokens([tokenizers.AddedToken("house", normalized=True)])  # also "HOUSE" is this token
    assert Tokenizer(inner, "test")._cache is None
