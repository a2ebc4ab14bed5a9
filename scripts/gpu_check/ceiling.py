"""`python -m gpu_check.ceiling cuda|cpu`: what the machine is, and what it can do at best.

The ceilings are what torch reaches on one large product and one large copy, of random numbers: on zeros a GPU draws
less power and is faster than it will ever be on a model.
"""

import importlib.metadata
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_check.events import tell

PACKAGES = ("torch", "triton", "numpy", "pytorch-lightning", "tokenizers", "transformers", "scipy", "wandb")


def describe(device: torch.device) -> dict[str, Any]:
    """What the results depend on; no host name, no user name."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    found: dict[str, Any] = {
        "name": platform.machine(),
        "cuda_available": torch.cuda.is_available(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def synchronise(device: torch.device) -> None:
    """Wait for what was asked of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(call: Callable[[], object], device: torch.device, calls: int, repeats: int = 5) -> float:
    """Median over repeats of the seconds of one call, of `calls` in a row."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronise(device)
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)


def product(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """TFLOP/s of a product of two [width, width] matrices."""
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2e-12 * width**3 / median_seconds(lambda: torch.mm(a, b, out=out), device, calls=10)


def copying(device: torch.device, size: int) -> float:
    """GB/s of a copy of `size` bytes on the device, bytes read plus bytes written."""
    a = torch.randn(size // 4, device=device)
    b = torch.empty_like(a)
    return 2e-9 * size / median_seconds(lambda: b.copy_(a), device, calls=3)


def main(kind: str) -> None:
    """Tell it."""
    device = torch.device(kind)
    tell(environment=describe(device))
    if kind == "cuda" and not torch.cuda.is_available():
        return
    on_gpu = kind == "cuda"
    width, size = (8192, 4 * 2**30) if on_gpu else (512, 2**26)
    if on_gpu:
        size = min(size, torch.cuda.mem_get_info()[0] // 4 // 1024 * 1024)
    ceiling = {
        "width": width,
        "bf16_tflops": product(device, torch.bfloat16, width),
        "fp32_tflops": product(device, torch.float32, width),
    }
    if on_gpu:
        torch.set_float32_matmul_precision("high")
        ceiling["tf32_tflops"] = product(device, torch.float32, width)
    ceiling["copy_gb_per_s"] = copying(device, size)
    tell(ceiling=ceiling)


if __name__ == "__main__":
    main(sys.argv[1])
