"""The dtype in which products are computed. Precision is set from outside, by autocast; the model only asks."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would multiply x, or its own where autocast is off."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else x.dtype
