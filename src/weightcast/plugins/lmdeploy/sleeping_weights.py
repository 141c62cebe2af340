"""A worker's weights around LMDeploy's sleep and its own updates: tensors keep their identity, ties stay.

LMDeploy moves the model to the host (level 1), or replaces it by a new one (level 2).  Receiver and staging set know
the tensors of the model that was loaded.  So level 2 empties these tensors instead, and the wake-up gives them memory
again.
"""

from __future__ import annotations

import torch
from torch import nn

from weightcast.plugins.pause_state import WEIGHTS
from weightcast.receiver.loader import residents_of

TAGS = (WEIGHTS, "kv_cache")  # LMDeploy's own; sleep means both
WAKE_FIRST = "POST /wakeup?tags=weights, then update; POST /wakeup?tags=kv_cache can come last"


class SleepingWeights:
    """The tensors of one model."""

    def __init__(self, model: nn.Module) -> None:
        """Notes which tensors the model has, and which are the same memory."""
        self._model = model
        kept = residents_of(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = {name: tensor for name, tensor in parameters.items() if name in kept}
        self._buffers = {name: tensor for name, tensor in kept.items() if name not in parameters}
        places = {tensor.data_ptr(): name for name, tensor in self._parameters.items() if tensor.numel()}
        self._tied = {
            name: places[tensor.data_ptr()]
            for name, tensor in parameters.items()
            if name not in kept and tensor.numel() and tensor.data_ptr() in places
        }
        self._shapes: dict[str, tuple[torch.Size, tuple[int, ...], torch.device]] = {}

    def discard(self) -> None:
        """Frees the memory of all parameters.  LMDeploy's move to the host then has nothing of them to move."""
        self._shapes = {
            name: (tensor.shape, tensor.stride(), tensor.device) for name, tensor in self._parameters.items()
        }
        for name in (*self._parameters, *self._tied):
            tensor = self._model.get_parameter(name)
            tensor.data = tensor.data.new_empty(0)

    def restore(self) -> None:
        """Undoes sleep, once LMDeploy has moved the model to the device.

        Parameters that were discarded get memory with any contents.
        """
        for name, (shape, stride, device) in self._shapes.items():
            tensor = self._parameters[name]
            tensor.data = torch.empty_strided(tuple(shape), stride, dtype=tensor.dtype, device=device)
        self._shapes = {}
        self._tie()  # LMDeploy's move gave each memory of its own
        for name, tensor in self._buffers.items():  # a move replaces buffers, other than parameters
            tensor.data = self._model.get_buffer(name).data
            path, _, leaf = name.rpartition(".")
            setattr(self._model.get_submodule(path), leaf, tensor)

    def reattach(self) -> None:
        """Puts the known tensors back: at its end, an update of LMDeploy's own replaces some over the same memory."""
        for name, tensor in self._parameters.items():
            current = self._model.get_parameter(name)
            if current is not tensor:
                if current.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(current.data)
                path, _, leaf = name.rpartition(".")
                setattr(self._model.get_submodule(path), leaf, tensor)
        self._tie()

    def _tie(self) -> None:
        for name, kept in self._tied.items():
            self._model.get_parameter(name).data = self._model.get_parameter(kept).data
