"""What a format is: how documents become sequences.

A format cuts a split into examples (a table of segments and which of them belong together), and lays rows out of them.
A new format is one new file in `data/formats/`.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.examples import Examples
from clozelab.data.rows import RowStyle, lay_out
from clozelab.data.store import Store
from clozelab.options import discover, registered

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass
class FormatOption:
    """What an option of the group `format` can do."""

    max_length: int = 128
    """Positions of a sequence, special tokens and padding included."""

    def __post_init__(self) -> None:
        if self.max_length < 8:
            raise ValueError(f"format.max_length is {self.max_length}; a sequence needs at least 8 positions")

    @property
    def style(self) -> RowStyle:
        """What a row looks like."""
        return RowStyle(segments=False, apart=False)

    def examples(self, store: Store, split: str) -> Examples:
        """Cut the documents of a split.

        Raises:
            ValueError: the split gives no example; says why and the way out.
        """
        raise NotImplementedError

    def assemble(
        self, store: Store, examples: Examples, segment_R: Ints, row_R: Ints, rows: int, sources: bool = False
    ) -> dict[str, npt.NDArray]:
        """Rows of the segments `segment_R` [R], each in row `row_R` [R] behind those before it: see `data.rows`."""
        return lay_out(store, examples, segment_R, row_R, rows, self.max_length, self.style, sources)

    def lengths(self, examples: Examples) -> Ints:
        """[N]: positions in use of each example, special tokens included, in the true order."""
        return self.style.lengths(examples.sizes, examples.text_tokens)

    def mean_length(self, examples: Examples) -> float:
        """Mean of `lengths`, without making them for the whole split."""
        return examples.mean(self.style.lengths)


def format_named(name: str, max_length: int) -> FormatOption:
    """The format of that name with its default settings.

    Raises:
        ValueError: there is none; names those there are.
    """
    discover("clozelab.data.formats")
    known = registered("format")
    if name not in known:
        raise ValueError(f"no format {name}; there are {', '.join(known)}")
    made = known[name](max_length=max_length)
    assert isinstance(made, FormatOption)
    return made


def nothing(store: Store, split: str, what: str, need: str) -> ValueError:
    """The error of a split without an example."""
    documents = len(store.documents_of(split))
    return ValueError(
        f"the {split} split of corpus {store.corpus} gives no {what}: none of its {documents} documents has {need}; "
        "give longer documents, a smaller format.max_length, or other corpus.validation and corpus.test shares"
    )
