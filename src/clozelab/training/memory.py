"""The memory of a training step: weights, gradients, the optimizer's moments, and what the forward pass keeps.

The last is counted, not computed by a formula: the model itself runs on tensors that have shapes and no memory, and
every storage that autograd saves for the backward pass is counted once, parameters aside. So it holds for every
setting of the encoder, in the dtypes in which they are kept.

* On a CPU it is what a real step keeps, and what the allocator holds after its forward pass, to 0.2 % (tests allow
  2 %).
* On a GPU two things are played: autocast (products in bf16, norms in float32) and a fused attention kernel, which
  keeps its factors and result but no scores. Where torch has no such kernel for a setting, the scores come on top. This
  was checked by hand for one layer, not against a device.

Sequences are taken as full. The peak of a process lies above the sum by its libraries and by what one layer needs while
it is computed, and below it because activations go as gradients come.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from clozelab.models.encoder import EncoderOption
from clozelab.models.loss import replaced_losses
from clozelab.models.pretraining import PretrainingModel
from clozelab.models.replaced import ReplacedTokenModel
from clozelab.training.precision import autocast

# Columns that the loss on a CPU joins to the hidden states (`models/loss.py`).
_JOINED = 32


def memory(
    option: EncoderOption,
    sequences: int,
    length: int,
    vocab_size: int,
    targets: int,
    pair: bool,
    accelerator: str,
    precision: str,
    generator: EncoderOption | None = None,
) -> dict[str, int]:
    """Bytes of one training step on one device.

    Args:
        sequences: in a micro-batch of one device.
        length: S.
        vocab_size: V.
        targets: K, target slots of a sequence.
        pair: whether there is a pair head.
        accelerator: "cpu" or "cuda".
        precision: "fp32" or "bf16".
        generator: the encoder that fills the targets; `option` then tells of every token whether it was put in.

    Returns:
        weights, gradients, moments (two of each parameter, as Adam has), activations; all but the last in float32.
    """
    with torch.device("meta"):
        model: PretrainingModel
        if generator is None:
            model = PretrainingModel(option, vocab_size, 0, pair=pair)
        else:
            model = ReplacedTokenModel(option, generator, vocab_size, 0, pair=pair)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    kept = _kept_on_cpu if accelerator == "cpu" else _kept_on_gpu

    def of(encoder: EncoderOption, pair: bool, replaced: bool) -> int:
        return by_layers(encoder, lambda o: kept(o, sequences, length, vocab_size, targets, pair, precision, replaced))

    if generator is None:
        activations = of(option, pair, replaced=False)
    else:
        activations = of(generator, pair=False, replaced=False) + of(option, pair, replaced=True)
    return {"weights": weights, "gradients": weights, "moments": 2 * weights, "activations": activations}


def by_layers(option: EncoderOption, count: Callable[[EncoderOption], int]) -> int:
    """`count` of an encoder, from two shallow ones where it is deep: its layers repeat, and counting takes a while."""
    every = option.global_every if option.window is not None else 0
    step = math.lcm(option.share_groups * option.share_inner, every or 1)
    # Deep enough to hold a first layer, a last one, and one of each kind between them.
    few = next(n for n in range(step + 2, 2 * step + 2) if (option.layers - n) % step == 0)
    if option.layers <= 2 * (few + step):
        return count(option)
    shallow, deeper = (count(dataclasses.replace(option, layers=layers)) for layers in (few, few + step))
    return shallow + (deeper - shallow) * ((option.layers - few) // step)


def kept_bytes(forward: Callable[[], object], model: torch.nn.Module) -> int:
    """Bytes of the storages that autograd saves while `forward` runs, each counted once, those of parameters not."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        result = forward()  # held: what the graph keeps would be freed, and its addresses given to others
    del result
    return sum(kept.values())


def _kept_on_cpu(
    option: EncoderOption,
    sequences: int,
    length: int,
    vocab_size: int,
    targets: int,
    pair: bool,
    precision: str,
    replaced: bool = False,
) -> int:
    if replaced:
        return _kept_by_discriminator(option, sequences, length, vocab_size, pair, precision)
    with FakeTensorMode():
        model = PretrainingModel(option, vocab_size, 0, pair=pair)
        ids_BS = torch.zeros(sequences, length, dtype=torch.long)
        place_BQ = torch.zeros(sequences, targets + pair, dtype=torch.long)

        def forward() -> tuple[Tensor, ...]:
            assert model.mlm is not None
            with autocast(precision, "cpu"):
                hidden_BQH = model.encoder(ids_BS, ids_BS, None, place_BQ)
                transformed = model.mlm.transform(hidden_BQH[:, int(pair) :].flatten(0, 1))
                return (transformed,) if model.pair is None else (transformed, model.pair(hidden_BQH))

        kept = kept_bytes(forward, model)
    # The loss looks at values, which these tensors lack. It saves the hidden states, the exponentials, the sums, and
    # the gradient of the hidden states.
    item, width = 2 if precision == "bf16" else 4, option.output_width
    return kept + sequences * targets * (item * (width + _JOINED) + item * vocab_size + 4 + 4 * width)


def _kept_by_discriminator(
    option: EncoderOption, sequences: int, length: int, vocab_size: int, pair: bool, precision: str
) -> int:
    with FakeTensorMode():
        model = PretrainingModel(option, vocab_size, 0, mlm=False, pair=pair, replaced=True)
        ids_BS = torch.zeros(sequences, length, dtype=torch.long)
        labels_BS = torch.zeros(sequences, length, dtype=torch.bool)

        def forward() -> tuple[Tensor, ...]:
            assert model.replaced is not None
            with autocast(precision, "cpu"):
                hidden_BSH = model.encoder(ids_BS, ids_BS, None)
                told = replaced_losses(model.replaced(hidden_BSH), labels_BS)
                return told if model.pair is None else (*told, model.pair(hidden_BSH))

        return kept_bytes(forward, model)


def _kept_on_gpu(
    option: EncoderOption,
    sequences: int,
    length: int,
    vocab_size: int,
    targets: int,
    pair: bool,
    precision: str,
    replaced: bool = False,
) -> int:
    # Tensors without memory take the way of those on a GPU through the model.
    with torch.device("meta"):
        model = PretrainingModel(option, vocab_size, 0, mlm=not replaced, pair=pair, replaced=replaced)
        ids_BS = torch.zeros(sequences, length, dtype=torch.long)
        place_BK = torch.zeros(sequences, targets, dtype=torch.long)
        batch = {
            "input_ids": ids_BS,
            "segment_ids": ids_BS,
            "attention_mask": torch.ones(sequences, length, dtype=torch.bool),
            "target_positions": place_BK,
            "target_ids": place_BK,
            "pair_labels": torch.zeros(sequences, dtype=torch.long),
            "replaced": torch.zeros(sequences, length, dtype=torch.bool),
        }
    with _AsOnGpu(half=precision == "bf16"):
        return kept_bytes(lambda: model(batch), model)


class _FusedAttention(torch.autograd.Function):
    """What a fused kernel keeps: its factors, the bias, its result, and one float32 for each query."""

    @staticmethod
    def forward(ctx: Any, q_BNQD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, bias_BNQS: Tensor | None) -> Tensor:
        y_BNQD = torch.empty_like(q_BNQD)
        sum_BNQ = q_BNQD.new_empty(q_BNQD.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BNQD, k_BGSD, v_BGSD, bias_BNQS, y_BNQD, sum_BNQ)
        return y_BNQD


class _AsOnGpu(TorchFunctionMode):
    """Calls of torch as a GPU takes them: attention in one kernel, dropout with a mask of bytes, and with `half`
    autocast to bf16."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half = half
        self.halves: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _FusedAttention.apply(*args, kwargs["attn_mask"])  # type: ignore[no-untyped-call]
        if func is F.dropout:
            x, rate, training = args[0], kwargs["p"], kwargs["training"]
            return torch.native_dropout(x, rate, True)[0] if training and rate > 0 else x
        if self.half and func in (F.linear, torch.einsum):
            args = [self._half(value) if isinstance(value, Tensor) else value for value in args]
        if self.half and func in (F.layer_norm, F.rms_norm):
            args = [args[0].float(), *args[1:]]
        return func(*args, **kwargs)

    def _half(self, value: Tensor) -> Tensor:
        """In bf16; a parameter is converted once for the whole pass."""
        if not isinstance(value, torch.nn.Parameter):
            return value.to(torch.bfloat16)
        if id(value) not in self.halves:
            self.halves[id(value)] = value.to(torch.bfloat16)
        return self.halves[id(value)]
