"""The training loop: it drives an Engine over batches, measures, evaluates, saves and resumes.

It knows no optimizer, wrapper or model. Losses stay on the device and are read every SYNC_STEPS steps at once.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hyperion.checkpoints import CheckpointError, checkpoint_path, newest_good, read_state, saving, verify, write_state
from hyperion.errors import HyperionError
from hyperion.training.engine import Engine, StepMetrics
from hyperion.training.history import EpochRecord, History
from hyperion.training.meter import EpochMeter
from hyperion.training.seeds import rng_state, set_rng_state
from hyperion.training.signals import Interrupted, StopFlag

SYNC_STEPS = 20


class NonFiniteError(HyperionError):
    """A loss or gradient that is infinite or no number."""


class Batches(Protocol):
    """A resumable loader: each iteration yields what is left of an epoch (or a whole next one where nothing is
    left).
    """

    def __len__(self) -> int:
        """Batches of a whole epoch."""

    def __iter__(self) -> Iterator: ...

    def state_dict(self) -> dict:
        """Position after the batch that was yielded last: tensors and JSON values."""

    def load_state_dict(self, state: dict) -> None: ...


@dataclass(frozen=True)
class Plan:
    """How long to train, and when to look.

    Attributes:
        epochs: passes over the loader; or
        steps: optimizer steps (exactly one of the two is given).
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        checkpoint_every: steps between checkpoints; None saves only when told to stop, and at the end.
        keep: checkpoints kept.
    """

    epochs: int | None = None
    steps: int | None = None
    evaluate_every: int = 1
    checkpoint_every: int | None = None
    keep: int = 2

    def __post_init__(self):
        if (self.epochs is None) == (self.steps is None):
            raise HyperionError(
                "give epochs or steps, one of them", where="Plan", next_step="for example Plan(epochs=3)"
            )
        for name in ("epochs", "steps", "evaluate_every", "checkpoint_every", "keep"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise HyperionError(f"{name} is {value}", where="Plan", next_step="give 1 or more")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole plan."""
        return self.steps if self.steps is not None else self.epochs * steps_per_epoch


def train(
    engine: Engine,
    batches: Batches,
    plan: Plan,
    *,
    validation: Callable[[], Iterable] | None = None,
    folder: Path | None = None,
    on_epoch: Sequence[Callable[[EpochRecord], object]] = (),
    report: Callable[[int, int, str], object] = lambda done, total, note: None,
) -> History:
    """Train as planned; resume when `folder` holds a checkpoint, with the same losses as an uninterrupted run.

    Args:
        validation: makes a fresh iterable of held-out batches for engine.evaluate.
        folder: of this run's checkpoints; None saves nothing.
        on_epoch: called with each epoch's record.
        report: told (steps done, steps in all, the newest loss) whenever losses are read.

    Returns:
        The history of the whole run, earlier parts included.

    Raises:
        NonFiniteError: a loss or gradient was not finite; the batch is in the file it names.
        Interrupted: SIGTERM came; the state was saved first. Its exit_code is 75.
        CheckpointError: no checkpoint of the folder can be used, or one could not be written.
    """
    with StopFlag() as stop:
        return _Run(engine, batches, plan, validation, folder, on_epoch, stop, report).run()


class _Run:
    """The state of one call of `train`."""

    def __init__(self, engine, batches, plan, validation, folder, on_epoch, stop: StopFlag, report):
        self.engine, self.batches, self.plan = engine, batches, plan
        self.validation, self.folder, self.on_epoch, self.stop = validation, folder, on_epoch, stop
        self.report = report
        self.total_steps = plan.total_steps(len(batches))
        self.history = History(engine.item)
        self.meter = EpochMeter(engine.device)
        self.step = self.steps_in_epoch = self.saved_at = 0
        self.learning_rate = 0.0
        # Steps whose numbers are still on the device, with their batches.
        self.unread: list[tuple[StepMetrics, Any]] = []

    def run(self) -> History:
        self.restore()
        while self.step < self.total_steps or self.steps_in_epoch:
            self.train_epoch()
            self.finish_epoch()
        if self.folder is not None and self.saved_at != self.step:
            self.save()
        if self.stop.requested:
            self.save_and_leave()
        return self.history

    def train_epoch(self) -> None:
        """What is left of the epoch; nothing when it was interrupted after its last step."""
        left = min(len(self.batches) - self.steps_in_epoch, self.total_steps - self.step)
        if left == 0:
            return
        self.meter.start()
        for batch in self.batches:
            metrics = self.engine.train_step(batch)
            self.meter.count(metrics.items)
            self.unread.append((metrics, batch))
            self.learning_rate = metrics.learning_rate
            self.step += 1
            self.steps_in_epoch += 1
            left -= 1
            if len(self.unread) == SYNC_STEPS or self.engine.device.kind == "cpu":
                self.read_losses()
                self.report(self.step, self.total_steps, f"loss {self.history.losses[-1]:.4f}")
            if self.stop.requested:
                self.save_and_leave()
            if left and self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
                self.save()
                self.meter.start()
            if left == 0:
                break
        self.meter.pause()
        if left:
            raise HyperionError(
                f"the loader ended {left} batches early",
                where=f"step {self.step}",
                next_step="make its len() what it yields",
            )

    def finish_epoch(self) -> None:
        """Evaluate when it is time to, and record the epoch."""
        self.read_losses()
        number = len(self.history.epochs) + 1
        last = self.step >= self.total_steps
        evaluation = None
        if self.validation is not None and (last or number % self.plan.evaluate_every == 0):
            try:
                evaluation = self.engine.evaluate(self.stop.watch(self.validation()))
            except Interrupted:
                self.save_and_leave()
        losses = self.history.losses[self.step - self.steps_in_epoch :]
        record = EpochRecord(
            epoch=number,
            step=self.step,
            steps=self.steps_in_epoch,
            loss=math.fsum(losses) / len(losses),
            learning_rate=self.learning_rate,
            evaluation=evaluation,
            **self.meter.results(),
        )
        self.history.epochs.append(record)
        self.meter = EpochMeter(self.engine.device, warmed_up=True)
        self.steps_in_epoch = 0
        for callback in self.on_epoch:
            callback(record)
        if self.folder is not None and self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
            self.save()

    def read_losses(self) -> None:
        """Fetch the losses of the steps since the last call, all at once.

        Raises:
            NonFiniteError: names the first bad step; its batch is written to a file.
        """
        if not self.unread:
            return
        numbers = torch.stack(
            [torch.stack((metrics.loss, metrics.gradient_norm)) for metrics, _ in self.unread]
        ).tolist()
        first = self.step - len(self.unread) + 1
        for step, (loss, norm), (_, batch) in zip(range(first, self.step + 1), numbers, self.unread, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self.non_finite(step, loss, norm, batch)
            self.history.losses.append(loss)
        self.unread.clear()

    def non_finite(self, step: int, loss: float, norm: float, batch: Any) -> NonFiniteError:
        """The error for a step, once its batch is on the disk."""
        place = Path(self.folder or tempfile.mkdtemp(prefix="hyperion-")) / f"nonfinite-step-{step:08d}"
        place.mkdir(parents=True, exist_ok=True)
        write_state(place, {"step": step, "loss": str(loss), "gradient_norm": str(norm), "batch": batch})
        return NonFiniteError(
            f"step {step}: loss {loss}, gradient norm {norm}; training stopped, and the batch of the step was saved",
            where=place / "tensors.safetensors",
            next_step="lower the learning rate or look at that batch; checkpoints from before the step are untouched",
        )

    def save_and_leave(self) -> None:
        """Save, and raise Interrupted."""
        if self.folder is None:
            raise Interrupted(
                f"stopped by SIGTERM after step {self.step}; nothing was saved, because there is no checkpoint folder",
                next_step="give a checkpoint folder",
            )
        self.save()
        raise Interrupted(
            f"stopped by SIGTERM after step {self.step} of {self.total_steps}; the state was saved",
            where=checkpoint_path(self.folder, self.step),
            next_step="start the same again: it goes on from there",
        )

    def save(self) -> None:
        """A checkpoint of everything that the rest of the run depends on."""
        self.meter.pause()
        self.read_losses()
        if self.folder is None:
            return
        state = {
            "step": self.step,
            "steps_in_epoch": self.steps_in_epoch,
            "learning_rate": self.learning_rate,
            "meter": self.meter.state_dict(),
            "history": self.history.state_dict(),
            "batches": self.batches.state_dict(),
            "rng": rng_state(),
        }
        with saving(self.folder, self.step, self.plan.keep) as new:
            for part in ("engine", "loop"):
                (new / part).mkdir()
            self.engine.save(new / "engine")
            write_state(new / "loop", state)
        self.saved_at = self.step

    def restore(self) -> None:
        """Go on from the newest good checkpoint, if there is one."""
        state = None if self.folder is None else newest_good(self.folder, self.read)
        if state is None:
            return
        self.batches.load_state_dict(state["batches"])
        self.step, self.steps_in_epoch = state["step"], state["steps_in_epoch"]
        self.learning_rate, self.saved_at = state["learning_rate"], state["step"]
        self.history = History.from_state_dict(state["history"])
        self.history.resumed_at.append(self.step)
        self.meter.load_state_dict(state["meter"])
        set_rng_state(state["rng"])

    def read(self, path: Path) -> dict:
        """Verify one checkpoint, load it into the engine, and return the loop's part of it."""
        verify(path)
        state = read_state(path / "loop")
        if state["step"] > self.total_steps:
            raise CheckpointError(
                f"it is at step {state['step']}, after the end of the plan at {self.total_steps}",
                where=path,
                next_step="train longer, or name another checkpoint folder",
            )
        self.engine.load(path / "engine")
        return state
