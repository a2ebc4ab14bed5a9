"""The heads of pre-training: masked tokens, the relation of two segments (BERT, section 3.1; ALBERT, section 3.1), and
replaced tokens (ELECTRA, section 2).

Shapes: B sequences, S positions, H hidden, O output width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.encoder import Encoder
from clozelab.models.layers import activation
from clozelab.models.linear import Linear
from clozelab.models.norms import norm


class MaskedLMHead(nn.Module):
    """logits = W_V norm(act(W x)) + b, with W_V [V, O] the token embedding unless the option unties it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        option = encoder.option
        token = encoder.embeddings.token
        self.dense = Linear(option.hidden, option.output_width, bias=option.bias)
        self.activation = activation(option.activation)
        self.norm = norm(option.norm, option.output_width, option.norm_eps, option.bias)
        self.tied = option.tie_output
        untied_VO = torch.empty(token.num_embeddings, option.output_width)
        self.weight = token.weight if option.tie_output else nn.Parameter(untied_VO)
        self.bias = nn.Parameter(torch.zeros(token.num_embeddings))

    def transform(self, hidden: Tensor) -> Tensor:
        """[..., O] of [..., H]: what is multiplied by the output embedding."""
        x: Tensor = self.norm(self.activation(self.dense(hidden)))
        return x

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., V] logits of [..., H]."""
        return F.linear(self.transform(hidden), self.weight, self.bias)


class PairHead(nn.Module):
    """logits = W tanh(W_p x_0 + b_p) + b, from the hidden state of the first position ([CLS])."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.pooler = Linear(hidden, hidden)
        self.classifier = Linear(hidden, 2)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        """[B, 2] logits: true order / true next, swapped / random."""
        logits: Tensor = self.classifier(torch.tanh(self.pooler(hidden_BSH[:, 0])))
        return logits


class ReplacedHead(nn.Module):
    """logit = w act(W x + b) + c of each token: was it put there by a generator?"""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        option = encoder.option
        self.dense = Linear(option.hidden, option.hidden)
        self.activation = activation(option.activation)
        self.output = Linear(option.hidden, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[...] logits of [..., H]."""
        logits: Tensor = self.output(self.activation(self.dense(hidden)))
        return logits[..., 0]
