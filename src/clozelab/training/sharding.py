"""Fully sharded training (FSDP; Rajbhandari et al. 2020, stage 3): each rank keeps its share of every parameter, of its
gradient and of its optimiser state.

A parameter is whole on a rank only while the layer that it belongs to is computed. What is learned is what DDP learns;
checkpoints hold whole tensors under the names of an unsharded model, so that either goes on from the other's.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from pytorch_lightning.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from clozelab.models.attention import SelfAttention
from clozelab.models.layers import FeedForward


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Part a model, in place, among the ranks of a mesh of one dimension.

    The two layers of a block are gathered one by one, as they are computed. The rest, of which embeddings and heads may
    share parameters, is gathered for the whole of a forward and backward pass.
    """
    # It matters to code that writes into what such a layer returns; the encoder adds it to the stream out of place.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    for module in model.modules():
        if isinstance(module, SelfAttention | FeedForward):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Sharded(ModelParallelStrategy):
    """Lightning's strategy for models that shard themselves, with checkpoints as those of an unsharded run.

    Its own would name the optimiser's parameters in the order of the model, where torch numbers them by group.

    Args:
        devices: ranks.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights, on the CPU. All ranks have to ask; the first gets them."""
        assert self.lightning_module is not None
        state = self.lightning_module.state_dict(keep_vars=True)
        gathered = {id(value): self._whole(value.detach()) for value in state.values()}
        return {name: gathered[id(value)] for name, value in state.items()}  # a shared one is kept once

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimiser, on the CPU. All ranks have to ask; the first gets it."""
        saved = optimizer.state_dict()
        state = {
            number: {key: self._whole(value) if isinstance(value, Tensor) else value for key, value in of.items()}
            for number, of in saved["state"].items()
        }
        return {**saved, "state": state}

    def _whole(self, value: Tensor) -> Tensor | None:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.cpu() if self.is_global_zero else None

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file, as an unsharded run does. Its weights are in the model since before that was sharded."""
        # Lightning does not hand on here that it was asked for weights_only.
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only=True)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Yes, by `load_optimizer_state_dict`."""
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give each rank its share of the state of the optimisers."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                number: {key: _share(value, parameters[number]) for key, value in of.items()}
                for number, of in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _share(value: Any, parameter: Tensor) -> Any:
    """This rank's share of a moment of a parameter; anything else (the number of steps) as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
