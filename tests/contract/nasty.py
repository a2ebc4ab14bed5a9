"""Nasty corpora: what text from the world has in it, and tidy test text has not.

A corpus is drawn as a few small numbers (which kind of sentence, how often), so that hypothesis shrinks a failure to
the one sentence that matters; the text follows from them.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import strategies as st

from clozelab.data.corpora.text import Text

_WORDS = (
    *("river", "mountain", "senate", "tariff", "harvest", "railway"),
    *("treaty", "village", "winter", "engine", "music", "unbelievably"),
)
_FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"  # four people and three joiners, one picture
_FLAG = "\U0001f3f3\ufe0f\u200d\U0001f308"
_SKIN = "\U0001f44d\U0001f3fd"


def _words(n: int) -> str:
    return " ".join(_WORDS[(3 * i + n) % len(_WORDS)] for i in range(n)).capitalize()


# Name -> text of a sentence of size n (1 to 12), without its end.
KINDS: dict[str, Callable[[int], str]] = {
    "words": _words,
    "one word": lambda n: _WORDS[n % len(_WORDS)],
    "very long": lambda n: _words(12 * n),
    "phrases": lambda n: "Senate tariff " + "village railway treaty " * n,
    "emoji": lambda n: f"{_FAMILY}{_FLAG}{_SKIN} wow{_SKIN}" * n,
    "no space": lambda n: "abcdefghijklmnopqrstuvwxy z"[: 25 + n % 2].replace(" ", "q") * 400,  # 10 kB
    "no space, few": lambda n: "x" * (30 * n),
    "specials": lambda n: "A [MASK] and [SEP] or <mask> </s> [PAD] <pad> [CLS] <s> [UNK] <unk> [unused1] ##ing " * n,
    "only specials": lambda n: "[MASK]" * n + " <mask>" * n + "</s><pad>[PAD]",
    "control": lambda n: f"be{chr(n)}fore\x00 \x07\x1b[0m after\x7f" * n,
    "dropped": lambda n: "\x01\x02\u200b\u200e\ufeff\x00" * n,
    "bom": lambda n: "\ufeff" + "mark \ufeffin the text " * n,
    "line ends": lambda n: "one\x0btwo\x0cthree\x85four\u2028five\u2029six\x1cseven" * n,
    "half signs": lambda n: "half \ud83d or \udca9 \ud800x\udfff" * n,
    "combining": lambda n: "cafe\u0301 Z\u0324\u0351\u036b\u0343a\u0328lgo naïve" * n,
    "chinese": lambda n: "我来到北京清华大学" * n,
    "right to left": lambda n: "\u202bשלום עולם مرحبا بالعالم\u202c" * n,
    "scripts": lambda n: "Ελληνικά हिन्दी ไทย 한국어 ქართული ꙮ 𝕬𝖇𝖈 ﬁ" * n,
    "numbers": lambda n: "$1,234.56 e.g. 3.14e-10 U.S.A. don't 're-elected' ½ ² Ⅳ" * n,
    "signs": lambda n: "...---!!!" * n + "?",
    "address": lambda n: "https://example.org/a_b?c=d&e=%20f#" + "g" * n,
}
_ENDS = (". ", "! ", "? ", "。", "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", " ", ".\u2029", " . \t")

Sentence = tuple[str, int, str]


def whole(text: str) -> str:
    """The text with U+FFFD for half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents, and how they are kept on disk."""

    documents: tuple[tuple[Sentence, ...], ...]
    times: tuple[int, ...]
    """how often each document says what it says, one time after another (a long document)"""
    equal: tuple[int, ...]
    """documents that come a second time, at the end"""
    as_files: bool
    """one plain text file a document, every second with a byte-order mark; else the rows of one JSON-lines file"""
    validation: float

    def texts(self) -> list[str]:
        """The documents; some may be empty, or of white space alone."""
        made = [
            "".join(KINDS[kind](n) + end for kind, n, end in document) * times
            for document, times in zip(self.documents, self.times, strict=True)
        ]
        return made + [made[n] for n in self.equal]

    def write(self, folder: Path) -> Text:
        """The corpus of these documents, written to `folder`."""
        folder.mkdir(parents=True)
        if not self.as_files:
            # One row with a word, that there is always a corpus: what is said of an empty one is tested elsewhere.
            rows = (json.dumps({"text": text}) for text in [*self.texts(), "A river."])
            (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
            return Text(paths=[str(folder / "rows.jsonl")], validation=self.validation)
        for n, text in enumerate([*self.texts(), "A river."]):
            if text.strip() and text.strip("\ufeff \r\n"):
                mark = b"\xef\xbb\xbf" if n % 2 else b""
                (folder / f"{n:03}.txt").write_bytes(mark + whole(text).encode("utf-8"))
        return Text(paths=[str(folder / "*.txt")], validation=self.validation)


_sentences = st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 12), st.sampled_from(_ENDS))
# Half of the sentences are plain, or most of a corpus would be one long nasty thing.
_plain = st.tuples(st.just("words"), st.integers(1, 12), st.just(". "))


@st.composite
def corpora(draw: st.DrawFn, least: int = 1) -> Corpus:
    """From `least` to 9 documents of 0, 1, 2 or more sentences, some long, some equal."""
    sentence = st.one_of(_plain, _sentences)
    document = st.one_of(
        st.lists(sentence, max_size=2), st.lists(sentence, min_size=2, max_size=8), st.lists(_plain, max_size=12)
    )
    drawn = draw(st.lists(document, min_size=least, max_size=9))
    times = draw(
        st.lists(st.sampled_from((1, 1, 1, 1, 2, 5)), min_size=len(drawn), max_size=len(drawn)),
    )
    equal = draw(st.lists(st.integers(0, len(drawn) - 1), max_size=2))
    return Corpus(
        documents=tuple(map(tuple, drawn)),
        times=tuple(times),
        equal=tuple(equal),
        as_files=draw(st.booleans()),
        validation=draw(st.sampled_from((0.0, 0.3))),
    )


def training_texts() -> Iterator[str]:
    """What the tokenizers of the tests are trained on: a little of every kind, mostly plain."""
    for n in range(1, 13):
        yield f"{_words(n)}. " * 8
        yield whole(" ".join(KINDS[kind](1 + n % 3) for kind in sorted(KINDS) if kind not in ("no space", "very long")))
