"""One encoder, of which BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019) and ALBERT (Lan et al. 2020) are settings.

Shapes: B sequences, S positions, Q positions asked for, H hidden.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from clozelab.models.embeddings import Embeddings
from clozelab.models.layers import GELU_APPROXIMATION, Block
from clozelab.options import option


@option("model", "encoder")
@dataclass
class EncoderOption:
    """An encoder; the presets `model=bert_base`, `model=albert_tiny`, ... set these fields."""

    hidden: int = 768
    """H, the width of the blocks."""
    layers: int = 12
    """Applications of a block; with share=all the same block is applied every time."""
    heads: int = 12
    """Attention heads; must divide hidden."""
    ffn: int = 3072
    """Width inside the feed-forward layer."""
    embedding: int | None = None
    """E, the width of the token embedding; null = hidden. A smaller one is projected up (ALBERT, section 3.1)."""
    positions: int = 512
    """Longest sequence: rows of the learned position embedding."""
    position_offset: int = 0
    """Unused rows before position 0: RoBERTa counts positions from padding_idx + 1 = 2."""
    segments: int = 2
    """Rows of the segment embedding. 1 (RoBERTa): every position is in segment 0, also in a pair. 0: no embedding."""
    share: str = "none"
    """Parameters shared across layers: none, or all (ALBERT, section 3.1)."""
    activation: str = "gelu"
    """gelu (exact) or gelu_new (tanh approximation)."""
    norm_eps: float = 1e-12
    """Added to the variance in every LayerNorm."""
    dropout: float = 0.1
    """On the embeddings and on what is added to the residual stream; rounded to k/256 on a CPU."""
    attention_dropout: float = 0.1
    """On the attention weights; rounded to k/256 on a CPU."""
    init_scale: float = 0.02
    """Standard deviation, before truncation at two of them. BERT's 0.02 is for widths of 768 and above."""
    tie_output: bool = True
    """The masked-language-model head multiplies by the token embedding; otherwise by a matrix of its own."""

    def __post_init__(self) -> None:
        for key in ("hidden", "layers", "heads", "ffn", "positions"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key} must be at least 1, not {getattr(self, key)}")
        for key in ("position_offset", "segments"):
            if getattr(self, key) < 0:
                raise ValueError(f"model.{key} must be at least 0, not {getattr(self, key)}")
        if self.hidden % self.heads:
            raise ValueError(f"model.heads={self.heads} must divide model.hidden={self.hidden}")
        if self.embedding is not None and self.embedding < 1:
            raise ValueError(f"model.embedding must be null or at least 1, not {self.embedding}")
        if self.share not in ("none", "all"):
            raise ValueError(f"model.share must be none or all, not {self.share!r}")
        if self.activation not in GELU_APPROXIMATION:
            raise ValueError(
                f"model.activation must be one of {', '.join(GELU_APPROXIMATION)}, not {self.activation!r}"
            )
        for key in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"model.{key} must be in [0, 1), not {getattr(self, key)}")
        for key in ("norm_eps", "init_scale"):
            if not getattr(self, key) > 0:
                raise ValueError(f"model.{key} must be positive, not {getattr(self, key)}")

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.hidden if self.embedding is None else self.embedding

    def build(self, vocab_size: int, pad_id: int) -> "Encoder":
        """The encoder with parameters as torch allocates them; `initialise` gives them their values."""
        return Encoder(self, vocab_size, pad_id)


class Encoder(nn.Module):
    """Embeddings and a stack of post-LN blocks."""

    def __init__(self, option: EncoderOption, vocab_size: int, pad_id: int) -> None:
        super().__init__()
        self.option = option
        self.embeddings = Embeddings(
            vocab_size,
            pad_id,
            embedding=option.embedding_size,
            hidden=option.hidden,
            positions=option.positions,
            position_offset=option.position_offset,
            segments=option.segments,
            norm_eps=option.norm_eps,
            dropout=option.dropout,
        )
        self.blocks = nn.ModuleList(
            Block(
                option.hidden,
                option.heads,
                option.ffn,
                activation=option.activation,
                norm_eps=option.norm_eps,
                dropout=option.dropout,
                attention_dropout=option.attention_dropout,
            )
            for _ in range(1 if option.share == "all" else option.layers)
        )

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor,
        attention_mask: Tensor | None,
        positions_BQ: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last block.

        Args:
            input_ids: [B, S] int64.
            segment_ids: [B, S] int64.
            attention_mask: [B, S] bool, False = padding; None = no padding.
            positions_BQ: [B, Q] int64, the positions whose hidden states are wanted. The last block is computed only
                there, which changes no value: nothing reads its other outputs.

        Returns:
            [B, S, H], or [B, Q, H] at the positions asked for.
        """
        return self.encode(self.embeddings.token(input_ids), segment_ids, attention_mask, positions_BQ)

    def encode(
        self,
        token_BSE: Tensor,
        segment_ids: Tensor,
        attention_mask: Tensor | None,
        positions_BQ: Tensor | None = None,
    ) -> Tensor:
        """`forward` from token vectors on."""
        length, limit = token_BSE.shape[1], self.option.positions
        if length > limit:
            raise ValueError(f"sequences of {length} positions need model.positions >= {length}, which is {limit}")
        mask_BS = attention_mask
        # Where looking costs nothing (a GPU would wait), a mask that allows everything is dropped.
        if mask_BS is not None and mask_BS.device.type == "cpu" and bool(mask_BS.all()):
            mask_BS = None
        x_BSH = self.embeddings(token_BSE, segment_ids)
        for layer in range(self.option.layers - 1):
            x_BSH = self.blocks[layer % len(self.blocks)](x_BSH, mask_BS)
        x_BQH = None
        if positions_BQ is not None:
            x_BQH = x_BSH.gather(1, positions_BQ[:, :, None].expand(-1, -1, x_BSH.shape[-1]))
        last_BQH: Tensor = self.blocks[-1](x_BSH, mask_BS, x_BQH)
        return last_BQH
