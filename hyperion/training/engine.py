"""Engines: classes that run one optimizer step per batch. The training loop works with any class that implements Engine.

TorchEngine is the base class for PyTorch modules. Its subclasses LanguageEngine and ImageEngine define batches of tokens and of
images.
"""

import contextlib
import ctypes
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from hyperion import processes
from hyperion.checkpoints import CheckpointError, agreed, read_sharded, write_sharded
from hyperion.checkpoints.sharded import difference, mismatch, require_finite, stored_tensors
from hyperion.checkpoints.states import EARLIER
from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError, require_number
from hyperion.hardware import Device
from hyperion.measure.api.arguments import device_of
from hyperion.parallel import (
    assert_ranks_agree,
    average_statistics,
    clip_gradients,
    image_memory_format,
    is_replicated,
    is_sharded,
    local_gradient_norm,
    ranks_of,
    start_sum,
    without_exchange,
)
from hyperion.processes import World
from hyperion.training.captured import CapturedStep, same_tensors, why_not_captured
from hyperion.training.engine_checks import (
    batch_error,
    batch_form,
    check_arguments,
    check_device,
    check_optimizer,
    rate_of,
    require_loss,
    require_no_mean,
    returned,
    tensor_form,
    two_tensors,
    value_range,
)
from hyperion.training.evaluate import ONE_CLASS_EACH, evaluate_images, evaluate_language, require_nll
from hyperion.training.recipe import Precision

# Options of a parameter group that say how an update is computed, and not what.
_HOW = ("foreach", "fused", "capturable")


class NonFiniteError(HyperionError):
    """Raised when a loss, a gradient or a weight is infinite or NaN."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step. The tensors are on the device. Reading a value waits for the device.

    All tensors are scalars. "Whole batch" means the batch over all ranks.

    Attributes:
        loss: mean loss of the whole batch per item, before the update. The engines of this module compute it in nats.
        gradient_norm: L2 norm of the gradients of the whole batch, before clipping.
        items: number of items in the whole batch, without padding.
        learning_rate: learning rate of this step.
        rank_loss: loss of this rank's part of the batch. On one device it is equal to `loss`.
        rank_items: number of items in this rank's part of the batch. On one device it is equal to `items`.
        skipped: True if the update was skipped because a gradient overflowed in fp16. The gradient norm is then not finite.
    """

    loss: Tensor
    gradient_norm: Tensor
    items: Tensor
    learning_rate: float
    rank_loss: Tensor
    rank_items: Tensor
    skipped: Tensor


class Engine(Protocol):
    """Interface that the training loop needs.

    Attributes:
        device: the device on which the engine computes.
        item: the unit in which the engine counts items, such as 'token', 'image' or 'sample'.
        tokens_seen: number of items in all steps so far, whatever their unit is. Reading this attribute waits for the device.
    """

    device: Device
    item: str

    @property
    def tokens_seen(self) -> int: ...

    def train_step(self, batch: Any) -> StepMetrics:
        """Run one optimizer step on a batch from the loader, and return its metrics."""
        ...

    def evaluate(self, batches: Iterable) -> dict[str, float]:
        """Evaluate on held-out data and return a dict of metrics, including 'loss'. The training state does not change."""
        ...

    def compare_ranks(self) -> None:
        """Raise DesyncError on all ranks if a replicated parameter differs between ranks. With one rank, do nothing."""

    def save(self, folder: Path) -> None:
        """Write the complete state of the engine into an existing, empty folder."""

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote. Raise CheckpointError if the state is damaged or belongs to another model."""


class TorchEngine(ABC):
    """Engine that trains a PyTorch module with an optimizer and a learning-rate schedule. Subclasses define the batch.

    With several ranks, each rank gets its part of the batch. The parts may have different numbers of items. The step gives the
    same result as a single device with the whole batch. The ranks exchange two small sums, which overlap with the forward and the
    backward pass. The host does not wait for these sums.

    Args:
        model: a module on the device. With several ranks it must be the result of hyperion.parallel.parallelize.
        optimizer: optimizer of the parameters of the model. Its learning rate is set from the schedule in every step.
        schedule: function that returns the learning rate of a step. Steps are counted from 1.
        precision: number format of matrix products and convolutions.
        device: the device of the model, or its PyTorch name.
        clip_norm: upper bound on the L2 norm of the gradients. Larger gradients are scaled down to this norm. math.inf disables
            clipping.
        world: the ranks that share each batch; by default all ranks of the process group of this process.
        capture: if True, capture the whole step as a CUDA (HIP) graph at the first batch, and replay the graph for every
            batch with the same shapes. If a capture is not possible, steps run normally, and `uncaptured` contains the reason.
        micro_batches: number of parts into which a rank splits its batch, to use less memory. Each item has the same weight
            in every part, so the step is the same up to rounding. There are two exceptions: dropout uses other random
            numbers, and batch norms compute statistics for each part separately.

    Attributes:
        item: the unit in which the engine counts items, such as 'token', 'image' or 'sample'.
        scaler: the loss scaler of fp16. Its state is part of the state of the engine.
        uncaptured: the reason why steps are not replayed from a graph; "" if they are replayed.
        unchecked: True until the first batch has been checked.

    Raises:
        HyperionError: an argument is of another type, the model is on another device or has no parameter to train, or the
            optimizer does not train the parameters of the model.
    """

    item: str

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        precision: Precision,
        device: Device | str,
        clip_norm: float = 1.0,
        world: World | None = None,
        capture: bool = False,
        micro_batches: int = 1,
    ):
        device = device_of(device)
        check_arguments(schedule, precision, clip_norm, micro_batches, type(self).__name__)
        check_optimizer(model, optimizer, type(self).__name__)
        check_device(model, device, type(self).__name__)
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.precision, self.device, self.clip_norm = precision, device, clip_norm
        self.scaler, self.micro_batches = precision.loss_scaler(device), micro_batches
        self.steps, self.ranks = 0, ranks_of(model)
        if self.ranks != (sharing := (world or processes.world()).size):
            raise HyperionError(
                f"{sharing} ranks share each batch, but this {type(model).__name__} is distributed over {self.ranks}",
                where=type(self).__name__,
                next_step="pass the result of hyperion.parallel.parallelize as model; to train on one of several ranks only, "
                "pass a world of one rank",
            )
        self.uncaptured = why_not_captured(device, self.ranks, precision.dtype) if capture else "not asked for"
        self._captured: CapturedStep | None = None
        self.unchecked = True
        self._expects_sum = False  # True during the first step, if its batch has more than one item
        self._items_seen = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        if device.kind == "cpu":
            keep_freed_memory()

    @property
    def tokens_seen(self) -> int:
        """Number of items, in the unit `item`, in all steps so far. Reading this property waits for the device."""
        return int(self._items_seen)

    @property
    def capture_time_s(self) -> float | None:
        """Duration of the capture in seconds, or None before the capture. The first step's duration includes it."""
        return None if self._captured is None else self._captured.time_s

    def capture(self) -> None:
        """Request that the step is captured at the next batch, if possible, and replayed for later batches."""
        self.uncaptured = why_not_captured(self.device, self.ranks, self.precision.dtype)

    @abstractmethod
    def count_items(self, batch: Any) -> Tensor:
        """Return the number of items in this rank's batch that contribute to the loss, an int64 scalar created on the device.

        It may be 0 on a rank, but not on all ranks together.
        """

    @abstractmethod
    def summed_loss(self, batch: Any) -> Tensor:
        """Return the sum of the losses of all items in this rank's batch, as a scalar with gradient.

        The engine would divide a mean by the number of items a second time. The first step refuses a mean only if it comes
        directly from a loss function of PyTorch.
        """

    @abstractmethod
    def check_batch(self, batch: Any) -> None:
        """Check the shapes, dtypes and values of a batch. Called only before the first step, because it waits for the device.

        Raises:
            HyperionError: the batch does not have the expected form, which the message describes.
        """

    def train_step(self, batch: Any) -> StepMetrics:
        """Run the forward pass, the backward pass, clipping and the update. All ranks must call this method.

        Raises:
            HyperionError: the first batch does not have the expected form (see `check_batch`) or no items, a loss is no scalar
                with gradient, the first loss is visibly a mean, or DDP does not get a gradient of every parameter. Other
                exceptions of `check_batch`, `count_items` and `summed_loss` get a note that names the method, the step and the
                form of the batch.
        """
        if self.unchecked:
            self._call("check_batch", batch)
            items = _require_count(self._call("count_items", batch), self.ranks, f"{type(self).__name__}.count_items")
            self._expects_sum, self.unchecked = items > 1, False
        learning_rate = rate_of(self.schedule, self.steps + 1, type(self).__name__)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not self.model.training:  # train() visits all modules and takes as much host time as launching several kernels
            self.model.train()
        if not self.uncaptured and self._captured is None:
            self.uncaptured = _why_not_captured(batch, self.optimizer)
        if not self.uncaptured and self._captured is None:
            counters = (self._items_seen,)
            self._captured = CapturedStep(self._step, batch, self.model, self.optimizer, counters, self.device)
        # A batch with other shapes, such as the last batch of an epoch, runs without the graph.
        captured = self._captured if self._captured is not None and self._captured.fits(batch) else None
        metrics = self._step(batch) if captured is None else captured(batch, learning_rate)
        loss, norm, items, rank_loss, rank_items, skipped = metrics
        self._expects_sum = False
        self.steps += 1
        return StepMetrics(loss, norm, items, learning_rate, rank_loss, rank_items, skipped)

    def _call(self, method: str, batch: Any) -> Any:
        """Call a method that subclasses define. Its exceptions get a note that names the method, the step and the batch."""
        try:
            return getattr(self, method)(batch)
        except HyperionError:
            raise
        except Exception as error:
            error.add_note(f"raised in {type(self).__name__}.{method}, step {self.steps + 1}, batch {batch_form(batch)}")
            raise

    def _step(self, batch: Any) -> tuple[Tensor, ...]:
        """Run one step on the device with the learning rate that is stored in the optimizer's parameter groups.

        No operation waits for the device or reads a value from it, so that the step can be captured.
        """
        self.optimizer.zero_grad()  # a backward pass outside of a step, or a step that failed, may have left gradients
        rank_items = self._call("count_items", batch)
        finish_count = start_sum(rank_items, self.ranks)  # the ranks exchange this sum during the forward pass
        sums: list[Tensor] = []
        items = rank_items
        with self.precision.products():
            for index, (part, exchange) in enumerate(_micro_batches(batch, self.micro_batches, self.model)):
                with exchange:
                    with self.precision.autocast(self.device):
                        total = self._call("summed_loss", part)
                    require_loss(total, f"{type(self).__name__}.summed_loss")
                    if self._expects_sum:
                        require_no_mean(total, f"{type(self).__name__}.summed_loss")
                    if index == 0:
                        # Wait for the sum only here, because its exchange overlaps with the first forward pass.
                        items = finish_count()
                    share = total / items  # the mean over the whole batch is the sum of these shares over all parts and ranks
                    # DDP and FSDP average gradients over ranks. The gradient of the mean loss is the sum over ranks, so multiply
                    # by the number of ranks.
                    self.scaler.backward(share if self.ranks == 1 else share * self.ranks)
                sums.append(total.detach())
        if is_replicated(self.model):
            self._require_gradients()
        total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
        share = total / items
        self.scaler.unscale(self.optimizer)
        # Compute the norm after `unscale`. Before it, the norm would contain fp16's loss scale.
        norm, finish_loss = self._norm_and_loss(share)
        if math.isfinite(self.clip_norm):
            clip_gradients(self.model, self.clip_norm, norm)
        skipped = self.scaler.step(self.optimizer, norm)
        self.optimizer.zero_grad()
        self._items_seen += items
        loss = finish_loss()
        # Avoid a division by zero, because a rank's part of a batch may consist of padding only.
        rank_loss = loss if self.ranks == 1 else total / rank_items.clamp(min=1)
        return loss, norm, items, rank_loss, rank_items, skipped

    def _require_gradients(self) -> None:
        """Check that every parameter of a DDP model has a gradient. Otherwise DDP has not exchanged all gradients.

        PyTorch would raise an error only in the next forward pass, and this step would update the replicas differently.
        """
        held = (parameter for group in self.optimizer.param_groups for parameter in group["params"])  # faster than the modules
        if all(parameter.grad is not None for parameter in held if parameter.requires_grad):
            return
        # The optimizer may have parameters that the model does not have.
        idle = [name.removeprefix("module.") for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if not idle:
            return
        raise HyperionError(
            f"the loss does not depend on {len(idle)} parameters: {', '.join(idle[:5])}{', …' * (len(idle) > 5)}; DDP exchanges "
            "gradients only if every parameter has one",
            where=f"{type(self).__name__}, step {self.steps + 1}",
            next_step="freeze parameters that no step uses with requires_grad_(False) before `parallelize`, choose the strategy "
            "'fsdp', or make the loss depend on every parameter, for example with + 0 * parameter.sum()",
        )

    def _norm_and_loss(self, share: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the gradient norm of the whole batch, and a function that returns the loss of the whole batch."""
        norm = local_gradient_norm(self.model)
        if self.ranks == 1 or not is_sharded(self.model):  # each rank has the whole gradient
            return norm, start_sum(share, self.ranks)
        # The square of the whole norm is the sum of the squares of the shards' norms. The same collective also sums the loss.
        squared, loss = start_sum(torch.stack((norm.square(), share)), self.ranks)()
        return squared.sqrt(), lambda: loss

    def compare_ranks(self) -> None:
        """Raise DesyncError on all ranks if a replicated parameter differs between ranks. See `differing_parameters`."""
        assert_ranks_agree(self.model)

    def save(self, folder: Path) -> None:
        """Write the state of the model and the optimizer by parameter name. All ranks must call this method.

        Each rank writes its shards. The state can be loaded into the same model with any layout over ranks.

        Raises:
            NonFiniteError: a weight or an optimizer state is infinite or NaN. With several ranks the error is a
                CheckpointError. Nothing is written, because training could not resume from such a checkpoint.
        """
        average_statistics(self.model)  # a checkpoint stores buffers once, so they must be equal on all ranks
        state = self._state()
        advice = "nothing was saved; start again to resume from the previous checkpoint, or lower the learning rate"
        agreed(lambda: require_finite(state, f"after step {self.steps}", NonFiniteError, advice))
        write_sharded(folder, state)

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote on any number of ranks. All ranks must call this method.

        Raises:
            CheckpointError: a file is damaged, a number is not finite, or the state belongs to another model or optimizer.
                The error is raised on all ranks.
        """
        here = self._state()
        # PyTorch creates the state of all parameters. A parameter that had no gradient before the save has none in the folder.
        stored, moments = agreed(lambda: stored_tensors(folder)), here["optimizer"]["state"]
        for name, own in list(moments.items()):
            tensors = [f"optimizer/state/{name}/{key}" for key, value in own.items() if isinstance(value, Tensor)]
            if tensors and not any(tensor in stored for tensor in tensors):
                del moments[name]
        state = read_sharded(folder, here)
        # `read_sharded` has already changed the tensors of the model. If a check fails, `newest_good` loads an earlier
        # checkpoint.
        agreed(lambda: require_finite(state, folder, CheckpointError, EARLIER))
        agreed(lambda: _require_same_structure(state, here, folder))
        set_model_state_dict(self.model, state["model"])
        # How the optimizer runs is not part of its state: a fused update of whole tensors does not exist for shards.
        own = [{name: group[name] for name in _HOW if name in group} for group in self.optimizer.param_groups]
        with contextlib.nullcontext() if self._captured is None else same_tensors(self.optimizer):
            options = StateDictOptions(strict=False)  # for parameters without state
            set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
        for group, options in zip(self.optimizer.param_groups, own, strict=True):
            group.update(options)
        self.steps = state["steps"]
        # Change the tensor in place, because a captured graph adds to it.
        self._items_seen.fill_(state["items_seen"])
        self.scaler.load_state_dict(state["scaler"])

    def _state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "steps": self.steps,
            "items_seen": self.tokens_seen,
            "scaler": self.scaler.state_dict(),
        }


class LanguageEngine(TorchEngine):
    """Engine for language models. A batch is a pair (inputs_BT, targets_BT).

    Inputs are int32 or int64 token ids. Targets are int64 token ids or IGNORE_INDEX. Both have shape [B, T] and are on the
    device of the engine. `model(inputs_BT, targets_BT)` must return nll_BT, the negative log-likelihood of each target, as
    TransformerLM does. The model must not return a mean loss, because the engine divides the sum of nll_BT by the number of
    targets in the whole batch.
    """

    item = "token"

    def check_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        inputs_BT, targets_BT = two_tensors(batch, "inputs_BT, targets_BT", self.device)
        model: Any = self.model.module if is_replicated(self.model) else self.model
        with contextlib.suppress(ValueError):  # a compiled module may have no signature
            signature = inspect.signature(model.forward)
            try:
                signature.bind(inputs_BT, targets_BT)
            except TypeError as error:
                raise HyperionError(
                    f"{type(model).__name__}.forward{signature} does not take (inputs_BT, targets_BT): {error}",
                    where=type(self).__name__,
                    next_step="let model(inputs_BT, targets_BT) return the negative log-likelihood of each target [B, T], or "
                    "write a TorchEngine with your own summed_loss",
                ) from None
        shapes = f"inputs {tensor_form(inputs_BT)} and targets {tensor_form(targets_BT)}"
        if inputs_BT.ndim != 2 or inputs_BT.shape != targets_BT.shape:
            raise batch_error(shapes, "pass token ids of shape [B, T] for both; each target is the token that follows its input")
        if inputs_BT.dtype not in (torch.int32, torch.int64) or targets_BT.dtype != torch.int64:
            raise batch_error(shapes, "pass inputs as int32 or int64 token ids, and targets as int64 token ids")
        configs = (getattr(module, "config", None) for module in self.model.modules())
        vocabulary = next((size for config in configs if (size := getattr(config, "vocab_size", None))), None)
        scored_BT = targets_BT.masked_fill(targets_BT == IGNORE_INDEX, 0)
        least, most, least_target, most_target = value_range(inputs_BT) + value_range(scored_BT)
        for name, low, high in (("inputs", least, most), ("targets", least_target, most_target)):
            if low < 0 or (vocabulary is not None and high >= vocabulary):
                allowed = "0 .." if vocabulary is None else f"0 .. {vocabulary - 1}, the model's vocabulary"
                raise batch_error(
                    f"token ids of the {name} are from {low} to {high}, outside {allowed}",
                    f"tokenize with the model's tokenizer; set targets that are not scored to {IGNORE_INDEX}",
                )

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != IGNORE_INDEX).sum()

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs_BT, targets_BT = batch
        nll_BT = self.model(inputs_BT, targets_BT)
        require_nll(nll_BT, targets_BT)
        return nll_BT.sum()

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return the results of evaluate_language as a dict.

        Keys: 'loss' in nats per token, the ends 'loss_ci_low' and 'loss_ci_high' of its 95 % interval, 'perplexity_token', and
        the fields of `LanguageEvaluation`.
        """
        result = evaluate_language(self.model, batches, self.precision, self.device)
        low, high = result.interval
        shared = {"loss": result.loss, "loss_ci_low": low, "loss_ci_high": high, "perplexity_token": result.perplexity_token}
        return shared | asdict(result)


class ImageEngine(TorchEngine):
    """Engine for image classifiers. A batch is a pair (images_BCYX, labels_B).

    Images are normalized floating-point tensors of shape [B, C, Y, X]. Labels are int64 classes of shape [B]. Both are on the
    device of the engine. The engine converts weights and images to the format of `image_memory_format`.

    Args:
        model: module that maps images to logits [B, K]. All other arguments of TorchEngine follow.
        label_smoothing: probability, from 0 to below 1, that is distributed evenly over all classes in the training targets
            (as in torch.nn.CrossEntropyLoss).
    """

    item = "image"

    def check_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        images_BCYX, labels_B = two_tensors(batch, "images_BCYX, labels_B", self.device)
        first = next((module for module in self.model.modules() if isinstance(module, nn.Conv2d)), None)
        channels = None if first is None else first.in_channels
        last = images_BCYX.ndim == 4 and images_BCYX.shape[1] != channels == images_BCYX.shape[3]
        if images_BCYX.ndim != 4 or last:
            raise batch_error(
                f"images {tensor_form(images_BCYX)}, but the model takes [B, {channels or 'C'}, Y, X]",
                "put channels first: images.permute(0, 3, 1, 2) if they are [B, Y, X, C]",
            )
        if not images_BCYX.is_floating_point():
            raise batch_error(
                f"images are {tensor_form(images_BCYX)}, which is not a floating-point dtype",
                "pass normalised floating-point images: (images / 255 - mean) / deviation, as ImageBatches does",
            )
        if labels_B.shape != images_BCYX.shape[:1] or labels_B.dtype != torch.int64:
            raise batch_error(f"labels {tensor_form(labels_B)} for images {tensor_form(images_BCYX)}", ONE_CLASS_EACH)
        lowest, highest = value_range(images_BCYX)
        if (
            lowest >= 0 and highest > 100
        ):  # normalized values are a few standard deviations from 0, so values above 100 are not normalized
            raise batch_error(
                f"images have values from {lowest:g} to {highest:g}, so they seem to be bytes that are not normalised",
                "normalise images: (images / 255 - mean) / deviation, as ImageBatches does",
            )
        least, self._highest_label = value_range(labels_B)
        if least < 0:
            raise batch_error(f"a label is {least}", "number the classes from 0")

    def __init__(self, model: nn.Module, *args: Any, label_smoothing: float = 0.0, **kwargs: Any):
        require_number("label_smoothing", label_smoothing, "ImageEngine", at_least=0, below=1)
        self.label_smoothing, self._highest_label = label_smoothing, 0
        self._memory_format = image_memory_format(model)
        if not is_sharded(model):  # FSDP2 always gathers contiguous weights
            model = model.to(memory_format=self._memory_format)  # pyright: ignore[reportCallIssue] - a private overload
        super().__init__(model, *args, **kwargs)

    def count_items(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        labels_B = batch[1]
        # torch.full only launches a kernel. torch.tensor would copy from the host and wait for the device in every step.
        return torch.full((), len(labels_B), dtype=torch.int64, device=labels_B.device)

    def summed_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images_BCYX, labels_B = batch
        # A sharded model has contiguous weights. If the images were contiguous too, all activations would be contiguous.
        images_BCYX = images_BCYX.contiguous(memory_format=self._memory_format)
        logits_BK = self.model(images_BCYX).float()
        if logits_BK.ndim != 2 or logits_BK.shape[1] <= self._highest_label:
            raise batch_error(
                f"the model returned {tensor_form(logits_BK)}, but labels go up to {self._highest_label}",
                "build the model with at least as many classes as the labels have, and let it return logits of shape [B, K]",
            )
        return F.cross_entropy(logits_BK, labels_B, reduction="sum", label_smoothing=self.label_smoothing)

    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Return the results of evaluate_images as a dict: 'loss' in nats per image, 'accuracy', 'standard_error', 'images'."""
        return asdict(evaluate_images(self.model, batches, self.precision, self.device))


def _require_same_structure(state: dict[str, Any], here: dict[str, Any], folder: Path) -> None:
    """Raise a CheckpointError if the structure of a stored state differs from the structure of the current state `here`."""
    if state.get("scaler") and here["scaler"]:
        fault = difference(state, here)
    elif "scaler" not in state:
        fault = "scaler is missing"
    else:  # only one state has a loss scale; LossScaler.load_state_dict then reports that the precisions differ
        fault = difference({**state, "scaler": {}}, {**here, "scaler": {}})
        fault = fault or ("" if isinstance(state["scaler"], dict) else "scaler is not an object")
    for name in ("steps", "items_seen"):
        if not fault and (type(state[name]) is not int or not 0 <= state[name] < 2**63):
            fault = f"{name} is {state[name]!r}"
    if fault:
        raise mismatch(fault, folder)


def keep_freed_memory() -> bool:
    """Make the C library reuse large freed buffers instead of returning them to the operating system.

    By default glibc maps new memory for every buffer of 32 MiB or more, and the operating system fills it with zeros page by
    page. A step of the small language model has logits of 206 MB. It takes 0.34 s with this call and 0.66 s without it (fp32,
    1024 tokens, 2 cores). With this call the process holds its peak memory until it ends.

    Returns:
        True if the call was successful. It needs glibc.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's <malloc.h>
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def _micro_batches(batch: Any, count: int, model: nn.Module) -> Iterator[tuple[Any, AbstractContextManager]]:
    """Split a batch into `count` parts of nearly equal length. Yield pairs (part, context manager).

    The forward and the backward pass of a part must run inside its context manager, so that ranks exchange gradients only in
    the last part.

    Args:
        batch: tensors of shape [B, ...] with the same B, in a tuple, a list, a dict or a nesting of these.

    Raises:
        HyperionError: the batch has another form, or fewer than `count` examples.
    """
    if count == 1:
        yield batch, contextlib.nullcontext()
        return
    tensors, form = tree_flatten(batch)
    rows = {len(tensor) if isinstance(tensor, Tensor) and tensor.ndim else None for tensor in tensors}
    if None in rows or len(rows) != 1:
        raise HyperionError(
            f"the batch {batch_form(batch)} cannot be split into {count} parts",
            where="gradient accumulation",
            next_step="pass tensors of the same length in a tuple, a list or a dict, or use micro_batches=1",
        )
    if (examples := len(tensors[0])) < count:
        raise HyperionError(
            f"a batch of {examples} examples cannot be split into {count} parts",
            where="gradient accumulation",
            next_step="use a larger batch or fewer micro-batches; drop the last batch of an epoch if it has fewer examples",
        )
    # tensor_split allows parts whose lengths differ by one.
    split = zip(*(tensor.tensor_split(count) for tensor in tensors), strict=True)
    parts = [tree_unflatten(part, form) for part in split]
    for part in parts[:-1]:
        # Gradients are sums, so exchanging the accumulated gradient once gives the same result as an exchange of each part.
        yield part, without_exchange(model)
    yield parts[-1], contextlib.nullcontext()


def _require_count(count: Any, ranks: int, where: str) -> int:
    """Check and return the number of items of the first batch on all ranks.

    All ranks must call this function, which waits for the device.
    """
    if not isinstance(count, Tensor) or count.ndim or count.dtype not in (torch.int64, torch.int32):
        raise HyperionError(
            f"the number of items is {returned(count)}, and not an int64 tensor of shape []",
            where=where,
            next_step="return torch.full((), count, dtype=torch.int64, device=…), or the sum of a mask",
        )
    total = int(start_sum(count, ranks)())
    if total < 1:
        raise HyperionError(
            f"the number of items in the first batch is {total}, so the batch has no mean loss",
            where=where,
            next_step="count the terms of the sum that summed_loss returns, and skip batches that have none",
        )
    return total


def _why_not_captured(batch: Any, optimizer: torch.optim.Optimizer) -> str:
    """Return the reason why steps with this batch and this optimizer cannot be captured as a graph, or "" if they can."""
    if not isinstance(batch, tuple | list) or not all(isinstance(part, Tensor) for part in batch):
        return "the batch is no tuple of tensors, whose values a graph could replace"
    kind = type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return f"a graph needs new optimizer state that is all zeros, which is not known of {kind.__name__}"
    if any(group.get("dampening") for group in optimizer.param_groups):
        return (
            "a graph needs new optimizer state that is all zeros, but the first step of SGD with dampening differs from the next"
        )
    if kind is not torch.optim.SGD and not all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return f"{kind.__name__} counts its steps on the host unless it has fused=True or capturable=True"
    return ""
