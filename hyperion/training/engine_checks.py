"""Checks of the arguments of an engine, and of what its methods get and return. Their errors name the class and the method."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.errors import HyperionError, require_number
from hyperion.hardware import Device
from hyperion.training.recipe import Precision


def check_arguments(schedule: Any, precision: Any, clip_norm: float, micro_batches: int, where: str) -> None:
    def refusal(what: str, next_step: str) -> HyperionError:
        return HyperionError(what, where=where, next_step=next_step)

    if not callable(schedule):
        raise refusal(
            f"the schedule is {schedule!r:.80}, but must be a function of the step",
            "pass WarmupCosine(…), or lambda step: 1e-3 for a constant rate",
        )
    rate_of(schedule, 1, where)
    if not isinstance(precision, Precision):
        raise refusal(f"the precision is {precision!r:.80}", 'pass choose_precision(device), or choose_precision(device, "bf16")')
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float) or not clip_norm > 0:
        raise refusal(
            f"clip_norm is {clip_norm!r}, which is not a number above 0", "pass a number above 0, or math.inf to disable clipping"
        )
    require_number("micro_batches", micro_batches, where, whole=True, at_least=1)


def rate_of(schedule: Callable[[int], Any], step: int, where: str) -> float:
    """Return the learning rate of a step.

    Raises:
        HyperionError: it is no finite number, or negative.
    """
    rate = schedule(step)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise HyperionError(
            f"the schedule returns the learning rate {rate!r} for step {step}",
            where=where,
            next_step="return a finite number that is not negative",
        )
    return rate


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Check that the optimizer trains every parameter that has gradients.

    A step sets only the optimizer's gradients to zero. The gradients of other parameters would grow from step to step, and
    clipping would count them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"{optimizer!r:.80}"
        raise HyperionError(
            f"the optimizer is {given}, and not an object of a class of torch.optim",
            where=where,
            next_step="pass an object, for example torch.optim.AdamW(model.parameters())",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise HyperionError(
            f"{type(optimizer).__name__}.step needs a closure that computes the loss several times, but a step computes it once",
            where=where,
            next_step="choose another optimizer, such as torch.optim.AdamW",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise HyperionError(
            f"no parameter of the {type(model).__name__} needs gradients, so there is nothing to train",
            where=where,
            next_step="unfreeze parameters with requires_grad_(True)",
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left_out = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]
    if left_out:
        raise HyperionError(
            f"the optimizer does not have {len(left_out)} parameters of the model that need gradients, such as {left_out[0]}",
            where=where,
            next_step="make the optimizer from the parameters of this model, and freeze the others with requires_grad_(False)",
        )
    rates = sorted({float(group["lr"]) for group in optimizer.param_groups})
    if len(rates) > 1:
        raise HyperionError(
            f"the optimizer's parameter groups have the learning rates {', '.join(f'{rate:g}' for rate in rates)}, but the "
            "schedule sets one rate for all groups",
            where=where,
            next_step="give all groups the same rate, or write an engine whose train_step sets the rate of each group",
        )


def check_device(model: nn.Module, device: Device, where: str) -> None:
    """Check that the parameters of the model are on the device of the engine."""
    for name, parameter in model.named_parameters():
        if not is_on(parameter, device):
            raise HyperionError(
                f"the parameter {name} is on {parameter.device}, but the engine computes on {device.torch_device}",
                where=where,
                next_step=f'move the model before the optimizer is made: model.to("{device.torch_device}")',
            )


def require_loss(loss: Any, where: str) -> None:
    """Check that a loss is a scalar with gradient, without waiting for the device."""
    if not isinstance(loss, Tensor):
        next_step = "return the sum as a tensor, without .item() or float()"
    elif loss.ndim or not loss.is_floating_point():
        next_step = "return the sum over all items: losses.sum(), or reduction='sum'"
    elif not loss.requires_grad:
        next_step = "compute the loss from self.model(…), without detach(), torch.no_grad() or .item()"
    else:
        return
    gradient = " without gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
    raise HyperionError(
        f"the loss is {returned(loss)}{gradient}, and not a floating-point tensor of shape [] with gradient",
        where=where,
        next_step=next_step,
    )


def require_no_mean(loss: Tensor, where: str) -> None:
    """Raise a HyperionError if a loss function of PyTorch, such as `F.cross_entropy`, returned this loss as a mean.

    These functions store their reduction in the graph. Other means are not detected: the last operation of a sum may be a mean as
    well, for example over the features of a sample.
    """
    if getattr(loss.grad_fn, "_saved_reduction", None) == 1:  # at::Reduction::Mean
        raise HyperionError(
            f"the loss is a mean, computed by {type(loss.grad_fn).__name__}, but the engine divides by the number of items",
            where=where,
            next_step="return the sum over all items: reduction='sum'. If a model returns the mean as its loss, compute the sum "
            "from its outputs",
        )


def returned(value: Any) -> str:
    return tensor_form(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def batch_form(batch: Any) -> str:
    """Return a short description of a batch, such as {x: float32 [4, 8], y: int64 [4]}."""
    if isinstance(batch, Tensor):
        return tensor_form(batch)
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {batch_form(part)}" for key, part in batch.items()) + "}"
    if isinstance(batch, tuple | list):
        return "(" + ", ".join(map(batch_form, batch)) + ")"
    return type(batch).__name__


def is_on(tensor: Tensor, device: Device) -> bool:
    expected = torch.device(device.torch_device)
    return tensor.device.type == expected.type and expected.index in (None, tensor.device.index)


def two_tensors(batch: Any, names: str, device: Device) -> tuple[Tensor, Tensor]:
    """Return the two tensors of a batch.

    Raises:
        HyperionError: the batch is not a pair of tensors, is empty, or is on another device.
    """
    if not isinstance(batch, tuple | list) or [isinstance(part, Tensor) for part in batch] != [True, True]:
        raise batch_error(f"the batch is a {type(batch).__name__}", f"pass a pair of tensors ({names})")
    for part in batch:
        if not is_on(part, device):
            raise batch_error(f"the batch is on {part.device}", f"create it on {device.torch_device}, the engine's device")
        if not part.numel():
            raise batch_error(f"a tensor of the batch is empty: {tensor_form(part)}", "skip empty batches")
    first, second = batch
    return first, second


def tensor_form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def value_range(tensor: Tensor) -> list[float]:
    return torch.stack(torch.aminmax(tensor)).tolist()


def batch_error(what: str, next_step: str) -> HyperionError:
    return HyperionError(what, where="the first batch", next_step=next_step)
