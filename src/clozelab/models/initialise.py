"""Initial values as a pure function of (seed, parameter name): arms with different heads share one trunk exactly."""

import math

import torch
from torch import nn

from clozelab.models.encoder import Encoder
from clozelab.models.init_schemes import KNOW_A_SCALE, SCHEMES
from clozelab.models.norms import is_norm
from clozelab.seeds import stream_key

_LAST_IN_BRANCH = (".attention.output.weight", ".ffn.down.weight")


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Set every parameter of a model that holds one `Encoder`, in place, by the scheme of its option.

    Matrices and embeddings: as the scheme says. The padding row of an embedding: zero (Hugging Face). Biases: zero.
    Norms: one and zero. With `init_depth` the last matrix of each residual branch is divided by sqrt(2 layers) (GPT-2,
    Radford et al. 2019, section 2.3). Values are drawn on the CPU in float32, each parameter from a generator of its
    own, so they do not depend on the device, the dtype, or what else the model holds.
    """
    option = next(module for module in model.modules() if isinstance(module, Encoder)).option
    scales = {id(module.weight) for module in model.modules() if is_norm(module)}
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for name, parameter in model.named_parameters():
        if id(parameter) in scales:
            parameter.fill_(1.0)
        elif parameter.ndim < 2:
            parameter.zero_()
        else:
            generator = torch.Generator().manual_seed(stream_key(seed, f"init {name}"))
            value = torch.empty(parameter.shape)
            scheme = option.init if id(parameter) in matrices or option.init in KNOW_A_SCALE else "truncated"
            SCHEMES[scheme](value, option.init_scale, generator)
            if option.init_depth and f".{name}".endswith(_LAST_IN_BRANCH):
                value /= math.sqrt(2 * option.layers)
            parameter.copy_(value)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
