"""Bytes of tensors alive at every moment, counted operator by operator: exact, and the same on a CPU as on a GPU.

An allocator rounds up, caches, and keeps workspaces of libraries; resident memory of a process holds its interpreter too.
What is counted here is neither: the bytes of the storages of all tensors that are alive. It sees what operators return,
not what a kernel needs for itself while it runs. And it is seen: watched, autograd adds two gradients of one tensor into a
third, which it does in place when nobody looks (ATen's isTensorSubclassLike). Where a weight is used twice, a peak that the
backward pass reaches in that moment is counted higher by one gradient of it.
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
    """Counts while it is active; nest nothing in it that starts threads which make tensors.

    Args:
        device: tensors elsewhere do not count.
        alive: tensors that are there already and count.

    Attributes:
        now_bytes: of all counted tensors that are alive; storages that tensors share count once.
        peak_bytes: the most there has been since the start or since `reset_peak`.
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
        """The peak is what is alive now."""
        self.peak_bytes = self.now_bytes

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type != self._type or id(storage) in self._storages:
            return
        size = storage.nbytes()
        # A storage's Python object lives exactly as long as its memory does, however many tensors come and go.
        self._storages[id(storage)] = weakref.finalize(storage, self._forget, id(storage), size)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _forget(self, key: int, size: int) -> None:
        del self._storages[key]
        self.now_bytes -= size


class SavedForBackward:
    """Context of a forward pass: which tensors autograd keeps for the backward pass, by a count of its own.

    Args:
        known: tensors that are there anyway (parameters, buffers, the batch) and are no activations.
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
        """Of all activations that are still kept; storages that tensors share count once."""
        return sum(storage.nbytes() for storage in self._alive())

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        return (storage for reference in self._kept.values() if (storage := reference()) is not None)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._known:
            self._kept[key] = weakref.ref(tensor.untyped_storage())
        return tensor.detach()  # of its graph: an output kept by its own node would keep itself alive


def storage_key(tensor: Tensor) -> int:
    """What tells a storage from all others that are alive."""
    return id(tensor.untyped_storage())


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each counted once."""
    return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor]]:
    """The tensors of a training that outlive a step, by what they are: parameters, buffers, gradients, optimizer state.

    Step counters are left out, which fused optimizers keep as scalars.
    """
    parameters = list(model.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {
        "parameters": parameters,
        "buffers": list(model.buffers()),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer state": moments,
    }
