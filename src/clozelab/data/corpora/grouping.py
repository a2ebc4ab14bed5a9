"""From lines or rows to documents."""

import re
from collections.abc import Callable, Iterable, Iterator

# " = Title = " begins an article of WikiText; " = = Section = = " stands inside one.
_title = re.compile(r"^\s*= (?!=)(?:(?! = = ).)*[^=\s] =\s*$")


def by_heading(rows: Iterable[str]) -> Iterator[list[str]]:
    """WikiText: an article begins at a row ` = Title = ` that stands between blank rows.

    Copies exist in which blank rows were dropped; as long as none was seen, a title needs none around it.
    """
    document: list[str] = []
    held: str | None = None  # a title after a blank row: it is one indeed if a blank row follows
    after_blank, any_blank = True, False
    for row in rows:
        blank = not row.strip()
        any_blank |= blank
        if held is not None:
            if (blank or not any_blank) and any(line.strip() for line in document):
                yield document
                document = []
            document.append(held)
            held = None
        if _title.match(row) and (after_blank or not any_blank):
            held = row
        else:
            document.append(row)
        after_blank = blank
    if held is not None:
        document.append(held)
    if document:
        yield document


def by_count(rows: Iterable[str], n: int) -> Iterator[list[str]]:
    """`n` rows in succession are a document."""
    document: list[str] = []
    for row in rows:
        document.append(row)
        if len(document) == n:
            yield document
            document = []
    if document:
        yield document


def by_blank_line(rows: Iterable[str]) -> Iterator[list[str]]:
    """A run of lines without a blank one is a document."""
    document: list[str] = []
    for row in rows:
        if row.strip():
            document.append(row)
        elif document:
            yield document
            document = []
    if document:
        yield document


def by_row(rows: Iterable[str]) -> Iterator[list[str]]:
    """Every row is a document."""
    for row in rows:
        yield [row]


def whole(rows: Iterable[str]) -> Iterator[list[str]]:
    """All rows are one document."""
    yield list(rows)


def grouping(rule: str, key: str) -> Callable[[Iterable[str]], Iterator[list[str]]]:
    """The grouping that a setting names: row, wikitext, consecutive:N.

    Raises:
        ValueError: another word.
    """
    if rule == "row":
        return by_row
    if rule == "wikitext":
        return by_heading
    name, _, number = rule.partition(":")
    if name == "consecutive" and number.isdecimal() and int(number) > 0:
        return lambda rows: by_count(rows, int(number))
    raise ValueError(f"{key} is {rule}; give row, wikitext, or consecutive:N (N rows in succession are a document)")
