"""What a model costs: its parameters, and the floating-point operations of a training step.

Convention for FLOPs (Kaplan et al. 2020, section 2.1, made exact):

* a product of [m, k] and [k, n] is 2 m k n; everything else (lookups, norms, softmax, GELU, dropout, optimizer) is 0;
* the backward pass is twice the forward pass;
* applications count, not parameters: a shared layer applied 12 times costs 12 times;
* what is computed counts: the masked-language-model head runs on the targets alone, and the last block, but for its
  keys and values, on the positions that the heads read (targets, and the first position if there is a pair head).
"""

from torch import nn

from clozelab.models.encoder import Encoder, EncoderOption


def parameters(model: nn.Module) -> dict[str, int]:
    """Counts of a model that holds one `Encoder`.

    Returns:
        unique: parameters, a tied or shared one counted once.
        unshared: what `unique` would be without sharing across layers.
        embedding: token, position and segment embeddings.
        non_embedding: unique - embedding.
    """
    encoder = next(module for module in model.modules() if isinstance(module, Encoder))
    unique = sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(parameter.numel() for parameter in encoder.blocks.parameters())
    embeddings = encoder.embeddings
    tables = [embeddings.token, embeddings.position, *([embeddings.segment] if embeddings.segment else [])]
    embedding = sum(parameter.numel() for table in tables for parameter in table.parameters())
    return {
        "unique": unique,
        "unshared": unique + blocks * (encoder.option.layers // len(encoder.blocks) - 1),
        "embedding": embedding,
        "non_embedding": unique - embedding,
    }


def forward_flops(
    option: EncoderOption, batch_size: int, length: int, vocab_size: int, targets: int, pair: bool = False
) -> float:
    """FLOPs of one forward pass with `targets` targets in each of `batch_size` sequences of `length` positions."""
    b, s, v, h, e, f = batch_size, length, vocab_size, option.hidden, option.embedding_size, option.ffn
    queries = targets + pair

    def block(q: int) -> int:
        projections = 2 * h * (2 * s * h + 2 * q * h)
        attention = 2 * 2 * q * s * h
        feed_forward = 2 * 2 * q * h * f
        return b * (projections + attention + feed_forward)

    embeddings = b * s * 2 * e * h if e != h else 0
    mlm_head = b * targets * 2 * (h * e + e * v)
    pair_head = b * 2 * (h * h + h * 2) if pair else 0
    return float(embeddings + (option.layers - 1) * block(s) + block(queries) + mlm_head + pair_head)


def flops(
    option: EncoderOption, batch_size: int, length: int, vocab_size: int, targets: int, pair: bool = False
) -> float:
    """FLOPs of one training step: forward and backward."""
    return 3 * forward_flops(option, batch_size, length, vocab_size, targets, pair)
