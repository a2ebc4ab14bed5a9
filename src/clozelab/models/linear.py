"""A linear layer whose bias costs no pass over its output.

    y = x W^T + b     dx = dy W     dW = dy^T x     db = sum dy

torch's own layer, in bf16 on a CPU, first copies the bias into every row of the output and then accumulates onto it;
a wide layer spends as long on that as on the product. oneDNN can add the bias as the product leaves its registers;
torch has that operator, but no gradient for it. Everywhere else this is `nn.Linear`.

Shapes: T rows, I inputs, O outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clozelab.models.dtype import compute_dtype


class _FusedBias(torch.autograd.Function):
    """y [T, O] in bf16 of x [T, I] in bf16, and W [O, I] and b [O] in float32."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor) -> Tensor:
        half_OI = weight_OI.to(x_TI.dtype)
        ctx.save_for_backward(x_TI, half_OI)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, half_OI, bias_O.to(x_TI.dtype), "none", [], "")
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x_TI, half_OI = ctx.saved_tensors
        (dy_TO,) = grads
        dx_TI = dy_TO @ half_OI if ctx.needs_input_grad[0] else None
        dweight_OI = dy_TO.t() @ x_TI
        return dx_TI, dweight_OI.float(), dy_TO.sum(0).float()


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + b over the last dimension of x."""
    fused = (
        bias_O is not None
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and compute_dtype(x) == torch.bfloat16
        and weight_OI.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and x.numel() > 0
    )
    if not fused or bias_O is None:
        return F.linear(x, weight_OI, bias_O)
    x_TI = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    with torch.autocast("cpu", enabled=False):
        y_TO: Tensor = _FusedBias.apply(x_TI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return y_TO.view(*x.shape[:-1], len(bias_O))


class Linear(nn.Linear):
    """`nn.Linear`, computed by `linear`; its values come from `initialise`."""

    def reset_parameters(self) -> None:
        """Draw nothing: the values would be thrown away, and drawing on the meta device loads half of torch."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return linear(x, self.weight, self.bias)
