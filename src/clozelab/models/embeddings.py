"""Token, position and segment embeddings, normalised, and their projection to the hidden size.

    x = project(dropout(norm(token + position + segment)))

The projection exists when the embedding size E differs from the hidden size H (ALBERT, Lan et al. 2020, section 3.1).
Shapes: B sequences, S positions, E embedding, H hidden.
"""

from torch import Tensor, nn

from clozelab.models.dropout import dropout
from clozelab.models.dtype import compute_dtype


class Embeddings(nn.Module):
    """What a position says before it has read the others."""

    def __init__(
        self,
        vocab_size: int,
        pad_id: int,
        *,
        embedding: int,
        hidden: int,
        positions: int,
        position_offset: int,
        segments: int,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.rate = dropout
        self.position_offset = position_offset
        self.token = nn.Embedding(vocab_size, embedding, padding_idx=pad_id)
        self.position = nn.Embedding(positions + position_offset, embedding)
        self.segment = nn.Embedding(segments, embedding) if segments else None
        self.norm = nn.LayerNorm(embedding, norm_eps)
        self.project = nn.Linear(embedding, hidden) if embedding != hidden else nn.Identity()

    def forward(self, input_ids_BS: Tensor, segment_ids_BS: Tensor) -> Tensor:
        """[B, S, H]. With one segment every position is in it, whatever segment_ids say."""
        first = self.position_offset
        x_BSE = self.token(input_ids_BS) + self.position.weight[first : first + input_ids_BS.shape[1]]
        if self.segment is not None:
            many = self.segment.num_embeddings > 1
            x_BSE = x_BSE + (self.segment(segment_ids_BS) if many else self.segment.weight[0])
        x_BSE = self.norm(x_BSE)
        # From here on the stream has the dtype of the products: under autocast nothing is converted back and forth.
        x_BSE = dropout(x_BSE.to(compute_dtype(x_BSE)), self.rate, self.training)
        x_BSH: Tensor = self.project(x_BSE)
        return x_BSH
