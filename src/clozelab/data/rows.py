"""How runs of text become the rows of a batch: special tokens, segments, padding. Shared by all formats.

    one sequence a row     [CLS] run [SEP] run [SEP] ...      the runs see each other
    one sequence a run     [CLS] run [SEP] [CLS] run [SEP]    each sees itself alone (a block mask), positions restart

Shapes: B rows, S positions, R runs of the batch, T tokens of text in it.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from clozelab.data.examples import Examples
from clozelab.data.store import Store

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class RowStyle:
    """What a format's rows look like."""

    segments: bool
    """The second run of a row is in segment 1 (two-segment formats); else all are in segment 0."""
    apart: bool
    """Each run is a sequence of its own."""

    def lengths(self, runs_B: Ints, text_B: Ints) -> Ints:
        """Positions in use of rows with so many runs and tokens of text."""
        return text_B + 2 * runs_B if self.apart else text_B + runs_B + 1


def lay_out(
    store: Store,
    examples: Examples,
    segment_R: Ints,
    row_R: Ints,
    rows: int,
    length: int,
    style: RowStyle,
    sources: bool = False,
) -> dict[str, npt.NDArray]:
    """Rows made of the segments `segment_R`, run r in row `row_R[r]` (never falling) behind those before it.

    Returns:
        input_ids, segment_ids int64 [B, S]; attention_mask, maskable bool [B, S] (maskable is text alone: no padding,
        no special token, not even one that stands in the text). Where runs stand apart also position_ids and
        document_ids int64 [B, S] (0 at padding, from 1 elsewhere, never the same twice in a row). With `sources` also
        source int64 [B, S]: the place in the store of each token of text, -1 elsewhere.
    """
    tokenizer = store.tokenizer
    B, S = rows, length
    tokens_R2 = examples.segments[segment_R]
    source_R, length_R = tokens_R2[:, 0], tokens_R2[:, 1] - tokens_R2[:, 0]
    first_R = np.ones(len(row_R), dtype=bool)  # the first run of its row
    first_R[1:] = row_R[1:] != row_R[:-1]
    # A run takes its text and a [SEP]; the first of a row, or every one that stands apart, a [CLS] too.
    opened_R = np.ones_like(first_R) if style.apart else first_R
    size_R = length_R + 1 + opened_R
    before_R = np.cumsum(size_R) - size_R
    begin_R = row_R * S + before_R - before_R[first_R][np.cumsum(first_R) - 1]
    text_R = begin_R + opened_R

    at_T = _spread(text_R, length_R)
    from_T = at_T + np.repeat(source_R - text_R, length_R)
    text_T = store.ids[from_T]

    text = np.zeros(B * S, dtype=bool)  # places rise with T: a mask stands for them, and is faster than they are
    text[at_T] = True
    ids = np.full(B * S, tokenizer.pad_id, dtype=np.int64)
    ids[text] = text_T
    ids[begin_R[opened_R]] = tokenizer.cls_id
    ids[text_R + length_R] = tokenizer.sep_id
    maskable = np.zeros(B * S, dtype=bool)
    maskable[text] = ~tokenizer.is_special_V.take(text_T)
    end_B = np.zeros(B, dtype=np.int64)
    end_B[row_R] = begin_R + size_R - row_R * S  # of a row's runs the last is written last
    attention_BS = np.arange(S) < end_B[:, None]
    made: dict[str, npt.NDArray] = {
        "input_ids": ids.reshape(B, S),
        "attention_mask": attention_BS,
        "maskable": maskable.reshape(B, S),
    }
    if style.segments:
        second_B = np.full(B, S)
        second_B[row_R[~first_R]] = (begin_R - row_R * S)[~first_R]
        made["segment_ids"] = ((np.arange(S) >= second_B[:, None]) & attention_BS).astype(np.int64)
    else:
        made["segment_ids"] = np.zeros((B, S), dtype=np.int64)
    if style.apart:
        at_P = _spread(begin_R, size_R)
        position, document = np.zeros(B * S, dtype=np.int64), np.zeros(B * S, dtype=np.int64)
        position[at_P] = at_P - np.repeat(begin_R, size_R)
        # Counted from 1 in every row: what a row holds does not depend on the batch.
        number_R = np.arange(len(row_R)) - np.flatnonzero(first_R)[np.cumsum(first_R) - 1] + 1
        document[at_P] = np.repeat(number_R, size_R)
        made |= {"position_ids": position.reshape(B, S), "document_ids": document.reshape(B, S)}
    if sources:
        source = np.full(B * S, -1, dtype=np.int64)
        source[text] = from_T
        made["source"] = source.reshape(B, S)
    return made


def _spread(begin_R: Ints, size_R: Ints) -> Ints:
    """Every place of the runs."""
    base_R = np.cumsum(size_R) - size_R
    places: Ints = np.arange(int(size_R.sum())) + np.repeat(begin_R - base_R, size_R)
    return places
