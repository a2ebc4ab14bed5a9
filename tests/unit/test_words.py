"""Where words begin: by the vocabulary, and by a segmenter."""

from pathlib import Path

import numpy as np
import pytest

from clozelab.data.corpora.text import Text
from clozelab.data.masking.selection import numbered
from clozelab.data.store import open_store, read_store
from clozelab.data.tokenizers import ByteBpeOption, FileOption, Tokenizer, WordPieceOption

TEXT = "The committee's 1st re-election in 1888, unbelievably, cost $5.20 — naïve façades aside. "


def tokenizer(option: WordPieceOption | ByteBpeOption, folder: Path) -> Tokenizer:
    return option.load(lambda: [TEXT * 20], "words", folder)


@pytest.mark.parametrize("option", [WordPieceOption(vocab_size=300), ByteBpeOption(vocab_size=320)], ids=str)
def test_words_are_those_of_the_library(option: WordPieceOption | ByteBpeOption, tmp_path: Path) -> None:
    made = tokenizer(option, tmp_path)
    encoding = made.inner.encode(TEXT.strip(), add_special_tokens=False)
    assert made.word_starts is not None
    starts = made.word_starts(np.asarray([encoding.ids]))[0]
    words = np.asarray(encoding.word_ids)
    assert starts.tolist() == [True, *(words[1:] != words[:-1]).tolist()]


def test_a_segmenter_marks_words_of_characters(tmp_path: Path) -> None:
    pytest.importorskip("jieba", reason="needs jieba: pip install clozelab[zh]")
    sentences = "我来到北京清华大学。他在大学里学习自然语言处理。"
    (tmp_path / "zh.txt").write_text(sentences * 3, encoding="utf-8")
    characters = sorted(set(sentences))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    corpus = Text(paths=[str(tmp_path / "zh.txt")], language="zh", validation=0)
    plain, segmented = (FileOption(path=str(tmp_path / "vocab.txt"), words=words) for words in (None, "jieba"))
    store = open_store(corpus, segmented, tmp_path / "cache")
    assert store.fingerprint != open_store(corpus, plain, tmp_path / "cache").fingerprint
    assert read_store(store.path).words is not None
    n = int(store.sentence_offsets[1])
    source = np.arange(n)[None]
    ids = store.ids[:n].astype(np.int64)[None]
    word = numbered(store.word_starts(ids, source), np.ones_like(ids, dtype=bool))[0]
    text = [store.tokenizer.inner.id_to_token(int(i)) for i in ids[0]]
    words = ["".join(text[k] for k in np.flatnonzero(word == w)) for w in range(word[-1] + 1)]
    assert words == ["我", "来到", "北京", "清华大学", "。"]


def test_an_unknown_segmenter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.words is 'pkuseg'"):
        WordPieceOption(words="pkuseg")
