"""The heads of pre-training: masked tokens, and the relation of two segments (BERT, section 3.1; ALBERT, section 3.1).

Shapes: B sequences, S positions, N targets, H hidden, E embedding, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.encoder import Encoder
from clozelab.models.layers import Activation
from clozelab.models.linear import Linear


class MaskedLMHead(nn.Module):
    """logits = W_V norm(gelu(W x)) + b, with W_V the token embedding unless the option unties it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        option = encoder.option
        token = encoder.embeddings.token
        self.dense = Linear(option.hidden, option.embedding_size)
        self.activation = Activation(option.activation)
        self.norm = nn.LayerNorm(option.embedding_size, option.norm_eps)
        self.tied = option.tie_output
        self.weight = token.weight if option.tie_output else nn.Parameter(torch.empty_like(token.weight))
        self.bias = nn.Parameter(torch.zeros(token.num_embeddings))

    def transform(self, hidden_NH: Tensor) -> Tensor:
        """[N, E]: what is multiplied by the output embedding."""
        x: Tensor = self.norm(self.activation(self.dense(hidden_NH)))
        return x

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N, V] logits."""
        return F.linear(self.transform(hidden_NH), self.weight, self.bias)


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
