"""The transformer block: attention, then a feed-forward layer, each beside a residual stream.

    post        y = norm(x + drop(f(x)))          Vaswani et al. 2017; BERT
    pre         y = x + drop(f(norm(x)))          Xiong et al. 2020
    sandwich    y = x + drop(norm'(f(norm(x))))   Ding et al. 2021 (CogView, section 2.3)

f is attention first, the feed-forward layer second:

    ffn(x) = W2 drop(act(W1 x))                   Vaswani et al. 2017
    ffn(x) = W2 drop(act(W1 x) * V x)             gated (Shazeer 2020)

A block may hold one of its halves alone, where the other is shared with another block.

Shapes: B sequences, Q positions asked for, H hidden. `x` is [B, S, H], or [T, H] of an unpadded batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.attention import SelfAttention
from clozelab.models.context import AttentionContext
from clozelab.models.dropout import add_dropped, dropout
from clozelab.models.linear import Linear
from clozelab.models.norms import norm


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# "gelu" is the exact one (Hendrycks and Gimpel 2016; BERT, RoBERTa), "gelu_new" its tanh approximation (the later
# ALBERT releases). In the gated forms the function is applied to one half of the first product, which scales the other.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
}
GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}
PLACES = ("post", "pre", "sandwich")


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function of an activation, gated or not."""
    return ACTIVATIONS[GATED.get(name, name)]


def gated_width(hidden: int, ffn: int, bias: bool) -> int:
    """The width of a gated layer with as many parameters as an ungated one of width `ffn`, to the nearest integer.

    2 H F + [F + H] = 3 H W + [2 W + H], the biases in brackets: about two thirds (Shazeer 2020, section 3).
    """
    return max(1, round(ffn * (2 * hidden + bias) / (3 * hidden + 2 * bias)))


class FeedForward(nn.Module):
    """See above. `up` holds W1, below it V where the layer is gated."""

    def __init__(self, hidden: int, width: int, name: str, bias: bool, rate: float) -> None:
        super().__init__()
        self.activation, self.gated, self.rate = activation(name), name in GATED, rate
        self.up = Linear(hidden, 2 * width if self.gated else width, bias=bias)
        self.down = Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        u: Tensor = self.up(x)
        if self.gated:
            gate, value = u.chunk(2, -1)
            h = self.activation(gate) * value
        else:
            h = self.activation(u)
        y: Tensor = self.down(dropout(h, self.rate, self.training))
        return y


@dataclass(frozen=True)
class BlockSettings:
    """What all blocks of an encoder have in common; the names are those of `EncoderOption`."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    """Width of the feed-forward layer as it is built."""
    activation: str
    norm: str
    norm_place: str
    norm_eps: float
    bias: bool
    dropout: float
    attention_dropout: float
    ffn_dropout: float


class Block(nn.Module):
    """The halves of a block that this one holds.

    Args:
        settings: of all blocks.
        number: of its attention layer; None: it holds no attention.
        feed_forward: it holds a feed-forward layer.
        first_norm: attention is normalised before, where that is the norm's place.
    """

    def __init__(self, settings: BlockSettings, number: int | None, feed_forward: bool, first_norm: bool) -> None:
        super().__init__()
        s = settings
        self.place, self.rate = s.norm_place, s.dropout

        def make_norm() -> nn.Module:
            return norm(s.norm, s.hidden, s.norm_eps, s.bias)

        if number is not None:
            self.attention = SelfAttention(s.hidden, s.heads, s.kv_heads, s.bias, s.attention_dropout, number)
            self.attention_norm = make_norm() if first_norm or s.norm_place == "post" else nn.Identity()
            self.attention_out_norm = make_norm() if s.norm_place == "sandwich" else nn.Identity()
        if feed_forward:
            self.ffn = FeedForward(s.hidden, s.ffn, s.activation, s.bias, s.ffn_dropout)
            self.ffn_norm = make_norm()
            self.ffn_out_norm = make_norm() if s.norm_place == "sandwich" else nn.Identity()

    def attend(self, x: Tensor, context: AttentionContext, x_BQH: Tensor | None = None) -> Tensor:
        """The first half, at all positions x; or at the queries x_BQH alone, each of which reads all of x."""
        stream = x if x_BQH is None else x_BQH
        if self.place == "post":
            y: Tensor = self.attention_norm(self._add(stream, self.attention(x, context, x_BQH)))
            return y
        asking = None if x_BQH is None else self.attention_norm(x_BQH)
        read = self.attention(self.attention_norm(x), context, asking)
        return self._add(stream, self.attention_out_norm(read))

    def feed(self, x: Tensor) -> Tensor:
        """The second half."""
        if self.place == "post":
            y: Tensor = self.ffn_norm(self._add(x, self.ffn(x)))
            return y
        return self._add(x, self.ffn_out_norm(self.ffn(self.ffn_norm(x))))

    def _add(self, stream: Tensor, x: Tensor) -> Tensor:
        return add_dropped(stream, x.to(stream.dtype), self.rate, self.training)
