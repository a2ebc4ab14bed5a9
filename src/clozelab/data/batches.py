"""Batches as a pure function of the step: what is in batch s does not depend on how one came there.

Global position g (row r of step s is g = s * B + r) lies in epoch g // n, at place g % n of that epoch's permutation.
Every batch is full; one that runs over an epoch's border takes each row in its own epoch. Resuming at step s is asking
for batch s; ranks take rows rank::world; the number of workers changes nothing.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.examples import Examples
from clozelab.data.format import FormatOption
from clozelab.data.masking.causal import CausalTargets
from clozelab.data.masking.cloze import ClozeMasking
from clozelab.data.pairs import PairObjective
from clozelab.data.store import Store

Batch = dict[str, npt.NDArray]

_BLOCK = 4096  # places of an epoch's order that are computed at a time
_ROWS = 256  # about as many rows of small batches are made at a time


@dataclasses.dataclass(frozen=True)
class Batches:
    """The endless sequence of training batches of one run."""

    store: Store
    examples: Examples
    format: FormatOption
    pair: PairObjective
    masking: ClozeMasking | CausalTargets
    seed: int
    batch_size: int
    first_step: int = 0
    """Step of the run at which these batches begin, for a masking that goes by it."""
    sampled: bool = False
    """Batches have `target_draws` [B, K], float32 in [0, 1): a uniform number a target, for a model that draws."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"the batch size is {self.batch_size}; give 1 or more")
        self.pair.check(self.examples)
        self.masking.check(self.store.tokenizer)

    @functools.cached_property
    def _blocks(self) -> dict[tuple[int, int], npt.NDArray[np.int64]]:
        return {}

    def order(self, epoch: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The examples at some places (rising) of an epoch's order.

        The order is never made as a whole: a block of it is, and the last few that were asked for are kept.
        """
        if len(places) and places[0] // _BLOCK == places[-1] // _BLOCK:
            return self._block(epoch, int(places[0]) // _BLOCK)[places % _BLOCK]
        found = np.empty(len(places), dtype=np.int64)
        for block in np.unique(places // _BLOCK).tolist():
            here = places // _BLOCK == block
            found[here] = self._block(epoch, block)[places[here] % _BLOCK]
        return found

    def _block(self, epoch: int, block: int) -> npt.NDArray[np.int64]:
        blocks = self._blocks
        if (epoch, block) not in blocks:
            while len(blocks) > 3:
                blocks.pop(next(iter(blocks)))
            n = self.examples.n
            places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, n))
            blocks[epoch, block] = seeds.permute(self.seed, "order", (epoch,), n, places)
        return blocks[epoch, block]

    def rows(self, step: int, rank: int = 0, world: int = 1) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """(epoch, examples) of batch `step` in row order, one entry an epoch; of all rows, those of one rank."""
        return self._rows(step, 1, rank, world)

    def _rows(self, step: int, steps: int, rank: int, world: int) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """The same of `steps` batches from `step` on, one after another."""
        n = self.examples.n
        g_SB = np.arange(step * self.batch_size, (step + steps) * self.batch_size).reshape(steps, self.batch_size)
        g_B = g_SB[:, rank::world].ravel()
        if len(g_B) and (epoch := int(g_B[0]) // n) == int(g_B[-1]) // n:
            return [(epoch, self.order(epoch, g_B - epoch * n))]
        epoch_B, place_B = np.divmod(g_B, n)
        return [(int(e), self.order(int(e), place_B[epoch_B == e])) for e in np.unique(epoch_B)]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Batch `step` (from 0); under `world` ranks, the rows rank, rank + world, ... of it.

        Raises:
            ValueError: the ranks cannot part the batch evenly.

        A few small batches are made in one go and kept: whole-array operations cost the same for some rows more.
        """
        if self.batch_size % world:
            raise ValueError(f"{world} ranks cannot part a batch of {self.batch_size} sequences evenly")
        steps = 1 if self.masking.by_step else max(1, _ROWS // self.batch_size)
        first = step // steps * steps
        made = self._together(first, steps, rank, world)
        rows = len(made["example_ids"]) // steps
        here = slice((step - first) * rows, (step - first + 1) * rows)
        # Copies: whoever is given a batch may write into it.
        return {key: value[here].copy() for key, value in made.items()}

    @functools.cached_property
    def _kept(self) -> dict[tuple[int, int, int], Batch]:
        return {}

    def _together(self, first: int, steps: int, rank: int, world: int) -> Batch:
        kept = self._kept
        if (first, rank, world) not in kept:
            kept.clear()
            step = self.first_step + first
            parts = [self._make(epoch, indices, step) for epoch, indices in self._rows(first, steps, rank, world)]
            if len(parts) > 1:
                parts = [{key: np.concatenate([part[key] for part in parts]) for key in parts[0]}]
            (kept[first, rank, world],) = parts
        return kept[first, rank, world]

    def nonpad_tokens(self, step: int) -> int:
        """Positions of batch `step` that are not padding, special tokens included, without making the batch."""
        total = 0
        for epoch, indices in self.rows(step):
            segment_R, row_R, _ = self.runs(epoch, indices, "pair")
            runs_B = np.bincount(row_R, minlength=len(indices))
            text_B = np.bincount(row_R, weights=self.examples.lengths_of(segment_R), minlength=len(indices))
            total += int(self.format.style.lengths(runs_B, text_B.astype(np.int64)).sum())
        return total

    def runs(self, epoch: int, indices: npt.NDArray[np.int64], stream: str) -> tuple[npt.NDArray[np.int64], ...]:
        """(segments [R], their rows [R], pair labels [B])."""
        if not self.examples.paired:
            return *self.examples.runs(indices), np.zeros(len(indices), dtype=np.int64)
        drawn = self.pair.draw(self.examples, indices, self.seed, epoch, stream, self._same_text)
        first_B, second_B, labels_B = drawn
        return np.stack([first_B, second_B], axis=1).ravel(), np.repeat(np.arange(len(indices)), 2), labels_B

    def _same_text(self, one_B: npt.NDArray[np.int64], other_B: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """[B] bool: which segments hold the same tokens."""
        same_B: npt.NDArray[np.bool_] = self.examples.lengths_of(one_B) == self.examples.lengths_of(other_B)
        for row in np.flatnonzero(same_B):  # few are of one length
            (a, b), (c, d) = self.examples.segments[one_B[row]], self.examples.segments[other_B[row]]
            same_B[row] = np.array_equal(self.store.ids[a:b], self.store.ids[c:d])
        return same_B

    def _make(
        self,
        epoch: int,
        indices: npt.NDArray[np.int64],
        step: int,
        pair_stream: str = "pair",
        mask_stream: str = "mask",
    ) -> Batch:
        segment_R, row_R, labels_B = self.runs(epoch, indices, pair_stream)
        words = self.masking.needs_words
        made = self.format.assemble(
            self.store, self.examples, segment_R, row_R, len(indices), sources=words and self.store.words is not None
        )
        maskable_BS = made.pop("maskable")
        starts_word_BS = self.store.word_starts(made["input_ids"], made.pop("source", None)) if words else None
        made["input_ids"], made["target_positions"], made["target_ids"] = self.masking(
            made["input_ids"],
            maskable_BS,
            self.store.tokenizer,
            seed=self.seed,
            epoch=epoch,
            example_ids=indices,
            stream=mask_stream,
            step=step,
            starts_word_BS=starts_word_BS,
        )
        if self.sampled:
            slots = made["target_ids"].shape[1]
            draws_BK = seeds.bits(self.seed, f"{mask_stream}-sample", (epoch,), indices, slots)
            made["target_draws"] = ((draws_BK >> np.uint64(40)) * 2.0**-24).astype(np.float32)
        made["pair_labels"] = labels_B
        made["example_ids"] = indices
        return made


def rows_of(batch_tokens: int, mean_length: float, multiple: int) -> int:
    """Sequences that have `batch_tokens` non-pad tokens together on average, to the nearest multiple (at least one)."""
    return max(1, round(batch_tokens / mean_length / multiple)) * multiple


def fixed_batches(
    store: Store,
    examples: Examples,
    format: FormatOption,
    pair: PairObjective,
    masking: ClozeMasking | CausalTargets,
    seed: int,
    batch_size: int,
    limit: int | None = None,
    sampled: bool = False,
) -> Iterator[Batch]:
    """Every example once, in order, with masks and pairs of its own streams: the same whenever it is asked.

    The streams "eval-mask" and "eval-pair" share nothing with training. `limit` takes the first so many examples of the
    fixed order of stream "eval-order" (then sorted), not the first documents. The last batch may be short.
    """
    batches = Batches(store, examples, format, pair, masking, seed, batch_size, sampled=sampled)
    chosen_N = np.arange(examples.n)
    if limit is not None and limit < examples.n:
        chosen_N = np.sort(seeds.rng(seed, "eval-order").permutation(examples.n)[:limit]).astype(np.int64)
    for start in range(0, len(chosen_N), batch_size):
        yield batches._make(0, chosen_N[start : start + batch_size], 0, "eval-pair", "eval-mask")
