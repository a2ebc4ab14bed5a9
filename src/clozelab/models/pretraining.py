"""An encoder with the heads of its task; what comes out are sums and counts, which add up over micro-batches and ranks.

Shapes: B sequences, S positions, K targets a sequence, N targets in the batch, H hidden.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from clozelab.models.encoder import EncoderOption
from clozelab.models.heads import MaskedLMHead, PairHead, ReplacedHead
from clozelab.models.layout import Layout
from clozelab.models.loss import pair_losses, replaced_losses, target_losses


class PretrainingSums(NamedTuple):
    """Sums over a batch, scalars in float32; only the losses carry a gradient.

    Without targets, or without the masked-language-model head, the first three are zero; without the pair head the next
    three are None, without the head of replaced tokens the last three.
    """

    mlm_loss: Tensor
    mlm_targets: Tensor
    mlm_correct: Tensor
    pair_loss: Tensor | None
    pair_rows: Tensor | None
    pair_correct: Tensor | None
    replaced_loss: Tensor | None = None
    replaced_tokens: Tensor | None = None
    replaced_correct: Tensor | None = None


class TargetScores(NamedTuple):
    """Per-example scores of a batch; unused target slots have loss 0 and are False in used and correct.

    Of replaced tokens: sums over each sequence, and `replaced_hits_B2`, the tokens told right among those that stood in
    the text, and among those that did not; `replaced_of_B2` is how many there are of each.
    """

    mlm_loss_BK: Tensor
    mlm_correct_BK: Tensor
    mlm_used_BK: Tensor
    pair_loss_B: Tensor | None
    pair_correct_B: Tensor | None
    replaced_loss_B: Tensor | None = None
    replaced_hits_B2: Tensor | None = None
    replaced_of_B2: Tensor | None = None


class Scored(NamedTuple):
    """Losses and hits one by one; of the targets either those in use, or every slot with 0 and False where unused; of
    tokens in the form of the layout, with 0 and False at what is none."""

    loss: Tensor
    correct: Tensor
    number: Tensor
    """How many are meant."""

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of losses, their number, number correct), float32."""
        return self.loss.sum(), self.number.float(), self.correct.sum().float()


_NONE = (None, None, None)
# Targets come in multiples of this, filled up with some that do not count: products of few sizes (see `layout`).
_TARGETS = 32


class Read(NamedTuple):
    """What the heads read of a batch."""

    layout: Layout
    hidden_BKH: Tensor
    """at the targets"""
    target_BK: Tensor
    """without the slots that no row uses, where the batch is unpadded"""
    output_VO: Tensor | None
    """the output embedding, where there is a head for targets"""
    first_B1H: Tensor | None
    """at the first position, where there is a pair head"""
    hidden: Tensor | None
    """[..., H] at every token, where each has to be told"""


class Losses(NamedTuple):
    """Of targets, pairs and tokens; None without the head."""

    mlm: Scored | None
    pair: Scored | None
    replaced: Scored | None
    layout: Layout


class PretrainingModel(nn.Module):
    """Encoder and heads: masked language model, pairs, replaced tokens, each only where the task uses it.

    Args:
        option: the encoder.
        vocab_size: V.
        pad_id: id of the padding token.
        mlm: build the masked-language-model head.
        pair: build the pair head.
        causal: positions see only what comes before them.
        replaced: build the head that tells replaced tokens; batches then have a field `replaced` [B, S] bool.
    """

    def __init__(
        self,
        option: EncoderOption,
        vocab_size: int,
        pad_id: int,
        mlm: bool = True,
        pair: bool = False,
        causal: bool = False,
        replaced: bool = False,
    ) -> None:
        super().__init__()
        if not (mlm or pair or replaced):
            raise ValueError("a pre-training model needs a head: mlm, pair, replaced")
        self.encoder = option.build(vocab_size, pad_id)
        self.encoder.causal = causal
        self.mlm = MaskedLMHead(self.encoder) if mlm else None
        self.pair = PairHead(option.hidden) if pair else None
        self.replaced = ReplacedHead(self.encoder) if replaced else None

    @property
    def filler(self) -> "PretrainingModel":
        """The part that tells what a masked place hid: a model with the masked-language-model head."""
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> PretrainingSums:
        """Losses summed over the batch (its fields: docs/architecture.md) and what they are sums of."""
        mlm, pair, replaced, _ = self.losses(batch)
        zero = torch.zeros((), device=batch["input_ids"].device)
        return PretrainingSums(
            *((zero, zero, zero) if mlm is None else mlm.sums()),
            *(_NONE if pair is None else pair.sums()),
            *(_NONE if replaced is None else replaced.sums()),
        )

    @torch.no_grad()
    def scores(self, batch: Mapping[str, Tensor]) -> TargetScores:
        """The same losses one by one, for evaluation; call it in eval mode."""
        mlm, pair, _, _ = self.losses(batch)
        return TargetScores(*in_slots(mlm, batch["target_ids"]), *((None, None) if pair is None else pair[:2]))

    def losses(self, batch: Mapping[str, Tensor]) -> Losses:
        """What each head makes of a batch, one by one."""
        read = self.read(batch)
        mlm: Scored | None = None
        pair: Scored | None = None
        replaced: Scored | None = None
        if self.mlm is not None and read.output_VO is not None:
            mlm = score_targets(self.mlm, read.hidden_BKH, read.output_VO, read.target_BK)
        if self.pair is not None and read.first_B1H is not None:
            # A row that is all padding has no pair. Its first hidden state may be zero, where each norm multiplies a
            # gradient by up to 1 / sqrt(eps), and several of them make it infinite: nothing may come back through it.
            read_B = batch["attention_mask"].any(1)
            loss_B, correct_B = pair_losses(self.pair(read.first_B1H), batch["pair_labels"])
            pair = Scored(loss_B * read_B, correct_B & read_B, read_B.sum())
        if self.replaced is not None and read.hidden is not None:
            token = read.layout.tokens(batch["attention_mask"])
            loss, correct = replaced_losses(self.replaced(read.hidden), read.layout.flat(batch["replaced"]))
            replaced = Scored(loss * token, correct & token, token.sum())
        return Losses(mlm, pair, replaced, read.layout)

    def read(self, batch: Mapping[str, Tensor]) -> Read:
        """Pass a batch through the encoder, as far as the heads ask for it."""
        encoder, mlm_head = self.encoder, self.mlm
        layout = encoder.layout(
            batch["input_ids"], batch["attention_mask"], batch.get("position_ids"), batch.get("document_ids")
        )
        place_BK, target_BK = batch["target_positions"], batch["target_ids"]
        if layout.unpadded is not None:
            # Rows are shorter than the format allows, and so are their lists of targets.
            used_K = (target_BK >= 0).any(0).nonzero()[:, 0]
            slots = int(used_K[-1]) + 1 if len(used_K) else 0
            place_BK, target_BK = place_BK[:, :slots], target_BK[:, :slots]
        # The pair head reads the first position: it is asked for in front of the targets.
        place_BQ = place_BK if self.pair is None else nn.functional.pad(place_BK, (1, 0))
        ids = layout.flat(batch["input_ids"])
        output_VO: Tensor | None = None
        if mlm_head is not None and mlm_head.tied:
            token, output_VO = encoder.embeddings.tied_lookup(ids)
        else:
            token = encoder.embeddings.token(ids)
            if mlm_head is not None:
                output_VO = mlm_head.weight
        segments = layout.flat(batch["segment_ids"])
        hidden: Tensor | None = None
        if self.replaced is None:
            hidden_BQH = encoder.encode(token, segments, layout, place_BQ)
        else:
            hidden = encoder.encode(token, segments, layout)
            hidden_BQH = layout.pick(hidden, place_BQ)
        first_B1H = None if self.pair is None else hidden_BQH[:, :1]
        return Read(
            layout, hidden_BQH[:, place_BQ.shape[1] - place_BK.shape[1] :], target_BK, output_VO, first_B1H, hidden
        )


def in_slots(mlm: Scored | None, target_BK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, correct, used), each [B, K], of targets one by one."""
    used_BK = target_BK >= 0
    loss_BK = torch.zeros(used_BK.shape, device=used_BK.device)
    correct_BK = torch.zeros_like(used_BK)
    if mlm is None:
        return loss_BK, correct_BK, torch.zeros_like(used_BK)
    if mlm.loss.shape == used_BK.shape:
        return mlm.loss, mlm.correct, used_BK
    loss_BK[used_BK], correct_BK[used_BK] = mlm.loss, mlm.correct
    return loss_BK, correct_BK, used_BK


def score_targets(head: MaskedLMHead, hidden_BKH: Tensor, output_VO: Tensor, target_BK: Tensor) -> Scored:
    """The head on the slots in use; where picking them would make a GPU wait or a compiler break off, on all slots."""
    used_BK = target_BK >= 0
    if hidden_BKH.device.type == "cpu" and not torch.compiler.is_compiling():
        hidden_NH, target_N = hidden_BKH[used_BK], target_BK[used_BK]
        n, more = len(target_N), -len(target_N) % _TARGETS
        hidden_NH, target_N = nn.functional.pad(hidden_NH, (0, 0, 0, more)), nn.functional.pad(target_N, (0, more))
        loss_N, correct_N = target_losses(head.transform(hidden_NH), output_VO, head.bias, target_N)
        return Scored(loss_N[:n], correct_N[:n], torch.tensor(n))
    x_NO, target_N = head.transform(hidden_BKH).flatten(0, 1), target_BK.clamp(min=0).flatten()
    loss_N, correct_N = target_losses(x_NO, output_VO, head.bias, target_N)
    loss_BK, correct_BK = loss_N.view(used_BK.shape), correct_N.view(used_BK.shape)
    return Scored(loss_BK * used_BK, correct_BK & used_BK, used_BK.sum())
