"""Training loop, which runs and measures the steps of an Engine, evaluates the model, saves checkpoints and resumes.

The loop does not depend on the model, its wrapper or the optimizer. Losses remain on the device and are read for several steps at
once (see Pulse). When losses are read, the ranks also agree whether to stop. Every few steps, the ranks compare their replicas.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch.utils._pytree import tree_leaves

from hyperion.checkpoints import agreed, checkpoint_path, gathered, newest_good, rank_and_size, require_writable, sole_use
from hyperion.checkpoints.states import to_tree
from hyperion.errors import HyperionError, require_number
from hyperion.parallel import DesyncError
from hyperion.training.clocks import EpochMeter, Interrupted, Pulse, StopFlag
from hyperion.training.engine import Engine, NonFiniteError, StepMetrics, TorchEngine
from hyperion.training.evaluate import evaluating
from hyperion.training.rank_data import require_equal_lengths, require_own_parts
from hyperion.training.recipe import rng_state, seed_rank, set_rng_state
from hyperion.training.snapshots import is_finite, non_finite, read_run, write_run

# On one rank, losses are read before their batches need more than this.
MOST_HELD_BYTES = 64 << 20


@dataclass(frozen=True)
class TrainingPlan:
    """How long to train, and when to evaluate and save.

    Attributes:
        epochs: number of passes over the training data. Set either `epochs` or `steps`.
        steps: number of optimizer steps.
        evaluate_every: number of epochs between evaluations. An evaluation always follows the last epoch.
        checkpoint_every: number of steps between checkpoints. With None, a checkpoint is saved only at the end and when
            SIGTERM stops training.
        keep: number of checkpoints to keep.
        compare_ranks_every: number of steps between comparisons of the ranks' replicated parameters. These are also compared
            before each checkpoint and at the end. A comparison broadcasts them once, outside the timed part of an epoch.
    """

    epochs: int | None = None
    steps: int | None = None
    evaluate_every: int = 1
    checkpoint_every: int | None = None
    keep: int = 2
    compare_ranks_every: int = 100

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise HyperionError(
                "give either epochs or steps", where="TrainingPlan", next_step="for example TrainingPlan(epochs=3)"
            )
        for name in ("epochs", "steps", "evaluate_every", "checkpoint_every", "keep", "compare_ranks_every"):
            if (value := getattr(self, name)) is not None:
                require_number(name, value, "TrainingPlan", whole=True, at_least=1)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole plan."""
        return self.steps if self.steps is not None else (self.epochs or 0) * steps_per_epoch


class Batches(Protocol):
    """Interface of a loader that can resume. Iterating yields the rest of the current epoch, or the next epoch at its end."""

    def __len__(self) -> int:
        """Return the number of batches in a complete epoch."""
        ...

    def __iter__(self) -> Iterator: ...

    def state_dict(self) -> dict:
        """Return the position after the last yielded batch, as tensors and JSON values. It must be the same on all ranks."""
        ...

    def load_state_dict(self, state: dict) -> None: ...


@dataclass(frozen=True)
class EpochRecord:
    """Results of one epoch, for one rank or over all ranks.

    An epoch is one pass over the training data. The last epoch may be shorter, because training stops after the number of steps
    in the plan.

    Attributes:
        epoch: number of the epoch, from 1.
        step: number of optimizer steps of the whole run at the end of the epoch.
        steps: number of optimizer steps in this epoch.
        loss: mean training loss of the steps per item, in nats for LanguageEngine and ImageEngine.
        learning_rate: learning rate of the last step.
        items: number of items, without padding.
        time_s: wall time of the timed steps in seconds. It includes the time for loading batches, but not evaluations and
            checkpoints. The device is synchronized at the start and at the end.
        timed_steps: number of steps in `time_s`. The first steps of a process are warm-up and are not timed.
        items_per_s: items of the timed steps divided by `time_s`; None if no step was timed.
        peak_memory_metric: 'peak_memory_gib' for the tensors on an accelerator, 'peak_rss_gib' for the whole process on a
            CPU.
        peak_memory_gib: peak memory of the steps in GiB; None if the system does not report it.
        evaluation: metrics on the held-out split after the epoch, the same on all ranks; None if there was no evaluation.
        waited_s: part of `time_s` in which the loop waited for the loader, in seconds. On an accelerator only the host waits, and
            the device may still compute during this time.
        rank: number of the rank to which the loss, the items and the times belong. If the run was resumed on another number of
            ranks during the epoch, the record contains only the steps after the resume. None if the record covers all ranks: the
            loss is then that of the whole batches, the items are summed over the ranks, and the times and the memory are the
            largest values of any rank.
        reserved_memory_gib: peak memory in GiB that the allocator of the accelerator holds during the steps; None on a CPU.
        wall_s: wall time of all steps in seconds, warm-up steps included. Like `time_s`, it includes the time for loading
            batches, but not evaluations and checkpoints.
    """

    epoch: int
    step: int
    steps: int
    loss: float
    learning_rate: float
    items: int
    time_s: float
    timed_steps: int
    items_per_s: float | None
    peak_memory_metric: str
    peak_memory_gib: float | None
    evaluation: dict[str, float] | None
    rank: int | None = None
    waited_s: float = 0.0
    reserved_memory_gib: float | None = None
    wall_s: float = 0.0

    @property
    def waiting_share(self) -> float | None:
        """Fraction of `time_s` in which the loop waited for the loader; None if no step was timed."""
        return self.waited_s / self.time_s if self.timed_steps else None


@dataclass
class History:
    """Losses and epochs of a run, including the parts before an interruption. The history is the same on every rank.

    Attributes:
        item: the unit in which the engine counts items, such as 'token', 'image' or 'sample'.
        losses: training loss of each optimizer step, over the batch of all ranks.
        epochs: one record per epoch, over all ranks.
        resumed_at: steps at which the run resumed from a checkpoint.
        rank_epochs: one record per epoch and rank, ordered by epoch, then by rank. If all ranks have the same number of items
            in each step, the loss of an epoch is equal to `mean_over_ranks` of its records.
    """

    item: str
    losses: list[float] = field(default_factory=list)
    epochs: list[EpochRecord] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    rank_epochs: list[EpochRecord] = field(default_factory=list)

    def add_epoch(
        self, parts: Sequence[EpochRecord], loss: float, earlier_items: int, evaluation: dict[str, float] | None
    ) -> EpochRecord:
        """Add an epoch, and return its record over all ranks.

        Args:
            parts: records of the single ranks.
            loss: mean of the losses of the steps over the batches of all ranks.
            earlier_items: number of items of this epoch that are in no record, because they were processed before the run
                was resumed on another number of ranks.
            evaluation: metrics on the held-out split.

        Returns:
            The record over all ranks.
        """
        self.rank_epochs.extend(parts)
        time_s = max(part.time_s for part in parts)
        # Items of each rank, divided by the time of the slowest rank.
        rates = [part.items_per_s * (part.time_s / time_s) for part in parts if part.items_per_s is not None]
        whole = replace(
            parts[0],
            rank=None,
            steps=parts[0].step - (self.epochs[-1].step if self.epochs else 0),
            loss=loss,
            items=earlier_items + sum(part.items for part in parts),
            time_s=time_s,
            waited_s=max(part.waited_s for part in parts),
            wall_s=max(part.wall_s for part in parts),
            items_per_s=math.fsum(rates) if len(rates) == len(parts) else None,
            peak_memory_gib=_largest([part.peak_memory_gib for part in parts]),
            reserved_memory_gib=_largest([part.reserved_memory_gib for part in parts]),
            evaluation=evaluation,
        )
        self.epochs.append(whole)
        return whole

    def state_dict(self) -> dict:
        """Return the state for a checkpoint. Losses are stored exactly, as float64."""
        return {
            "item": self.item,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "epochs": [asdict(record) for record in self.epochs],
            "resumed_at": self.resumed_at,
            "rank_epochs": [asdict(record) for record in self.rank_epochs],
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> "History":
        """Create a history from the result of `state_dict`."""
        epochs, rank_epochs = ([EpochRecord(**record) for record in state[key]] for key in ("epochs", "rank_epochs"))
        return cls(state["item"], state["losses"].tolist(), epochs, list(state["resumed_at"]), rank_epochs)


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value, or None if any value is None, which means unknown."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def mean_over_ranks(parts: Sequence[EpochRecord]) -> float:
    """Return the mean loss over the records of all ranks for one epoch. Each record is weighted by its number of items."""
    return math.fsum(part.loss * part.items for part in parts) / sum(part.items for part in parts)


def train(
    engine: Engine,
    batches: Batches,
    plan: TrainingPlan,
    *,
    validation: Callable[[], Iterable] | None = None,
    folder: Path | None = None,
    on_epoch: Sequence[Callable[[EpochRecord], object]] = (),
    report: Callable[[int, int, str], object] = lambda done, total, note: None,
) -> History:
    """Train according to the plan. If `folder` contains a checkpoint, resume from the newest valid one.

    With several ranks, all ranks must call this function. The engine and the loader of a rank process the part of each batch
    that belongs to this rank. All other arguments must be the same on all ranks. Only rank 0 calls `report` and `on_epoch`.
    Each rank has its own random numbers.

    If a run is resumed on the same number of ranks, its results are bitwise equal to those of a run without interruption. If it
    is resumed on another number of ranks, the loader continues at the same position, but random generators get new seeds. Losses
    then agree up to rounding, unless the model uses random numbers such as dropout. A warning on stderr reports the change of
    the number of ranks.

    Args:
        engine: engine that runs the steps.
        batches: loader of the training data.
        plan: how long to train, and when to evaluate and save.
        validation: function that returns a new iterable of held-out batches for engine.evaluate.
        folder: folder for the checkpoints of this run, which all ranks share. With None no checkpoint is saved, and the plan must
            not ask for any.
        on_epoch: functions called with the record of each epoch.
        report: function called with (steps done, total steps, message with the last loss) whenever losses are read.

    Returns:
        The history of the whole run, including the parts before an interruption. It is the same on all ranks.

    Raises:
        NonFiniteError: a loss or a gradient of a step, the loss of an evaluation, or a weight to be saved is not finite. For
            a step, the error names the file with its batch. The error is raised on all ranks.
        Interrupted: a rank received SIGTERM. The exit_code of the error is 75. If `folder` is given, the state was saved. All
            ranks stop. A single process stops after the current step. Several ranks stop after the same step, when losses are
            read next.
        HyperionError: the engine, the loader, `validation` or a callback does not have a method that the run needs, the plan
            asks for checkpoints but there is no folder, the loaders of the ranks have different lengths, or two ranks of a
            TorchEngine got the same first batch. The error is raised before the first step. After an evaluation: there were no
            held-out batches, or the ranks have different ones.
        DesyncError: a replicated parameter differs between ranks. The error is raised on all ranks. It names the parameter and
            the steps between which the ranks diverged.
        CheckpointError: no checkpoint in the folder can be used, or a checkpoint cannot be written. Before the first step, the
            error is also raised if the folder is not writable, if another training uses it, or if the state of the loader cannot
            be stored.
    """
    with StopFlag() as stop:
        return _Run(engine, batches, plan, validation, folder, on_epoch, stop, report).run()


class _Run:
    """State of one call of `train` on one rank: its arguments, and the values that change during training."""

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        plan: TrainingPlan,
        validation: Callable[[], Iterable] | None,
        folder: Path | None,
        on_epoch: Sequence[Callable[[EpochRecord], object]],
        stop: StopFlag,
        report: Callable[[int, int, str], object],
    ):
        self.rank, self.ranks = rank_and_size()
        self.engine, self.batches, self.plan = engine, batches, plan
        self.validation, self.folder, self.stop = validation, folder, stop
        self.on_epoch, self.report = (on_epoch, report) if self.rank == 0 else ((), lambda done, total, note: None)
        agreed(self.check_arguments)
        require_equal_lengths("the loader", batches, "train")
        self.total_steps = plan.total_steps(len(batches))
        self.history = History(engine.item)
        self.pulse = Pulse(engine.device)
        self.seed = torch.initial_seed()
        self.step = self.steps_in_epoch = self.saved_at = self.compared_at = 0
        self.learning_rate = 0.0
        self.stopping = False  # True if the ranks have agreed to stop
        self.evaluated = 0  # number of held-out batches evaluated so far
        # Other engines may have ranks that must get the same batch, such as those of tensor parallelism.
        self.compare_batches = isinstance(engine, TorchEngine) and engine.ranks > 1
        self.begin_epoch()
        # Metrics of the steps whose losses have not been read from the device yet, with the batches of these steps.
        self.unread: list[tuple[StepMetrics, Any]] = []

    def check_arguments(self) -> None:
        """Check the arguments of the run before the first step.

        Raises:
            HyperionError: an argument does not have a method that this run needs, or cannot be called.
            CheckpointError: the state of the loader cannot be stored.
        """
        saves = ("state_dict", "load_state_dict") if self.folder is not None else ()
        if not isinstance(self.plan, TrainingPlan):
            raise HyperionError(
                f"the plan is {self.plan!r:.80}", where="train", next_step="pass TrainingPlan(steps=…) or TrainingPlan(epochs=…)"
            )
        if not isinstance(self.folder, str | Path | None):
            raise HyperionError(
                f"the folder is {self.folder!r:.80}",
                where="train",
                next_step="pass the path of a folder, or None to save nothing",
            )
        if self.plan.checkpoint_every is not None and self.folder is None:
            raise HyperionError(
                f"the plan saves a checkpoint every {self.plan.checkpoint_every} steps, but there is no folder for them",
                where="train",
                next_step="pass folder=…, or leave checkpoint_every out of the plan to save nothing",
            )
        if not isinstance(getattr(self.engine, "item", None), str):
            raise HyperionError(
                f"the engine, a {type(self.engine).__name__}, has no attribute item",
                where="train",
                next_step='name what a batch contains, for example item = "sample"',
            )
        for name, part, methods in (
            ("the engine", self.engine, ("train_step", "evaluate", "compare_ranks", "save", "load")),
            ("the loader", self.batches, ("__len__", "__iter__", *saves)),
        ):
            if missing := [method for method in methods if not callable(getattr(part, method, None))]:
                raise HyperionError(
                    f"{name}, a {type(part).__name__}, has no {' and no '.join(missing)}",
                    where="train",
                    next_step="use torchdata.stateful_dataloader.StatefulDataLoader (pip install torchdata), which takes the "
                    "arguments of torch.utils.data.DataLoader, with generator=torch.Generator(); or "
                    "hyperion.data.batches.LanguageBatches, hyperion.data.images.device_images.ImageBatches or no folder"
                    if part is self.batches
                    else "use a LanguageEngine, an ImageEngine or your own TorchEngine",
                )
        if len(self.batches) < 1:
            raise HyperionError("the loader has no batch", where="train", next_step="use a smaller batch size or more data")
        functions = [("validation", self.validation), ("report", self.report), *(("on_epoch", f) for f in self.on_epoch)]
        for name, function in functions:
            if function is not None and not callable(function):
                raise HyperionError(
                    f"{name} is a {type(function).__name__}, which cannot be called",
                    where="train",
                    next_step=f"pass a function, for example {name}=lambda: batches"
                    if name == "validation"
                    else f"pass functions as {name}",
                )
        if self.folder is not None:
            to_tree({"batches": self.batches.state_dict()}, {}, torch.Tensor.detach)

    def begin_epoch(self, warmed_up: bool = False) -> None:
        """Reset all values that are measured per epoch."""
        self.meter = EpochMeter(self.engine.device, warmed_up)
        self.rank_losses: list[float] = []
        self.earlier_items = 0  # items that this epoch had before a resume on another number of ranks
        self.steps_in_epoch = 0

    def run(self) -> History:
        if self.folder is None:
            return self.run_to_the_end()
        require_writable(self.folder)
        with sole_use(self.folder):
            return self.run_to_the_end()

    def run_to_the_end(self) -> History:
        self.restore()
        # `steps_in_epoch` is not 0 if a run was stopped between the last step of an epoch and its evaluation. Then no batch is
        # left, but the epoch must be finished.
        while self.step < self.total_steps or self.steps_in_epoch:
            self.train_epoch()
            self.finish_epoch()
        if self.folder is not None and self.saved_at != self.step:
            self.save()
        self.compare_ranks()
        # A stop request that arrived during the last save still raises Interrupted, so that the exit code confirms it to the
        # batch system.
        self.stopping, _ = self.pulse.agree(self.stop.requested, False, 0)
        if self.stopping:
            self.save_and_stop()
        return self.history

    def train_epoch(self) -> None:
        """Train on the remaining batches of the epoch. There are none if the run was interrupted after the epoch's last step."""
        # Every step takes one batch. In its epoch, the loader may have given more batches than `steps_in_epoch`. This happens if
        # an earlier run ended and was recorded in the middle of an epoch, and a longer plan continues from there.
        given = self.step % len(self.batches)
        left = min(len(self.batches) - given, self.total_steps - self.step)
        if left == 0 or (given == 0 and self.steps_in_epoch):
            return
        self.start_clocks()
        waiting = self.meter.waiting(self.batches)
        for batch in waiting:
            if self.compare_batches:
                require_own_parts(batch, f"step {self.step + 1}")
                self.compare_batches = False
            metrics = self.engine.train_step(batch)
            self.meter.count(metrics.rank_items)
            self.unread.append((metrics, batch))
            self.learning_rate = metrics.learning_rate
            self.step += 1
            self.steps_in_epoch += 1
            left -= 1
            if len(self.unread) >= self.pulse.steps or self.holds_too_much(batch):
                self.read_losses()
                self.report(self.step, self.total_steps, f"loss {self.history.losses[-1]:.4f}")
            if self.stopping or (self.ranks == 1 and self.stop.requested):
                self.end_of_epoch(waiting)
                self.save_and_stop()
            # At the end of an epoch, `finish_epoch` saves after the evaluation, so that the checkpoint contains its result.
            if left and self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
                self.save()
                self.start_clocks()
            elif left and self.step % self.plan.compare_ranks_every == 0:
                self.meter.pause()
                self.compare_ranks()
                self.start_clocks()
            if left == 0:
                break
        self.meter.pause()
        self.end_of_epoch(waiting)
        if left:
            raise HyperionError(
                f"the loader ended {left} batches before the end of the epoch",
                where=f"step {self.step}",
                next_step="make len() of the loader equal to the number of batches that it yields",
            )

    def holds_too_much(self, batch: Any) -> bool:
        """Return True if the batches whose losses were not read yet need more than `MOST_HELD_BYTES`.

        They are kept for `non_finite`, which writes the batch of a loss that is not finite to a file. Several ranks must read
        their losses after the same step, whatever the sizes of their batches, so this limit applies to one rank only.
        """
        if self.ranks > 1:
            return False
        size = sum(part.nbytes for part in tree_leaves(batch) if isinstance(part, torch.Tensor))
        return size * len(self.unread) > MOST_HELD_BYTES

    def end_of_epoch(self, waiting: Iterator) -> None:
        """Let the loader notice that its epoch has ended, if it has.

        A loader stores its position. Some loaders, such as torchdata's StatefulDataLoader, begin the next epoch only if their
        iterator was asked for one more batch. With the position before, a resumed run would get an empty epoch.

        Raises:
            HyperionError: the loader yields one more batch, which no step would use.
        """
        if self.step % len(self.batches) == 0 and sum(1 for _ in islice(waiting, 1)):
            raise HyperionError(
                f"the loader has more batches than its len() of {len(self.batches)}, and they would never be used",
                where=f"step {self.step}",
                next_step="make len() of the loader equal to the number of batches that it yields",
            )

    def start_clocks(self) -> None:
        self.meter.start()
        self.pulse.start()

    def finish_epoch(self) -> None:
        """Evaluate if the plan requires it, record the epoch, and save if a checkpoint is due."""
        self.read_losses()
        if self.stopping:
            self.save_and_stop()
        number = len(self.history.epochs) + 1
        last = self.step >= self.total_steps
        evaluation = None
        if self.validation is not None and (last or number % self.plan.evaluate_every == 0):
            evaluation = self.evaluate(self.validation)
        part = EpochRecord(
            epoch=number,
            step=self.step,
            steps=len(self.rank_losses),
            loss=_mean(self.rank_losses),
            learning_rate=self.learning_rate,
            evaluation=None,
            rank=self.rank,
            **self.meter.results(),
        )
        loss = _mean(self.history.losses[self.step - self.steps_in_epoch :])
        record = self.history.add_epoch(gathered(part), loss, self.earlier_items, evaluation)
        # Begin the new epoch before the save, so that a run that resumes from this checkpoint starts with an empty epoch.
        self.begin_epoch(warmed_up=True)
        for callback in self.on_epoch:
            callback(record)
        if self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
            self.save()

    def evaluate(self, validation: Callable[[], Iterable]) -> dict[str, float]:
        """Return the metrics on the held-out data.

        Raises:
            Interrupted: a rank received SIGTERM. The state was saved first.
            NonFiniteError: the loss is not finite.
            HyperionError: `validation` returned no batches, the engine no loss, or the ranks have different batches or losses.
        """
        held_out = validation()
        if not isinstance(held_out, Iterable):
            raise HyperionError(
                f"validation returned {held_out!r:.80}, which is no iterable of batches",
                where=f"evaluation after step {self.step}",
                next_step="return a loader or a list of batches, for example validation=lambda: batches",
            )
        require_equal_lengths("the validation loader", held_out, f"evaluation after step {self.step}")
        model = getattr(self.engine, "model", None)
        try:
            # An engine of one's own may forget model.eval(). Its evaluation would then change the running statistics.
            with evaluating(model) if isinstance(model, torch.nn.Module) else nullcontext():
                evaluation = self.engine.evaluate(self.held_out_batches(held_out))
        except Interrupted:
            self.save_and_stop()
        except HyperionError:
            raise
        except Exception as error:
            error.add_note(f"raised in {type(self.engine).__name__}.evaluate, after step {self.step}")
            raise
        if not isinstance(evaluation, dict) or not isinstance(evaluation.get("loss"), int | float):
            raise HyperionError(
                f"{type(self.engine).__name__}.evaluate returned {evaluation!r:.80}, and not a dict with a number 'loss'",
                where=f"evaluation after step {self.step}",
                next_step='return {"loss": float(mean_loss)}, and more metrics if you like',
            )
        losses = gathered(float(evaluation["loss"]))
        if bad := [loss for loss in losses if not math.isfinite(loss)]:
            raise NonFiniteError(
                f"evaluation after step {self.step}: loss {bad[0]}; training stopped",
                where=self.folder,
                next_step="start again to resume from the previous checkpoint; if this happens again, check the held-out data",
            )
        # Sums in another order may differ in the last bits.
        if different := [rank for rank, loss in enumerate(losses) if not math.isclose(loss, losses[0], rel_tol=1e-3)]:
            raise HyperionError(
                f"{type(self.engine).__name__}.evaluate returned the loss {losses[0]:g} on rank 0, but {losses[different[0]]:g} "
                f"on rank {different[0]}",
                where=f"evaluation after step {self.step}",
                next_step="make validation yield the same batches on all ranks, or compute the loss from sums over the ranks",
            )
        return evaluation

    def held_out_batches(self, held_out: Iterable) -> Iterator:
        """Yield the held-out batches.

        Raises:
            Interrupted: a rank received SIGTERM.
            HyperionError: there is no batch.
        """
        before = self.evaluated
        yield from self.stop.watch(held_out, self.must_stop_evaluation)
        if self.evaluated == before:
            raise HyperionError(
                "validation returned no batches",
                where=f"evaluation after step {self.step}",
                next_step="return a new loader or a list in each call, because an iterator is empty after its first use; if the "
                "loader is new, make its split larger",
            )

    def must_stop_evaluation(self) -> bool:
        """Return True if the evaluation must stop. Called before each held-out batch.

        With several ranks, the ranks agree once every `pulse.steps` batches, so that all of them stop before the same batch.
        """
        self.evaluated += 1
        if self.ranks > 1 and self.evaluated % self.pulse.steps:
            return False
        self.stopping, _ = self.pulse.agree(self.stop.requested, False, self.pulse.steps)
        return self.stopping

    def read_losses(self) -> None:
        """Read the losses of all steps since the last call. With several ranks, also agree whether to stop.

        Raises:
            NonFiniteError: a loss or a gradient is not finite. The error names the first step with such a value, and the file
                with its batch.
        """
        if not self.unread:
            return
        steps = [step for step, _ in self.unread]
        losses, norms, rank_losses, skipped = (
            torch.stack([getattr(step, name) for step in steps]) for name in ("loss", "gradient_norm", "rank_loss", "skipped")
        )
        # If the fp16 gradients of a step overflowed, the update was skipped and the loss scale was halved. This is not an error,
        # so ignore the gradient norm of the step.
        # All numbers of all unread steps are transferred to the host at once.
        numbers = torch.stack((losses, norms.masked_fill(skipped, 0.0), rank_losses), dim=1).tolist()
        bad = not all(map(is_finite, numbers))
        # Agree before an error is raised. If only one rank raised it, the other ranks would wait in their next collective.
        self.stopping, any_bad = self.pulse.agree(self.stop.requested, bad, len(numbers))
        if any_bad:
            first = self.step - len(numbers) + 1
            raise non_finite(self.folder, first, numbers, [batch for _, batch in self.unread])
        self.history.losses += [loss for loss, _, _ in numbers]
        self.rank_losses += [loss for _, _, loss in numbers]
        self.unread.clear()

    def compare_ranks(self) -> None:
        """Check that the replicated parameters are equal on all ranks.

        Raises:
            DesyncError: a parameter differs. The error is raised on all ranks.
        """
        if self.compared_at == self.step:
            return
        try:
            self.engine.compare_ranks()
        except DesyncError as error:
            equal = f"; all parameters were equal after step {self.compared_at}" if self.compared_at else ""
            raise DesyncError(
                f"after step {self.step}, {error.what}{equal}", where=error.where, next_step=error.next_step
            ) from None
        self.compared_at = self.step

    def save_and_stop(self) -> NoReturn:
        """Save a checkpoint if there is a checkpoint folder, and raise Interrupted."""
        if self.folder is None:
            raise Interrupted(
                f"stopped by SIGTERM after step {self.step}; nothing was saved, because there is no checkpoint folder",
                next_step="pass a checkpoint folder to save the state",
            )
        self.save()
        raise Interrupted(
            f"stopped by SIGTERM after step {self.step} of {self.total_steps}; the state was saved",
            where=checkpoint_path(self.folder, self.step),
            next_step="start the same command again to resume from this step",
        )

    def save(self) -> None:
        """Save a checkpoint with all values that the rest of the run needs."""
        self.meter.pause()
        self.read_losses()
        if self.folder is None:
            return
        # Compare before each save. A checkpoint contains the replica of one rank only, so it would hide that another rank has
        # diverged.
        self.compare_ranks()
        shared = {
            "steps_in_epoch": self.steps_in_epoch,
            "learning_rate": self.learning_rate,
            "history": self.history.state_dict(),
            "batches": self.batches.state_dict(),
            "seed": self.seed,
            "items_in_epoch": self.earlier_items + sum(gathered(self.meter.results()["items"])),
        }
        own = {
            "rng": rng_state(),
            "meter": self.meter.state_dict(),
            "losses": self.rank_losses,
            "earlier_items": self.earlier_items,
        }
        write_run(Path(self.folder), self.step, self.plan.keep, self.engine, shared, own)
        self.saved_at = self.step

    def restore(self) -> None:
        """Resume from the newest valid checkpoint, if any."""
        checkpoint = None
        if self.folder is not None:
            checkpoint = newest_good(self.folder, lambda path: read_run(path, self.engine, self.total_steps))
        if checkpoint is None:
            if self.ranks > 1:
                seed_rank(self.seed, self.step, self.rank)
            return
        shared, own = checkpoint
        self.batches.load_state_dict(shared["batches"])
        self.step, self.steps_in_epoch = shared["step"], shared["steps_in_epoch"]
        self.learning_rate, self.seed = shared["learning_rate"], shared["seed"]
        self.saved_at = self.compared_at = self.step
        self.history = History.from_state_dict(shared["history"])
        self.history.resumed_at.append(self.step)
        if own is None:
            self.earlier_items = shared["items_in_epoch"]
            self.change_ranks(shared["ranks"])
        else:
            self.rank_losses, self.earlier_items = own["losses"], own["earlier_items"]
            self.meter.load_state_dict(own["meter"])
            set_rng_state(own["rng"])

    def change_ranks(self, before: int) -> None:
        """Set new random seeds on each rank after a change of the number of ranks, and print a warning.

        The stored state of each rank cannot be used, because it was saved with another number of ranks.
        """
        seed_rank(self.seed, self.step, self.rank)
        if self.rank == 0:
            print(
                f"WARNING: the checkpoint of step {self.step} was saved on {before} rank(s) and is resumed on {self.ranks}. "
                "Random generators get new seeds from (seed, step, rank). The next losses agree with those of a run without "
                "interruption up to rounding, unless the model uses random numbers, such as dropout.",
                file=sys.stderr,
            )


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses)
