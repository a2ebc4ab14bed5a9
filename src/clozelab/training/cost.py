"""What a model costs: its parameters, and the floating-point operations of a training step.

Convention for FLOPs (Kaplan et al. 2020, section 2.1, made exact):

* a product of [m, k] and [k, n] is 2 m k n; everything else (lookups, norms, softmax, GELU, dropout, optimizer) is 0;
* the backward pass is twice the forward pass: each product has one for the gradient of either factor;
* applications count, not parameters: a shared layer applied 12 times costs 12 times;
* what is computed counts: the masked-language-model head runs on the targets alone, and the last block, but for its
  keys and values, on the positions that the heads read (targets, and the first position if there is a pair head).
  Local attention is computed as a full product under a mask, so a window changes nothing. The generator's head runs
  once more where tokens are drawn, which is not counted;
* sequences count as full, padding like tokens (on a CPU much of it is skipped: `models/layout.py`).

This is what `torch.utils.flop_counter` counts in a step, but for two things. On a CPU targets are filled up to a
multiple of 32, and the loss joins 32 columns to the factors of the output layer (`models/loss.py`), whose products are
therefore O + 32 wide, and takes one of the two backward products during the forward pass. Fused attention kernels
compute the scores again in the backward pass, 5 products where the convention has 4. Both change how the work is done,
not what a model costs.

Shapes: B sequences, S positions, Q positions asked for, H hidden, E embedding, O output width, V vocabulary.
"""

from collections import Counter

from torch import nn

from clozelab.models.encoder import Encoder, EncoderOption
from clozelab.models.layers import GATED
from clozelab.models.positions.relative_key import RelativeKey, RelativeKeyOption

_ATTENTION_HALF = ("attention", "attention_norm", "attention_out_norm")
_FFN_HALF = ("ffn", "ffn_norm", "ffn_out_norm")


def parameters(model: nn.Module) -> dict[str, int]:
    """Counts of a model.

    Args:
        model: it holds one `Encoder`, or several (a generator beside it); embeddings are those of the first.

    Returns:
        unique: parameters, a tied or shared one counted once.
        shared: those of `unique` that more than one layer applies.
        applied: what `unique` would be if every layer had parameters of its own, hence what runs.
        unshared: the same, under the name that records have for it.
        embedding: token, position and segment embeddings.
        non_embedding: unique - embedding.
    """
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    unique = _size(model)
    owned = [one for encoder in encoders for one in _owned_by_layers(encoder)]
    applied = unique + sum(size * (applications - 1) for size, applications in owned)
    embeddings = encoders[0].embeddings
    tables = (embeddings.token, embeddings.position, embeddings.segment)
    embedding = sum(_size(table) for table in tables if table is not None)
    return {
        "unique": unique,
        "shared": sum(size for size, applications in owned if applications > 1),
        "applied": applied,
        "unshared": applied,
        "embedding": embedding,
        "non_embedding": unique - embedding,
    }


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _owned_by_layers(encoder: Encoder) -> list[tuple[int, int]]:
    """(parameters, layers that apply them) of each half of each block, and of each table of relative keys."""
    owned = []
    for half, owners in ((_ATTENTION_HALF, encoder.attention_of), (_FFN_HALF, encoder.ffn_of)):
        for block, applications in Counter(owners).items():
            owned.append((sum(_size(encoder.blocks[block].get_submodule(part)) for part in half), applications))
    position = encoder.embeddings.position
    if isinstance(position, RelativeKey):
        owned += [(position.tables[n].numel(), layers) for n, layers in Counter(encoder.attention_of).items()]
    return owned


def forward_parts(
    option: EncoderOption,
    batch_size: int,
    length: int,
    vocab_size: int,
    targets: int,
    pair: bool = False,
    generator: EncoderOption | None = None,
) -> dict[str, float]:
    """FLOPs of each part of one forward pass.

    Args:
        batch_size: B.
        length: S, all of it tokens.
        vocab_size: V.
        targets: in each sequence.
        pair: whether there is a pair head.
        generator: the encoder that fills the targets; `option` then tells of every token whether it was put in.

    Returns:
        embedding (its projection), attention and ffn (of all layers, projections included), mlm_head, pair_head; with a
        generator its parts as generator_..., and replaced_head in place of mlm_head.
    """
    if generator is not None:
        made = forward_parts(generator, batch_size, length, vocab_size, targets)
        # All of the discriminator's places are asked for: each is told of, the first one of the pair too.
        told = forward_parts(option, batch_size, length, vocab_size, length)
        h = option.hidden
        told["pair_head"] = float(batch_size * 2 * (h * h + h * 2) if pair else 0)
        told["replaced_head"] = float(batch_size * length * 2 * (h * h + h))
        del told["mlm_head"], made["pair_head"]
        return {f"generator_{part}": flops for part, flops in made.items()} | told
    b, s, v, h, e, o = batch_size, length, vocab_size, option.hidden, option.embedding_size, option.output_width
    keys_and_values = 2 * option.key_value_heads * (h // option.heads)
    up = option.ffn_width * (2 if option.activation in GATED else 1)
    # Beside scores and values: the query by the relative key, and in the second variant the key by it.
    relative = 1 + option.position.keys if isinstance(option.position, RelativeKeyOption) else 0

    def attention(q: int) -> int:
        projections = q * h + s * keys_and_values + q * h
        return b * 2 * (h * projections + (2 + relative) * q * s * h)

    def ffn(q: int) -> int:
        return b * 2 * q * (h * up + option.ffn_width * h)

    asked, full_layers = targets + pair, option.layers - 1
    return {
        "embedding": float(b * s * 2 * e * h if option.projects else 0),
        "attention": float(full_layers * attention(s) + attention(asked)),
        "ffn": float(full_layers * ffn(s) + ffn(asked)),
        "mlm_head": float(b * targets * 2 * (h * o + o * v)),
        "pair_head": float(b * 2 * (h * h + h * 2) if pair else 0),
    }


def forward_flops(
    option: EncoderOption,
    batch_size: int,
    length: int,
    vocab_size: int,
    targets: int,
    pair: bool = False,
    generator: EncoderOption | None = None,
) -> float:
    """FLOPs of one forward pass; the arguments are those of `forward_parts`."""
    return sum(forward_parts(option, batch_size, length, vocab_size, targets, pair, generator).values())


def flops(
    option: EncoderOption,
    batch_size: int,
    length: int,
    vocab_size: int,
    targets: int,
    pair: bool = False,
    generator: EncoderOption | None = None,
) -> float:
    """FLOPs of one training step: forward and backward."""
    return 3 * forward_flops(option, batch_size, length, vocab_size, targets, pair, generator)
