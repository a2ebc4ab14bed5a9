"""Cloze masking (Devlin et al. 2019, section 3.1): some of the text is chosen, most of it hidden, and has to be told.

Every part of the policy is a setting of its own:

    what is hidden together   `selection`, an option of the group `masking/selection`
    how much                  `rate`: fixed, moving with the steps, or drawn for each sequence
    what is predicted         all that was chosen, or a share of it (Wettig et al. 2023 part the two rates)
    what stands there instead `corruption`: the mask token, a random token, or what stood there, by token or by unit
    how often masks change    every epoch (dynamic), every n epochs, or among k copies (static; Liu et al. 2019, 4.1)

Static and dynamic masking are one thing: the number that enters the key of the draw. The epoch gives new masks each
time; epoch modulo k gives k copies that come round again.

With a fixed number a row gets max(1, round(rate x maskable)) targets (BERT's rule), so K, the width of the target
arrays, is known beforehand and shapes never change.

Shapes: B rows, S positions, K target slots.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from clozelab import seeds
from clozelab.data.masking.selection import Bools, Ints, Selection, choose
from clozelab.data.masking.selections.token import TokenSelection
from clozelab.data.tokenizers import Tokenizer
from clozelab.options import inner_option, option

IGNORED = -100  # the id of an unused target; torch's cross entropy ignores it by default

Masked = tuple[Ints, Ints, Ints]

RATE_LAWS = ("fixed", "linear", "uniform")
COUNTS = ("fixed", "bernoulli")
# A Bernoulli row has more targets than its slots once in so many rows; the surplus is left alone.
_SURPLUS = 1e-9


@option("masking", "cloze")
@dataclasses.dataclass
class ClozeMasking:
    """Which tokens of a sequence become targets, and what stands in their place."""

    causal: ClassVar[bool] = False
    selection: Selection = dataclasses.field(default_factory=TokenSelection, metadata=inner_option("token"))
    """What is hidden together, an option of the group masking/selection."""
    rate: float = 0.15
    """Share of a row's maskable tokens that are chosen."""
    rate_law: str = "fixed"
    """fixed; linear: from rate at step 0 to rate_to at step rate_steps, constant from there; uniform: each sequence has
    a rate of its own between rate and rate_to."""
    rate_to: float | None = None
    """The other end of a linear or uniform rate."""
    rate_steps: int | None = None
    """Steps in which a linear rate reaches its end."""
    count: str = "fixed"
    """fixed: the rounded share of the row, at least 1; bernoulli: each token is chosen or not on its own, so the number
    is drawn."""
    predicted: float = 1.0
    """Share of the chosen tokens that are predicted; the others are corrupted and not asked for."""
    corruption: list[float] = dataclasses.field(default_factory=lambda: [0.8, 0.1, 0.1])
    """Shares of what is chosen that are hidden by the mask token, exchanged for a random token, kept as they are."""
    together: bool = False
    """One decision about the corruption for all tokens of a unit (SpanBERT), instead of one for each (BERT)."""
    copies: int | None = None
    """null: new masks at every refresh (dynamic); k: k sets of masks that take turns (static; BERT has 10)."""
    refresh: int = 1
    """Epochs between two sets of masks."""

    def __post_init__(self) -> None:
        for key in ("rate", "rate_to", "predicted"):
            share = getattr(self, key)
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"masking.{key} is {share}; give a share above 0, at most 1")
        for key, names in (("rate_law", RATE_LAWS), ("count", COUNTS)):
            if getattr(self, key) not in names:
                raise ValueError(f"masking.{key} is {getattr(self, key)}; give one of {', '.join(names)}")
        if (self.rate_to is None) != (self.rate_law == "fixed"):
            raise ValueError(
                f"masking.rate_to is {self.rate_to} and masking.rate_law {self.rate_law}; a linear or uniform rate has "
                "two ends, a fixed one has one"
            )
        if (self.rate_steps is None) != (self.rate_law != "linear"):
            raise ValueError(
                f"masking.rate_steps is {self.rate_steps} and masking.rate_law {self.rate_law}; a linear rate "
                "needs it, no other has it"
            )
        if self.rate_steps is not None and self.rate_steps < 1:
            raise ValueError(f"masking.rate_steps is {self.rate_steps}; give 1 or more steps")
        shares = list(self.corruption)
        if len(shares) != 3 or min(shares) < 0 or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(f"masking.corruption is {shares}; give three shares (mask, random, keep) that sum to 1")
        if self.copies is not None and self.copies < 1:
            raise ValueError(f"masking.copies is {self.copies}; give 1 or more, or null for new masks every epoch")
        if self.refresh < 1:
            raise ValueError(f"masking.refresh is {self.refresh}; give 1 or more epochs")

    @property
    def by_step(self) -> bool:
        """Whether masks depend on the step, and not on example and epoch alone."""
        return self.rate_law == "linear"

    @property
    def needs_words(self) -> bool:
        """Whether `__call__` must be told where words begin."""
        return self.selection.needs_words

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise ValueError where the tokenizer cannot carry this policy."""
        self.selection.check(tokenizer)

    def targets(self, max_length: int) -> int:
        """K: target slots of a row in a format of `max_length` positions."""
        rate = max(self.rate, self.rate_to or 0)
        most = int(_fixed_counts(rate, max_length)[-1])
        if self.count == "bernoulli":
            most = _bernoulli_most(max_length, rate)
        return int(_share(np.asarray([most]), self.predicted)[0])

    def __call__(
        self,
        ids_BS: Ints,
        maskable_BS: Bools,
        tokenizer: Tokenizer,
        *,
        seed: int,
        epoch: int,
        example_ids: Ints,
        stream: str = "mask",
        step: int = 0,
        starts_word_BS: Bools | None = None,
    ) -> Masked:
        """Choose targets and corrupt them.

        Args:
            ids_BS: the sequences; left as they are.
            maskable_BS: True at text.
            tokenizer: theirs.
            seed: of the run.
            epoch: of these examples.
            example_ids: [B].
            stream: name of the random stream.
            step: of training, for a rate that moves.
            starts_word_BS: where words begin, if `needs_words`.

        Returns:
            input_ids [B, S], target_positions [B, K] (rising, then 0 where unused), target_ids [B, K] (-100 where
            unused), all int64.
        """
        B, S = ids_BS.shape
        K = self.targets(S)
        turn = epoch // self.refresh
        key = (turn if self.copies is None else turn % self.copies,)
        count_B = self._counts(np.count_nonzero(maskable_BS, axis=1), S, step, seed, stream, key, example_ids)
        slots = int(count_B.max()) if B else 0
        draws = seeds.bits(seed, stream, key, example_ids, S + max(K, slots))
        order_BS, fate_BC = draws[:, :S], draws[:, S : S + slots]
        if isinstance(self.selection, TokenSelection):
            at_BC, used_BC = _drawn_tokens(maskable_BS, count_B, order_BS, slots)
            first_BC = None
        else:
            assert starts_word_BS is not None or not self.needs_words
            inner_BS = np.broadcast_to(np.uint64(0), (B, S))
            if self.selection.needs_draws:
                inner_BS = seeds.bits(seed, f"{stream}-units", key, example_ids, S)
            words_BS = np.ones_like(maskable_BS) if starts_word_BS is None else starts_word_BS
            unit_BS = self.selection.units(ids_BS, maskable_BS, words_BS, tokenizer, inner_BS)
            at_BC, used_BC = _slots(choose(unit_BS, count_B, order_BS), slots)
            first_BC = _first_of_unit(np.take_along_axis(unit_BS, at_BC, axis=1)) if self.together else None

        flat_BC = at_BC + np.arange(B)[:, None] * S
        originals_BC = ids_BS.ravel()[flat_BC]
        input_BS = ids_BS.copy()
        corrupted_BC = self._corrupt(originals_BC, fate_BC, first_BC, tokenizer)
        input_BS.ravel()[flat_BC[used_BC]] = corrupted_BC[used_BC]
        if self.predicted < 1:
            at_BC, used_BC, originals_BC = self._asked(at_BC, used_BC, originals_BC, seed, stream, key, example_ids)
        target_BC = np.where(used_BC, originals_BC, IGNORED)
        return input_BS, _wide(at_BC, K, 0), _wide(target_BC, K, IGNORED)

    def _rate(
        self, step: int, seed: int, stream: str, key: tuple[int, ...], example_ids: Ints
    ) -> npt.NDArray[np.float64]:
        """[B]: the rate of each row."""
        if self.rate_law == "uniform":
            assert self.rate_to is not None
            draw_B = seeds.uniform(seed, f"{stream}-rate", key, example_ids, 1)[:, 0]
            return self.rate + (self.rate_to - self.rate) * draw_B
        rate = self.rate
        if self.rate_law == "linear":
            assert self.rate_to is not None
            assert self.rate_steps is not None
            rate += (self.rate_to - self.rate) * min(step / self.rate_steps, 1.0)
        return np.full(len(example_ids), rate)

    def _counts(
        self, maskable_B: Ints, S: int, step: int, seed: int, stream: str, key: tuple[int, ...], example_ids: Ints
    ) -> Ints:
        """[B]: how many tokens of each row are chosen."""
        if self.rate_law == "fixed" and self.count == "fixed":
            return _fixed_counts(self.rate, S)[maskable_B]
        rate_B = self._rate(step, seed, stream, key, example_ids)
        if self.count == "fixed":
            return np.minimum(maskable_B, np.maximum(1, np.rint(rate_B * maskable_B)).astype(np.int64))
        draw_B = seeds.uniform(seed, f"{stream}-count", key, example_ids, 1)[:, 0]
        from scipy import stats  # takes half a second, and few need it

        drawn_B = stats.binom.ppf(draw_B, maskable_B, rate_B).astype(np.int64)
        most = _bernoulli_most(S, max(self.rate, self.rate_to or 0))
        clipped_B: Ints = np.clip(drawn_B, 0, np.minimum(maskable_B, most))
        return clipped_B

    def _corrupt(
        self, originals_BC: Ints, fate_BC: npt.NDArray[np.uint64], first_BC: Ints | None, tokenizer: Tokenizer
    ) -> Ints:
        # Of a target's own 64 bits, the upper 24 say what happens to it and the lower 40 which token may replace it.
        kind_BC = (fate_BC >> np.uint64(40)) * 2.0**-24
        if first_BC is not None:
            kind_BC = np.take_along_axis(kind_BC, first_BC, axis=1)
        what_BC = (fate_BC & np.uint64(2**40 - 1)) * 2.0**-40
        random_BC = tokenizer.ordinary_ids[(what_BC * len(tokenizer.ordinary_ids)).astype(np.int64)]
        mask, random, _ = self.corruption
        kept_BC = np.where(kind_BC < mask + random, random_BC, originals_BC)
        return np.where(kind_BC < mask, tokenizer.mask_id, kept_BC)

    def _asked(
        self, at_BC: Ints, used_BC: Bools, originals_BC: Ints, seed: int, stream: str, key: tuple[int, ...], rows: Ints
    ) -> tuple[Ints, Bools, Ints]:
        """The share of the targets that is predicted, drawn anew."""
        draw_BC = seeds.bits(seed, f"{stream}-asked", key, rows, at_BC.shape[1])
        rank_BC = np.argsort(np.argsort(np.where(used_BC, draw_BC, ~np.uint64(0)), axis=1), axis=1)
        asked_BC = used_BC & (rank_BC < _share(used_BC.sum(axis=1), self.predicted)[:, None])
        order_BC = np.argsort(~asked_BC, axis=1, kind="stable")
        at_BC, originals_BC = (np.take_along_axis(x_BC, order_BC, axis=1) for x_BC in (at_BC, originals_BC))
        asked_BC = np.take_along_axis(asked_BC, order_BC, axis=1)
        return np.where(asked_BC, at_BC, 0), asked_BC, originals_BC


@functools.lru_cache(maxsize=64)
def _fixed_counts(rate: float, length: int) -> Ints:
    """[length + 1]: how many targets a row with so many maskable tokens gets; it never falls."""
    maskable = np.arange(length + 1)
    wanted = np.maximum(1, np.rint(rate * maskable)).astype(np.int64)
    return np.asarray(np.minimum(maskable, wanted), dtype=np.int64)


@functools.lru_cache(maxsize=64)
def _bernoulli_most(length: int, rate: float) -> int:
    from scipy import stats

    return int(stats.binom.isf(_SURPLUS, length, rate))


def _share(count_B: Ints, share: float) -> Ints:
    """Of so many, the rounded share, at least one where there is one."""
    shared_B: Ints = np.minimum(count_B, np.maximum(1, np.rint(share * count_B)).astype(np.int64))
    return shared_B


def _wide(x_BC: Ints, K: int, fill: int) -> Ints:
    """[B, K] of [B, C]."""
    if x_BC.shape[1] == K:
        return x_BC
    wide_BK = np.full((len(x_BC), K), fill, dtype=np.int64)
    wide_BK[:, : x_BC.shape[1]] = x_BC[:, :K]
    return wide_BK


def _drawn_tokens(
    maskable_BS: Bools, count_B: Ints, draws_BS: npt.NDArray[np.uint64], slots: int
) -> tuple[Ints, Bools]:
    """(positions [B, C], which are in use): single tokens, so many a row, all alike."""
    S = maskable_BS.shape[1]
    # The C smallest of independent draws are C positions drawn without replacement; a row needs its first few. The
    # position rides in the low bits of its own draw: one sort of plain numbers gives the choice and no ties.
    low = np.uint64((1 << S.bit_length()) - 1)
    order_BS = np.where(maskable_BS, (draws_BS & ~low) | np.arange(S, dtype=np.uint64), ~np.uint64(0))
    order_BS.sort(axis=1)
    used_BC = np.arange(slots) < count_B[:, None]
    at_BC = np.where(used_BC, (order_BS[:, :slots] & low).astype(np.int64), S)
    at_BC.sort(axis=1)
    at_BC[~used_BC] = 0
    return at_BC, used_BC


def _slots(chosen_BS: Bools, slots: int) -> tuple[Ints, Bools]:
    """(positions [B, C] that are chosen, rising; which are in use)."""
    used_BC = np.arange(slots) < np.count_nonzero(chosen_BS, axis=1)[:, None]
    at_BC = np.zeros(used_BC.shape, dtype=np.int64)
    at_BC[used_BC] = np.flatnonzero(chosen_BS) % chosen_BS.shape[1]  # both in the order of rows, then of positions
    return at_BC, used_BC


def _first_of_unit(unit_BC: Ints) -> Ints:
    """[B, C]: the first slot that has the unit of each slot; units rise along the slots."""
    new_BC = np.diff(unit_BC, axis=1, prepend=-1) != 0
    first_BC: Ints = np.maximum.accumulate(np.where(new_BC, np.arange(unit_BC.shape[1]), 0), axis=1)
    return first_BC
