"""The precision a machine is fast in: bf16 where it has matrix units for it, fp32 elsewhere.

In bf16 the model computes under autocast: parameters, gradients as the optimizer sees them, and losses stay float32.
"""

import contextlib

import torch


def has_fast_bf16(accelerator: str) -> bool:
    """Whether products in bf16 run on hardware made for them: AVX512-BF16 or AMX on a CPU, Ampere or later on a GPU."""
    if accelerator == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if accelerator == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def choose_precision(wanted: str, accelerator: str) -> str:
    """The precision to run in, "bf16" or "fp32".

    Args:
        wanted: `trainer.precision`, which the trainer option has checked: "auto", or the precision itself.
        accelerator: type of the device, "cpu" or "cuda".
    """
    if wanted == "auto":
        return "bf16" if has_fast_bf16(accelerator) else "fp32"
    return wanted


def autocast(precision: str, accelerator: str) -> contextlib.AbstractContextManager[object]:
    """The context in which the model computes."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(accelerator, dtype=torch.bfloat16)
