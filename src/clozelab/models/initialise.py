"""Initial values as a pure function of (seed, parameter name): arms with different heads share one trunk exactly."""

import torch
from torch import nn

from clozelab.seeds import stream_key


@torch.no_grad()
def initialise(model: nn.Module, seed: int, scale: float) -> None:
    """Set every parameter in place.

    Matrices and embeddings: normal(scale) truncated at two standard deviations (google-research/bert). The padding
    row of an embedding: zero (Hugging Face). Biases: zero. Norms: one and zero. Values are drawn on the CPU in
    float32, each parameter from a generator of its own, so they do not depend on the device, the dtype, or what else
    the model holds.
    """
    norms = {id(p) for m in model.modules() if isinstance(m, nn.LayerNorm) for p in [m.weight]}
    for name, parameter in model.named_parameters():
        if id(parameter) in norms:
            parameter.fill_(1.0)
        elif parameter.ndim < 2:
            parameter.zero_()
        else:
            generator = torch.Generator().manual_seed(stream_key(seed, f"init {name}"))
            value = torch.empty(parameter.shape)
            nn.init.trunc_normal_(value, std=scale, a=-2 * scale, b=2 * scale, generator=generator)
            parameter.copy_(value)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
