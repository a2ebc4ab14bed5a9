"""Batches as a pure function of the step: what is in batch s does not depend on how one came there.

Global position g (row r of step s is g = s * B + r) lies in epoch g // n, at place g % n of that epoch's permutation.
Every batch is full; one that runs over an epoch's border takes each row in its own epoch. Resuming at step s is asking
for batch s; ranks take rows rank::world; the number of workers changes nothing.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.examples import Examples
from clozelab.data.pairs import PairObjective
from clozelab.data.store import Store
from clozelab.data.tokenizers import Tokenizer

Batch = dict[str, npt.NDArray]


class Format(Protocol):
    """What an option of the group `format` can do."""

    max_length: int

    def examples(self, store: Store, split: str) -> Examples: ...

    def assemble(
        self, store: Store, examples: Examples, first_B: npt.NDArray[np.int64], second_B: npt.NDArray[np.int64]
    ) -> Batch: ...


class Masking(Protocol):
    """What an option of the group `masking` can do."""

    def targets(self, max_length: int) -> int: ...

    def __call__(
        self,
        ids_BS: npt.NDArray[np.int64],
        maskable_BS: npt.NDArray[np.bool_],
        tokenizer: Tokenizer,
        *,
        seed: int,
        epoch: int,
        example_ids: npt.NDArray[np.int64],
        stream: str = "mask",
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]: ...


@dataclasses.dataclass(frozen=True)
class Batches:
    """The endless sequence of training batches of one run."""

    store: Store
    examples: Examples
    format: Format
    pair: PairObjective
    masking: Masking
    seed: int
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"the batch size is {self.batch_size}; give 1 or more")
        self.pair.check(self.examples)

    @functools.cached_property
    def _orders(self) -> dict[int, npt.NDArray[np.int64]]:
        return {}

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """[n]: the examples in the order of an epoch; the last two epochs asked for are kept."""
        orders = self._orders
        if epoch not in orders:
            while len(orders) > 1:
                orders.pop(next(iter(orders)))
            orders[epoch] = seeds.rng(self.seed, "order", epoch).permutation(self.examples.n).astype(np.int64)
        return orders[epoch]

    def rows(self, step: int, rank: int = 0, world: int = 1) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """(epoch, examples) of batch `step` in row order, one entry an epoch; of all rows, those of one rank."""
        g_B = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[rank::world]
        epoch_B, place_B = np.divmod(g_B, self.examples.n)
        return [(int(e), self.order(int(e))[place_B[epoch_B == e]]) for e in np.unique(epoch_B)]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Batch:
        """Batch `step` (from 0); under `world` ranks, the rows rank, rank + world, ... of it."""
        parts = [self._make(epoch, indices, "pair", "mask") for epoch, indices in self.rows(step, rank, world)]
        if len(parts) == 1:
            return parts[0]
        return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}

    def nonpad_tokens(self, step: int) -> int:
        """Positions of batch `step` that are not padding, special tokens included, without making the batch."""
        total = 0
        for epoch, indices in self.rows(step):
            first_B, second_B, _ = self.pair.draw(self.examples, indices, self.seed, epoch)
            total += int((self.examples.lengths[first_B] + self.examples.lengths[second_B] + 3).sum())
        return total

    def _make(self, epoch: int, indices: npt.NDArray[np.int64], pair_stream: str, mask_stream: str) -> Batch:
        first_B, second_B, labels_B = self.pair.draw(self.examples, indices, self.seed, epoch, pair_stream)
        made = self.format.assemble(self.store, self.examples, first_B, second_B)
        maskable_BS = made.pop("maskable")
        made["input_ids"], made["target_positions"], made["target_ids"] = self.masking(
            made["input_ids"],
            maskable_BS,
            self.store.tokenizer,
            seed=self.seed,
            epoch=epoch,
            example_ids=indices,
            stream=mask_stream,
        )
        made["pair_labels"] = labels_B
        made["example_ids"] = indices
        return made


def fixed_batches(
    store: Store,
    examples: Examples,
    format: Format,
    pair: PairObjective,
    masking: Masking,
    seed: int,
    batch_size: int,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Every example once, in order, with masks and pairs of its own streams: the same whenever it is asked.

    The streams "eval-mask" and "eval-pair" share nothing with training. `limit` takes the first so many examples of the
    fixed order of stream "eval-order" (then sorted), not the first documents. The last batch may be short.
    """
    batches = Batches(store, examples, format, pair, masking, seed, batch_size)
    chosen_N = np.arange(examples.n)
    if limit is not None and limit < examples.n:
        chosen_N = np.sort(seeds.rng(seed, "eval-order").permutation(examples.n)[:limit]).astype(np.int64)
    for start in range(0, len(chosen_N), batch_size):
        yield batches._make(0, chosen_N[start : start + batch_size], "eval-pair", "eval-mask")
