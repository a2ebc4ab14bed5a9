"""The post-LN transformer block (Vaswani et al. 2017, section 3.1; BERT, Devlin et al. 2019).

    a = norm(x + dropout(attention(x)))
    y = norm(a + dropout(ffn(a)))

Shapes: B sequences, S positions, Q positions asked for, H hidden.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.attention import SelfAttention
from clozelab.models.dropout import add_dropped
from clozelab.models.linear import Linear

# "gelu" is the exact one (BERT's paper, RoBERTa); "gelu_new" its tanh approximation (the later ALBERT releases).
GELU_APPROXIMATION = {"gelu": "none", "gelu_new": "tanh"}


class Activation(nn.Module):
    """GELU (Hendrycks and Gimpel 2016), exact or approximated."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.approximate = GELU_APPROXIMATION[name]

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate=self.approximate)


class FeedForward(nn.Module):
    """W2 gelu(W1 x)."""

    def __init__(self, hidden: int, ffn: int, activation: str) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn)
        self.activation = Activation(activation)
        self.down = Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class Block(nn.Module):
    """One post-LN block."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        activation: str,
        norm_eps: float,
        dropout: float,
        attention_dropout: float,
    ) -> None:
        super().__init__()
        self.rate = dropout
        self.attention = SelfAttention(hidden, heads, attention_dropout)
        self.attention_norm = nn.LayerNorm(hidden, norm_eps)
        self.ffn = FeedForward(hidden, ffn, activation)
        self.ffn_norm = nn.LayerNorm(hidden, norm_eps)

    def forward(self, x_BSH: Tensor, mask_BS: Tensor | None, x_BQH: Tensor | None = None) -> Tensor:
        """[B, Q, H]: the block at the positions of x_BQH (all of x_BSH if None), each reading all of x_BSH."""
        x = x_BSH if x_BQH is None else x_BQH
        a = self.attention_norm(add_dropped(x, self.attention(x_BSH, mask_BS, x_BQH), self.rate, self.training))
        y: Tensor = self.ffn_norm(add_dropped(a, self.ffn(a), self.rate, self.training))
        return y
