"""One encoder, of which BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), ALBERT (Lan et al. 2020), DistilBERT
(Sanh et al. 2019), ELECTRA (Clark et al. 2020) and ModernBERT (Warner et al. 2024) are settings. Each axis on which
their papers differ is a setting of its own.

Shapes: B sequences, S positions, Q positions asked for, H hidden; `...` is [B, S], or [T] of an unpadded batch.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from clozelab.models.context import AttentionContext, attention_context
from clozelab.models.dtype import compute_dtype
from clozelab.models.embeddings import Embeddings
from clozelab.models.init_schemes import SCHEMES
from clozelab.models.layers import ACTIVATIONS, GATED, PLACES, Block, BlockSettings, gated_width
from clozelab.models.layout import Layout, layout_of
from clozelab.models.norms import NORMS, norm
from clozelab.models.position import PositionOption, Sizes
from clozelab.models.positions.learned import LearnedOption
from clozelab.options import inner_option, option

SHARES = ("none", "attention", "ffn", "all")
GATED_WIDTHS = ("matched", "ffn")


@option("model", "encoder")
@dataclass
class EncoderOption:
    """An encoder; the presets `model=bert_base`, `model=albert_tiny`, ... set these fields."""

    hidden: int = 768
    """H, the width of the blocks."""
    layers: int = 12
    """Applications of a block; a shared block is applied several times."""
    heads: int = 12
    """Attention heads; must divide hidden."""
    kv_heads: int | None = None
    """Heads of keys and values, each serving heads / kv_heads queries (Ainslie et al. 2023); must divide heads. null =
    heads; 1 = multi-query attention."""
    window: int | None = None
    """Width of local attention: positions at most window // 2 apart see each other. null: every layer is global."""
    global_every: int = 3
    """With a window, layers 0, global_every, 2 global_every, ... are global all the same (ModernBERT); 0: none is."""
    ffn: int = 3072
    """Width inside the feed-forward layer; for a gated one see gated_width."""
    activation: str = "gelu"
    """gelu (exact), gelu_new (tanh approximation), relu, silu; gated: geglu, swiglu, reglu (Shazeer 2020)."""
    gated_width: str = "matched"
    """Width of a gated feed-forward layer: matched = as many parameters as an ungated one of width ffn, to the nearest
    integer; ffn = ffn itself."""
    embedding: int | None = None
    """E, the width of the token embedding; null = hidden. Another one is projected (narrower: ALBERT, section 3.1;
    wider: the generators of ELECTRA)."""
    project: bool | None = None
    """Project the embedding to hidden; null: where their widths differ. Hugging Face's ALBERT does it always."""
    embedding_norm: bool = True
    """Norm the embeddings before the first block."""
    position: PositionOption = field(default_factory=LearnedOption, metadata=inner_option("learned"))
    """The position scheme, an option of the group model/position."""
    segments: int = 2
    """Rows of the segment embedding. 1 (RoBERTa): every position is in segment 0, also in a pair. 0: no embedding."""
    share: str = "none"
    """Parameters shared across layers: none, attention, ffn, or all (ALBERT, section 3.1), each with its norms."""
    share_groups: int = 1
    """Groups of successive layers that share among themselves; must divide layers (ALBERT's num_hidden_groups)."""
    share_inner: int = 1
    """Layers of a shared unit: the unit is applied as a whole, again and again (ALBERT's inner_group_num)."""
    norm: str = "layernorm"
    """layernorm or rmsnorm."""
    norm_place: str = "post"
    """post (BERT), pre, or sandwich; the last two have one more norm after the last block."""
    norm_eps: float = 1e-12
    """Added to the variance in every norm."""
    first_norm: bool = True
    """The first block's attention has a norm before it, where norm_place asks for one. ModernBERT has none: the
    embedding is normed already."""
    bias: bool = True
    """Linear layers and LayerNorms have biases. The output layers of the heads have theirs in any case."""
    dropout: float = 0.1
    """On what is added to the residual stream; rounded to k/256 on a CPU, as the others."""
    embedding_dropout: float | None = None
    """On the embeddings; null = dropout."""
    attention_dropout: float = 0.1
    """On the attention weights."""
    ffn_dropout: float = 0.0
    """Inside the feed-forward layer, after its activation."""
    init: str = "truncated"
    """Initial values of matrices: truncated (BERT), normal, xavier, or fan_in."""
    init_scale: float = 0.02
    """Standard deviation, before truncation at two of them. BERT's 0.02 is for widths of 768 and above."""
    init_depth: bool = False
    """Divide the last matrix of each residual branch by sqrt(2 layers) (GPT-2)."""
    tie_output: bool = True
    """The masked-language-model head multiplies by the token embedding; otherwise by a matrix of its own."""
    output: int | None = None
    """O, the width from which the masked-language-model head goes to the vocabulary; null = embedding. Another width
    (a factorised output layer) needs tie_output=false."""

    def __post_init__(self) -> None:
        for key in ("hidden", "layers", "heads", "ffn", "share_groups", "share_inner"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key} must be at least 1, not {getattr(self, key)}")
        for key in ("kv_heads", "window", "embedding", "output"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"model.{key} must be null or at least 1, not {value}")
        for key in ("segments", "global_every"):
            if getattr(self, key) < 0:
                raise ValueError(f"model.{key} must be at least 0, not {getattr(self, key)}")
        for key, names in (
            ("activation", (*ACTIVATIONS, *GATED)),
            ("gated_width", GATED_WIDTHS),
            ("share", SHARES),
            ("norm", NORMS),
            ("norm_place", PLACES),
            ("init", tuple(SCHEMES)),
        ):
            if getattr(self, key) not in names:
                raise ValueError(f"model.{key} must be one of {', '.join(names)}, not {getattr(self, key)!r}")
        for key in ("dropout", "embedding_dropout", "attention_dropout", "ffn_dropout"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"model.{key} must be in [0, 1), not {value}")
        for key in ("norm_eps", "init_scale"):
            if not getattr(self, key) > 0:
                raise ValueError(f"model.{key} must be positive, not {getattr(self, key)}")
        if not hasattr(self.position, "build"):
            raise ValueError(
                f"model.position must be an option of the group model/position, not {self.position!r}; "
                "choose one by model/position=NAME"
            )
        self._check_together()

    def _check_together(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"model.heads={self.heads} must divide model.hidden={self.hidden}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}")
        if self.project is False and self.embedding_size != self.hidden:
            raise ValueError(
                f"model.project=false leaves an embedding of {self.embedding} for blocks of {self.hidden}; "
                "make model.embedding null, or model.project null"
            )
        if self.layers % (self.share_groups * self.share_inner):
            raise ValueError(
                f"model.share_groups={self.share_groups} times model.share_inner={self.share_inner} must divide "
                f"model.layers={self.layers}"
            )
        if self.share == "none" and self.share_groups * self.share_inner > 1:
            raise ValueError("model.share_groups and model.share_inner say how layers share; model.share is none")
        if self.tie_output and self.output_width != self.embedding_size:
            raise ValueError(
                f"model.tie_output=true uses the token embedding of width {self.embedding_size} as output layer; "
                f"model.output={self.output} needs model.tie_output=false"
            )
        if not self.first_norm and self.norm_place == "post":
            raise ValueError("model.first_norm=false leaves out a norm that model.norm_place=post does not have")
        if not self.first_norm and self.share in ("attention", "all") and self.layers > 1:
            raise ValueError(f"model.first_norm=false cannot hold with model.share={self.share}: layers share norms")

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.hidden if self.embedding is None else self.embedding

    @property
    def output_width(self) -> int:
        """O."""
        return self.embedding_size if self.output is None else self.output

    @property
    def key_value_heads(self) -> int:
        """G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def projects(self) -> bool:
        """Whether the embedding is projected."""
        return self.embedding_size != self.hidden if self.project is None else self.project

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer as it is built."""
        if self.activation in GATED and self.gated_width == "matched":
            return gated_width(self.hidden, self.ffn, self.bias)
        return self.ffn

    def window_of(self, layer: int) -> int | None:
        """The window of a layer; None: it is global."""
        is_global = self.global_every > 0 and layer % self.global_every == 0
        return None if is_global else self.window

    def owners(self, part: str) -> list[int]:
        """Block whose `part` ("attention" or "ffn") each layer applies."""
        if self.share not in (part, "all"):
            return list(range(self.layers))
        unit = self.share_inner
        applications = self.layers // unit // self.share_groups
        return [layer // unit // applications * unit + layer % unit for layer in range(self.layers)]

    def build(self, vocab_size: int, pad_id: int) -> "Encoder":
        """The encoder with parameters as torch allocates them; `initialise` gives them their values."""
        return Encoder(self, vocab_size, pad_id)


class Encoder(nn.Module):
    """Embeddings, a stack of blocks, and a last norm where the blocks do not norm their output."""

    unpad: bool | None = None
    """Pass tokens without padding through the layers; None: on a CPU where it pays. Changes no value."""
    causal: bool = False
    """A position sees itself and those before it alone: set by an objective that predicts what comes next."""

    def __init__(self, option: EncoderOption, vocab_size: int, pad_id: int) -> None:
        super().__init__()
        self.option = option
        self.attention_of, self.ffn_of = option.owners("attention"), option.owners("ffn")
        attentions, ffns = max(self.attention_of) + 1, max(self.ffn_of) + 1
        post = option.norm_place == "post"

        def make_norm(width: int) -> nn.Module:
            return norm(option.norm, width, option.norm_eps, option.bias)

        self.embeddings = Embeddings(
            vocab_size,
            pad_id,
            embedding=option.embedding_size,
            hidden=option.hidden,
            position=option.position.build(
                Sizes(option.embedding_size, option.heads, option.hidden // option.heads, attentions)
            ),
            segments=option.segments,
            norm=make_norm(option.embedding_size) if option.embedding_norm else nn.Identity(),
            project=option.projects,
            bias=option.bias,
            dropout=option.dropout if option.embedding_dropout is None else option.embedding_dropout,
            stream_dtype=None if post else torch.float32,
        )
        settings = BlockSettings(
            hidden=option.hidden,
            heads=option.heads,
            kv_heads=option.key_value_heads,
            ffn=option.ffn_width,
            activation=option.activation,
            norm=option.norm,
            norm_place=option.norm_place,
            norm_eps=option.norm_eps,
            bias=option.bias,
            dropout=option.dropout,
            attention_dropout=option.attention_dropout,
            ffn_dropout=option.ffn_dropout,
        )
        self.blocks = nn.ModuleList(
            Block(
                settings,
                number=n if n < attentions else None,
                feed_forward=n < ffns,
                first_norm=option.first_norm or n > 0,
            )
            for n in range(max(attentions, ffns))
        )
        self.norm = nn.Identity() if post else make_norm(option.hidden)

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor,
        attention_mask: Tensor | None,
        positions_BQ: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last block.

        Args:
            input_ids: [B, S] int64.
            segment_ids: [B, S] int64.
            attention_mask: [B, S] bool, False = padding; None = no padding.
            positions_BQ: [B, Q] int64, the places whose hidden states are wanted. The last block is computed only
                there, which changes no value: nothing reads its other outputs.
            position_ids: [B, S] position of each token; None: counted from 0 in every row.
            document_ids: [B, S]: a token sees only those with its own number; None: its whole row.

        Returns:
            [B, S, H], or [B, Q, H] at the places asked for. At padding the values mean nothing.
        """
        layout = self.layout(input_ids, attention_mask, position_ids, document_ids)
        token = self.embeddings.token(layout.flat(input_ids))
        if positions_BQ is None and layout.unpadded is not None:
            positions_BQ = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        return self.encode(token, layout.flat(segment_ids), layout, positions_BQ)

    def layout(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Layout:
        """Where the tokens of a batch stand.

        Raises:
            ValueError: the position scheme does not reach that far.
        """
        length, limit = input_ids.shape[1], self.option.position.longest
        if limit is not None and length > limit:
            raise ValueError(
                f"sequences of {length} positions need model.position.length >= {length}, which is {limit}"
            )
        return layout_of(input_ids, attention_mask, position_ids, document_ids, self.unpad)

    def encode(self, token: Tensor, segment_ids: Tensor, layout: Layout, positions_BQ: Tensor | None = None) -> Tensor:
        """`forward` from token vectors [..., E] and segments [...] in the form of the layout.

        Returns:
            [..., H] in that form, or [B, Q, H] at the places asked for.
        """
        option, position = self.option, self.embeddings.position
        x = self.embeddings(token, segment_ids, layout.positions())
        contexts: dict[int | None, AttentionContext] = {}
        dtype = compute_dtype(x)
        for layer in range(option.layers - 1):
            window = option.window_of(layer)
            if window not in contexts:
                contexts[window] = attention_context(layout, position, window, dtype, causal=self.causal)
            x = self._layer(layer, x, contexts[window])
        last = option.layers - 1
        # An unpadded batch has no rows to ask from: its last block is computed at all tokens, which are few.
        asked_BQ = positions_BQ if layout.unpadded is None else None
        x_BQH = None if asked_BQ is None else layout.pick(x, asked_BQ)
        context = attention_context(layout, position, option.window_of(last), dtype, asked_BQ, self.causal)
        y = self._layer(last, x, context, x_BQH)
        if positions_BQ is not None and asked_BQ is None:
            y = layout.pick(y, positions_BQ)
        normed: Tensor = self.norm(y)
        return normed

    def _layer(self, layer: int, x: Tensor, context: AttentionContext, x_BQH: Tensor | None = None) -> Tensor:
        attention, ffn = self.blocks[self.attention_of[layer]], self.blocks[self.ffn_of[layer]]
        assert isinstance(attention, Block)
        assert isinstance(ffn, Block)
        return ffn.feed(attention.attend(x, context, x_BQH))
