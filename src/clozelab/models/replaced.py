"""Replaced-token detection (ELECTRA, Clark et al. 2020, section 2): a generator, and the discriminator, which is what
is kept.

    y_k  ~  softmax(logits of the generator at target k / temperature)
    x'   =  x with y_k in the place of each target
    told of every token of x': is it another than in x?

The draw is by inversion of the cumulated probabilities with one uniform number a target, which the data bring: so it
does not depend on how a batch is parted among micro-batches and ranks. Special tokens are never drawn.

Shapes: B sequences, S positions, K target slots, N targets, V vocabulary, O output width.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from clozelab.models.encoder import EncoderOption
from clozelab.models.heads import MaskedLMHead
from clozelab.models.pretraining import (
    Losses,
    PretrainingModel,
    Scored,
    TargetScores,
    in_slots,
    score_targets,
)

# Logits that are held at a time while tokens are drawn.
_LOGITS = 1 << 24


class ReplacedTokenModel(PretrainingModel):
    """A discriminator (encoder, pair head, head of replaced tokens) and the generator that makes its input.

    Args:
        option: the discriminator's encoder.
        generator: the generator's encoder; its embedding has the width of the discriminator's.
        vocab_size: V.
        pad_id: id of the padding token.
        pair: build the pair head, on the discriminator.
        tie: what the two share: none, embeddings (tokens, segments, their norm, and positions that are embedded), all.
        temperature: of the draw.
        special_ids: tokens that are never drawn.
    """

    def __init__(
        self,
        option: EncoderOption,
        generator: EncoderOption,
        vocab_size: int,
        pad_id: int,
        pair: bool = False,
        tie: str = "embeddings",
        temperature: float = 1.0,
        special_ids: Iterable[int] = (),
    ) -> None:
        super().__init__(option, vocab_size, pad_id, mlm=False, pair=pair, replaced=True)
        self.generator = PretrainingModel(generator, vocab_size, pad_id)
        if tie == "all":
            self.generator.encoder = self.encoder
        elif tie == "embeddings":
            ours, theirs = self.encoder.embeddings, self.generator.encoder.embeddings
            theirs.token, theirs.segment, theirs.norm = ours.token, ours.segment, ours.norm
            if ours.position.embed(torch.zeros(1, dtype=torch.long, device=ours.token.weight.device)) is not None:
                theirs.position = ours.position
        if self.generator.mlm is not None and self.generator.mlm.tied:
            self.generator.mlm.weight = self.generator.encoder.embeddings.token.weight
        self.temperature = temperature
        barred_V = torch.zeros(vocab_size)
        barred_V[list(special_ids)] = -torch.inf
        self.register_buffer("barred_V", barred_V, persistent=False)
        self.barred_V: Tensor

    @property
    def filler(self) -> PretrainingModel:
        return self.generator

    @torch.no_grad()
    def scores(self, batch: Mapping[str, Tensor]) -> TargetScores:
        """The losses one by one; those of targets are the generator's."""
        filled = self.fill(batch)
        mlm, pair, replaced, layout = self._told(batch, *filled)
        assert replaced is not None
        mask_BS = batch["attention_mask"]
        labels_BS = filled[1]
        # Of tokens in the form of the layout, back on the grid of the batch.
        grid_BS = torch.arange(mask_BS.shape[1], device=mask_BS.device).expand(mask_BS.shape)
        both = torch.stack([replaced.loss, replaced.correct.float()], dim=-1)
        loss_BS, correct_BS = (layout.pick(both, grid_BS) * mask_BS[..., None]).unbind(-1)
        of_BS2 = torch.stack([mask_BS & ~labels_BS, mask_BS & labels_BS], dim=-1).float()
        filled_BK, (pair_B, right_B) = in_slots(mlm, batch["target_ids"]), (None, None) if pair is None else pair[:2]
        return TargetScores(
            *filled_BK,
            pair_loss_B=pair_B,
            pair_correct_B=right_B,
            replaced_loss_B=loss_BS.sum(1),
            replaced_hits_B2=(of_BS2 * correct_BS[..., None]).sum(1),
            replaced_of_B2=of_BS2.sum(1),
        )

    def losses(self, batch: Mapping[str, Tensor]) -> Losses:
        return self._told(batch, *self.fill(batch))

    def _told(self, batch: Mapping[str, Tensor], ids_BS: Tensor, replaced_BS: Tensor, mlm: Scored) -> Losses:
        told = super().losses({**batch, "input_ids": ids_BS, "replaced": replaced_BS})
        return told._replace(mlm=mlm)

    def fill(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Scored]:
        """(the text with the generator's tokens at the targets [B, S]; which of its tokens are others than in the text
        [B, S] bool; the generator's losses at the targets)."""
        generator, head = self.generator, self.generator.mlm
        assert head is not None
        read = generator.read(batch)
        assert read.output_VO is not None
        target_BK = read.target_BK
        slots = target_BK.shape[1]
        mlm = score_targets(head, read.hidden_BKH, read.output_VO, target_BK)
        drawn_BK = self._draw(head, read.hidden_BKH, read.output_VO, target_BK, batch["target_draws"][:, :slots])
        place_BK, used_BK = batch["target_positions"][:, :slots], target_BK >= 0
        # Slots that are not in use point at position 0: they go to a column behind the text.
        place_BK = torch.where(used_BK, place_BK, batch["input_ids"].shape[1])
        wide_BS = F.pad(batch["input_ids"], (0, 1))
        text_BS = wide_BS.scatter(1, place_BK, target_BK)[:, :-1]
        ids_BS = wide_BS.scatter(1, place_BK, drawn_BK)[:, :-1]
        return ids_BS, ids_BS != text_BS, mlm

    @torch.no_grad()
    def _draw(
        self, head: MaskedLMHead, hidden_BKH: Tensor, output_VO: Tensor, target_BK: Tensor, draws_BK: Tensor
    ) -> Tensor:
        """[B, K] tokens; at slots that are not in use, any."""
        used_BK = target_BK >= 0
        picks = hidden_BKH.device.type == "cpu" and not torch.compiler.is_compiling()
        hidden_BKH = hidden_BKH.detach()
        x_NO = head.transform(hidden_BKH[used_BK] if picks else hidden_BKH.flatten(0, 1))
        draws_N1 = (draws_BK[used_BK] if picks else draws_BK.flatten())[:, None]
        bias_V = head.bias.float() + self.barred_V
        found = []
        rows = max(1, _LOGITS // len(bias_V))
        for first in range(0, len(x_NO), rows):
            logits_NV = F.linear(x_NO[first : first + rows], output_VO).float() + bias_V
            cumulated_NV = (logits_NV / self.temperature).softmax(1).cumsum(1)
            # Rounding leaves the last sum a little off 1: the draw is a share of it, and below it.
            total_N1 = cumulated_NV[:, -1:]
            wanted_N1 = torch.minimum(draws_N1[first : first + rows] * total_N1, torch.nextafter(total_N1, -total_N1))
            found.append(torch.searchsorted(cumulated_NV, wanted_N1, right=True)[:, 0])
        drawn_N = torch.cat(found) if found else target_BK.new_zeros(0)
        if not picks:
            return drawn_N.view(target_BK.shape)
        drawn_BK = torch.zeros_like(target_BK)
        drawn_BK[used_BK] = drawn_N
        return drawn_BK
