"""The training loop: it drives an Engine over batches, measures, evaluates, saves and resumes.

It knows no optimizer, wrapper or model. Losses stay on the device and are read some steps at once (see Pulse), which is
also when many ranks agree whether to stop.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hyperion.checkpoints import agreed, checkpoint_path, gathered, newest_good, rank_and_size, require_writable
from hyperion.checkpoints.states import to_tree
from hyperion.errors import HyperionError
from hyperion.training.engine import Engine, StepMetrics
from hyperion.training.history import EpochRecord, History
from hyperion.training.meter import EpochMeter
from hyperion.training.nonfinite import NonFiniteError, is_finite, non_finite
from hyperion.training.plan import Plan
from hyperion.training.pulse import Pulse
from hyperion.training.seeds import rng_state, seed_rank, set_rng_state
from hyperion.training.signals import Interrupted, StopFlag
from hyperion.training.snapshots import read_run, write_run


class Batches(Protocol):
    """A resumable loader: each iteration yields what is left of an epoch (or a whole next one where nothing is
    left).
    """

    def __len__(self) -> int:
        """Batches of a whole epoch."""

    def __iter__(self) -> Iterator: ...

    def state_dict(self) -> dict:
        """Position after the batch that was yielded last, the same on all ranks: tensors and JSON values."""

    def load_state_dict(self, state: dict) -> None: ...


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

    On many ranks (a process group is up) all of them call it alike, each with an engine and a loader of its own part.
    Rank 0 alone reports and calls `on_epoch`. Each rank draws random numbers of its own. A checkpoint of as many ranks
    is continued bit for bit; on another number of ranks the loader goes on where it was and the losses agree to
    rounding, except that random generators (dropout) are seeded anew, which stderr says.

    Args:
        validation: makes a fresh iterable of held-out batches for engine.evaluate.
        folder: of this run's checkpoints, one for all ranks; None saves nothing.
        on_epoch: called with each epoch's record.
        report: told (steps done, steps in all, the newest loss) whenever losses are read.

    Returns:
        The history of the whole run, earlier parts included; the same on all ranks.

    Raises:
        NonFiniteError: a loss or gradient was not finite, on all ranks; the batch is in the file it names. Or the loss of an
            evaluation, or a weight when it was to be saved.
        Interrupted: SIGTERM came to some rank; the state was saved first, and all ranks leave. Its exit_code is 75.
            One process stops after the step in progress; many stop after the same step, when losses are read next.
        HyperionError: before the first step: the engine, the loader, `validation` or a callback lacks what the run needs.
        CheckpointError: no checkpoint of the folder can be used, or one could not be written; before the first step: the
            folder is not writable, or the loader's state cannot be stored.
    """
    with StopFlag() as stop:
        return _Run(engine, batches, plan, validation, folder, on_epoch, stop, report).run()


class _Run:
    """The state of one call of `train` on one rank."""

    def __init__(self, engine, batches, plan, validation, folder, on_epoch, stop: StopFlag, report):
        self.rank, self.ranks = rank_and_size()
        self.engine, self.batches, self.plan = engine, batches, plan
        self.validation, self.folder, self.stop = validation, folder, stop
        self.on_epoch, self.report = (on_epoch, report) if self.rank == 0 else ((), lambda done, total, note: None)
        agreed(self.require_parts)
        self.total_steps = plan.total_steps(len(batches))
        self.history = History(engine.item)
        self.pulse = Pulse(engine.device)
        self.seed = torch.initial_seed()
        self.step = self.steps_in_epoch = self.saved_at = 0
        self.learning_rate = 0.0
        self.leaving = False  # whether all ranks know that one of them was asked to stop
        self.evaluated = 0  # held-out batches
        self.begin_epoch()
        # Steps whose numbers are still on the device, with their batches.
        self.unread: list[tuple[StepMetrics, Any]] = []

    def require_parts(self) -> None:
        """Everything that is needed at the end is asked for before the first step.

        Raises:
            HyperionError: a part lacks what it needs for this run.
            CheckpointError: the loader's state cannot be stored.
        """
        saves = ("state_dict", "load_state_dict") if self.folder is not None else ()
        for what, part, needed in (
            ("the engine", self.engine, ("train_step", "evaluate", "save", "load")),
            ("the loader", self.batches, ("__len__", "__iter__", *saves)),
        ):
            if lacking := [name for name in needed if not callable(getattr(part, name, None))]:
                raise HyperionError(
                    f"{what}, a {type(part).__name__}, has no {' and no '.join(lacking)}",
                    where="train",
                    next_step="give a resumable loader, such as LanguageBatches, ImageBatches or torchdata's "
                    "StatefulDataLoader, or no checkpoint folder"
                    if part is self.batches
                    else "give a LanguageEngine, an ImageEngine or your own TorchEngine",
                )
        if len(self.batches) < 1:
            raise HyperionError("the loader holds no batch", where="train", next_step="use a smaller batch size or more data")
        functions = [("validation", self.validation), ("report", self.report), *(("on_epoch", f) for f in self.on_epoch)]
        for name, function in functions:
            if function is not None and not callable(function):
                raise HyperionError(
                    f"{name} is a {type(function).__name__}, which cannot be called",
                    where="train",
                    next_step=f"give a function, for example {name}=lambda: batches"
                    if name == "validation"
                    else f"give functions as {name}",
                )
        if self.folder is not None:
            to_tree({"batches": self.batches.state_dict()}, {}, torch.Tensor.detach)

    def begin_epoch(self, warmed_up: bool = False) -> None:
        """Nothing was trained on yet."""
        self.meter = EpochMeter(self.engine.device, warmed_up)
        self.rank_losses: list[float] = []
        self.earlier_items = 0  # of this epoch, seen by another number of ranks before a resume
        self.steps_in_epoch = 0

    def run(self) -> History:
        if self.folder is not None:
            require_writable(self.folder)
        self.restore()
        while self.step < self.total_steps or self.steps_in_epoch:
            self.train_epoch()
            self.finish_epoch()
        if self.folder is not None and self.saved_at != self.step:
            self.save()
        self.leaving, _ = self.pulse.agree(self.stop.requested, False, 0)
        if self.leaving:
            self.save_and_leave()
        return self.history

    def train_epoch(self) -> None:
        """What is left of the epoch; nothing when it was interrupted after its last step."""
        left = min(len(self.batches) - self.steps_in_epoch, self.total_steps - self.step)
        if left == 0:
            return
        self.start_clocks()
        for batch in self.meter.waiting(self.batches):
            metrics = self.engine.train_step(batch)
            self.meter.count(metrics.rank_items)
            self.unread.append((metrics, batch))
            self.learning_rate = metrics.learning_rate
            self.step += 1
            self.steps_in_epoch += 1
            left -= 1
            if len(self.unread) >= self.pulse.steps:
                self.read_losses()
                self.report(self.step, self.total_steps, f"loss {self.history.losses[-1]:.4f}")
            if self.leaving or (self.ranks == 1 and self.stop.requested):
                self.save_and_leave()
            if left and self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
                self.save()
                self.start_clocks()
            if left == 0:
                break
        self.meter.pause()
        if left:
            raise HyperionError(
                f"the loader ended {left} batches early", where=f"step {self.step}", next_step="make its len() what it yields"
            )

    def start_clocks(self) -> None:
        self.meter.start()
        self.pulse.start()

    def finish_epoch(self) -> None:
        """Evaluate when it is time to, and record the epoch."""
        self.read_losses()
        if self.leaving:
            self.save_and_leave()
        number = len(self.history.epochs) + 1
        last = self.step >= self.total_steps
        evaluation = None
        if self.validation is not None and (last or number % self.plan.evaluate_every == 0):
            try:
                evaluation = self.engine.evaluate(self.stop.watch(self.validation(), self.stop_evaluating))
            except Interrupted:
                self.save_and_leave()
            if not math.isfinite(evaluation["loss"]):  # the same on all ranks
                raise NonFiniteError(
                    f"evaluation after step {self.step}: loss {evaluation['loss']}; training stopped",
                    where=self.folder,
                    next_step="start again: it goes on from the checkpoint before; if it returns, look at the held-out data",
                )
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
        self.begin_epoch(warmed_up=True)
        for callback in self.on_epoch:
            callback(record)
        if self.folder is not None and self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0:
            self.save()

    def stop_evaluating(self) -> bool:
        """Asked before each held-out batch; many ranks agree every so many of them, all after the same one."""
        self.evaluated += 1
        if self.ranks > 1 and self.evaluated % self.pulse.steps:
            return False
        self.leaving, _ = self.pulse.agree(self.stop.requested, False, self.pulse.steps)
        return self.leaving

    def read_losses(self) -> None:
        """Fetch the losses of the steps since the last call, all at once; on many ranks also agree whether to stop.

        Raises:
            NonFiniteError: names the first bad step; its batch is written to a file.
        """
        if not self.unread:
            return
        # A step that fp16 made overflow was skipped, and its loss scale halved: nothing is wrong with the training.
        steps = [step for step, _ in self.unread]
        losses, norms, rank_losses, skipped = (
            torch.stack([getattr(step, name) for step in steps]) for name in ("loss", "gradient_norm", "rank_loss", "skipped")
        )
        numbers = torch.stack((losses, norms.masked_fill(skipped, 0.0), rank_losses), dim=1).tolist()
        bad = not all(map(is_finite, numbers))
        self.leaving, any_bad = self.pulse.agree(self.stop.requested, bad, len(numbers))
        if any_bad:
            first = self.step - len(numbers) + 1
            raise non_finite(self.folder, first, numbers, [batch for _, batch in self.unread])
        self.history.losses += [loss for loss, _, _ in numbers]
        self.rank_losses += [loss for _, _, loss in numbers]
        self.unread.clear()

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
        """Go on from the newest good checkpoint, if there is one."""
        found = None
        if self.folder is not None:
            found = newest_good(self.folder, lambda path: read_run(path, self.engine, self.total_steps))
        if found is None:
            if self.ranks > 1:
                seed_rank(self.seed, self.step, self.rank)
            return
        shared, own = found
        self.batches.load_state_dict(shared["batches"])
        self.step, self.steps_in_epoch = shared["step"], shared["steps_in_epoch"]
        self.learning_rate, self.saved_at, self.seed = shared["learning_rate"], shared["step"], shared["seed"]
        self.history = shared["history"]
        self.history.resumed_at.append(self.step)
        if own is None:
            self.earlier_items = shared["items_in_epoch"]
            self.change_ranks(shared["ranks"])
        else:
            self.rank_losses, self.earlier_items = own["losses"], own["earlier_items"]
            self.meter.load_state_dict(own["meter"])
            set_rng_state(own["rng"])

    def change_ranks(self, before: int) -> None:
        """What one rank had of its own has no heir on another number of ranks."""
        seed_rank(self.seed, self.step, self.rank)
        if self.rank == 0:
            print(
                f"WARNING: the checkpoint of step {self.step} was saved on {before} rank(s) and goes on on {self.ranks}. "
                "Random generators are seeded anew from (seed, step, rank): the next losses agree to rounding, and only "
                "where nothing random, such as dropout, is in the model.",
                file=sys.stderr,
            )


def _mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses)
