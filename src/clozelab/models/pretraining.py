"""An encoder with the heads of its task; what comes out are sums and counts, which add up over micro-batches and ranks.

Shapes: B sequences, S positions, K targets a sequence, N targets in the batch, H hidden.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clozelab.models.encoder import EncoderOption
from clozelab.models.heads import MaskedLMHead, PairHead
from clozelab.models.loss import pair_losses, target_losses


class PretrainingSums(NamedTuple):
    """Sums over a batch, scalars in float32; only the losses carry a gradient.

    Without targets, or without the masked-language-model head, the first three are zero; without the pair head the last
    three are None.
    """

    mlm_loss: Tensor
    mlm_targets: Tensor
    mlm_correct: Tensor
    pair_loss: Tensor | None
    pair_rows: Tensor | None
    pair_correct: Tensor | None


class TargetScores(NamedTuple):
    """Per-example scores of a batch; unused target slots have loss 0 and are False in used and correct."""

    mlm_loss_BK: Tensor
    mlm_correct_BK: Tensor
    mlm_used_BK: Tensor
    pair_loss_B: Tensor | None
    pair_correct_B: Tensor | None


Scored = tuple[Tensor, Tensor]
_NONE = (None, None, None)


def _sums(scored: Scored) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of losses, their number, number correct), float32."""
    loss_N, correct_N = scored
    return loss_N.sum(), loss_N.new_tensor(len(loss_N)), correct_N.sum().float()


class PretrainingModel(nn.Module):
    """Encoder, masked-language-model head and pair head, the heads only where the task uses them.

    Args:
        option: the encoder.
        vocab_size: V.
        pad_id: id of the padding token.
        mlm: build the masked-language-model head.
        pair: build the pair head.
    """

    def __init__(
        self, option: EncoderOption, vocab_size: int, pad_id: int, mlm: bool = True, pair: bool = False
    ) -> None:
        super().__init__()
        if not (mlm or pair):
            raise ValueError("a pre-training model needs a head: mlm, pair or both")
        self.encoder = option.build(vocab_size, pad_id)
        self.mlm = MaskedLMHead(self.encoder) if mlm else None
        self.pair = PairHead(option.hidden) if pair else None

    def forward(self, batch: Mapping[str, Tensor]) -> PretrainingSums:
        """Losses summed over the batch (its fields: docs/architecture.md) and what they are sums of."""
        mlm, pair = self._losses(batch)
        if mlm is None:
            nothing = torch.zeros(0, device=batch["input_ids"].device)
            mlm = (nothing, nothing)
        return PretrainingSums(*_sums(mlm), *(_NONE if pair is None else _sums(pair)))

    @torch.no_grad()
    def scores(self, batch: Mapping[str, Tensor]) -> TargetScores:
        """The same losses one by one, for evaluation; call it in eval mode."""
        mlm, pair = self._losses(batch)
        used_BK = batch["target_ids"] >= 0
        loss_BK = torch.zeros(used_BK.shape, device=used_BK.device)
        correct_BK = torch.zeros_like(used_BK)
        if mlm is None:
            used_BK = torch.zeros_like(used_BK)
        else:
            loss_BK[used_BK], correct_BK[used_BK] = mlm
        return TargetScores(loss_BK, correct_BK, used_BK, *(pair or (None, None)))

    def _losses(self, batch: Mapping[str, Tensor]) -> tuple[Scored | None, Scored | None]:
        """(loss [N], correct [N]) of the targets in use, and the same [B] of the pairs; None without the head."""
        mlm: Scored | None = None
        pair: Scored | None = None
        output_VE: Tensor | None = None
        positions_BQ = batch["target_positions"]
        if self.pair is not None:
            # The pair head reads the first position: it is asked for in front of the targets.
            positions_BQ = nn.functional.pad(positions_BQ, (1, 0))
        if self.mlm is not None and self.mlm.tied:
            token_BSE, output_VE = self.encoder.embeddings.tied_lookup(batch["input_ids"])
        else:
            token_BSE = self.encoder.embeddings.token(batch["input_ids"])
            if self.mlm is not None:
                output_VE = self.mlm.weight
        hidden_BQH = self.encoder.encode(token_BSE, batch["segment_ids"], batch["attention_mask"], positions_BQ)
        if self.mlm is not None and output_VE is not None:
            hidden_BKH = hidden_BQH if self.pair is None else hidden_BQH[:, 1:]
            used_BK = batch["target_ids"] >= 0
            x_NE = self.mlm.transform(hidden_BKH[used_BK])
            mlm = target_losses(x_NE, output_VE, self.mlm.bias, batch["target_ids"][used_BK])
        if self.pair is not None:
            pair = pair_losses(self.pair(hidden_BQH), batch["pair_labels"])
        return mlm, pair
