"""Batches for tests of what a step costs."""

import torch
from torch import Tensor


def full_batch(batch_size: int, length: int, vocab_size: int, targets: int) -> dict[str, Tensor]:
    """Sequences without padding, every target slot in use."""
    ids_BS = torch.arange(batch_size * length).view(batch_size, length) % (vocab_size - 5) + 5
    return {
        "input_ids": ids_BS,
        "segment_ids": torch.zeros_like(ids_BS),
        "attention_mask": torch.ones_like(ids_BS, dtype=torch.bool),
        "target_positions": torch.arange(targets).expand(batch_size, targets),
        "target_ids": ids_BS[:, :targets],
        "pair_labels": torch.zeros(batch_size, dtype=torch.long),
    }
