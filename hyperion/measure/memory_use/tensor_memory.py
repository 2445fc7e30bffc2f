"""Count the bytes of live tensors, operator by operator: exact, and equal on a CPU and on a GPU.

An allocator rounds up, caches, and holds workspaces of libraries; the resident memory of a process includes the interpreter.
The count here is the size of the storages of all live tensors. It includes the outputs of operators, but not the workspace
of a kernel.

Counting changes one thing: with a dispatch mode active, autograd adds two gradients of the same tensor into a third one
instead of in place (ATen's isTensorSubclassLike). If a weight is used twice and the peak is in that operator, the count is too
high by one gradient of this weight.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperion.hardware import Device


class TensorMemory(TorchDispatchMode):
    """Context that counts the bytes of live tensors. Tensors created on other Python threads are not counted.

    Args:
        device: count tensors on this type of device only.
        alive: existing tensors to count.

    Attributes:
        now_bytes: size of all counted live tensors; a shared storage counts once.
        peak_bytes: largest `now_bytes` since the start or since `reset_peak`.
    """

    def __init__(self, device: Device, alive: Iterable[Tensor] = ()):
        super().__init__()
        self._type = torch.device(device.torch_device).type
        self._storages: dict[int, weakref.finalize] = {}
        self.now_bytes = self.peak_bytes = 0
        for tensor in alive:
            self._count(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        returned = func(*args, **kwargs or {})
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return returned

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        for finalizer in self._storages.values():
            finalizer.detach()
        self._storages.clear()

    def reset_peak(self) -> None:
        """Set the peak to the current size."""
        self.peak_bytes = self.now_bytes

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != self._type or id(storage) in self._storages:
            return
        size = storage.nbytes()
        # The Python object of a storage lives exactly as long as its memory, regardless of the tensors that share it.
        self._storages[id(storage)] = weakref.finalize(storage, self._forget, id(storage), size)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self.now_bytes -= size


class SavedForBackward:
    """Context of a forward pass that counts the tensors that autograd saves for the backward pass.

    Args:
        known: tensors that are not activations: parameters, buffers, the batch.
    """

    def __init__(self, known: Iterable[Tensor]):
        self._known = {storage_key(tensor) for tensor in known}
        self._kept: dict[int, weakref.ref] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.__exit__(*exception)

    @property
    def bytes(self) -> int:
        """Size of all saved activations that are alive; a shared storage counts once."""
        return sum(storage.nbytes() for storage in self._alive())

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        return (storage for reference in self._kept.values() if (storage := reference()) is not None)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._known:
            self._kept[key] = weakref.ref(tensor.untyped_storage())
        return tensor.detach()  # without its graph: an output saved by its own node would keep itself alive


def storage_key(tensor: Tensor) -> int:
    """Return a key that is unique among live storages."""
    return id(tensor.untyped_storage())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the size of the storages of these tensors; a shared storage counts once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors that outlive a training step by kind: parameters, buffers, gradients, optimizer state."""
    parameters: list[Tensor] = list(model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "parameters": parameters,
        "buffers": list(model.buffers()),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer state": moments,
    }
