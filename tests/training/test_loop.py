"""The loop: what it records, that a resumed run is the same run, and how it stops."""

import os
import random
import signal
import subprocess
import sys
import weakref

import pytest
import torch

from hyperion.checkpoints import CheckpointError, read_state
from hyperion.data.batches import Prefetched
from hyperion.errors import HyperionError
from hyperion.hardware import detect
from hyperion.training import (
    EXIT_CODE,
    EpochRecord,
    History,
    Interrupted,
    LanguageEngine,
    NonFiniteError,
    TrainingPlan,
    mean_over_ranks,
    seed_everything,
    train,
)
from hyperion.training.clocks import Pulse
from tests.training.small import STEPS, small_batches, small_engine, small_validation


@pytest.fixture(scope="module")
def whole():
    """An uninterrupted run of STEPS steps."""
    engine = small_engine()
    return train(engine, small_batches(), TrainingPlan(steps=STEPS), validation=small_validation), engine


def test_the_history_holds_every_step_and_epoch(whole):
    history, engine = whole
    assert len(history.losses) == STEPS == engine.steps
    assert [(record.epoch, record.step, record.steps) for record in history.epochs] == [
        (1, 7, 7),
        (2, 14, 7),
        (3, 21, 7),
        (4, 24, 3),
    ]
    first, last = history.epochs[0], history.epochs[-1]
    assert first.items == 7 * 80 and engine.tokens_seen == STEPS * 80
    assert first.timed_steps == 4 and history.epochs[1].timed_steps == 7  # three steps warm up, once a process
    assert history.epochs[1].items_per_s == pytest.approx(560 / history.epochs[1].time_s)
    assert first.loss == pytest.approx(sum(history.losses[:7]) / 7)
    assert last.learning_rate == pytest.approx(3e-4)
    assert first.peak_memory_metric == "peak_rss_gib"
    assert first.peak_memory_gib is None or first.peak_memory_gib > 0.05
    assert first.evaluation["tokens"] == 100
    assert last.evaluation["loss"] < first.evaluation["loss"]
    assert history.item == "token"


def test_a_checkpoint_of_another_plan_is_not_to_be_removed(tmp_path):
    train(small_engine(), small_batches(), TrainingPlan(steps=4), folder=tmp_path)
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints can be used") as caught:
        train(small_engine(), small_batches(), TrainingPlan(steps=2), folder=tmp_path)
    assert "train longer" in caught.value.next_step and "remove" not in caught.value.next_step


def test_two_trainings_cannot_use_one_folder(tmp_path):
    began = []

    def second(record):
        with pytest.raises(CheckpointError, match="another training uses this folder"):
            train(small_engine(), small_batches(), TrainingPlan(steps=2), folder=tmp_path)
        began.append(record)

    train(small_engine(), small_batches(), TrainingPlan(steps=2), folder=tmp_path, on_epoch=[second])
    assert began and train(small_engine(), small_batches(), TrainingPlan(steps=2), folder=tmp_path)


def test_the_same_seed_gives_the_same_losses(whole):
    assert train(small_engine(), small_batches(), TrainingPlan(steps=STEPS)).losses == whole[0].losses


def test_another_seed_gives_other_losses(whole):
    assert train(small_engine(seed=1), small_batches(), TrainingPlan(steps=STEPS)).losses != whole[0].losses


class Stop(Exception):
    """Ends a run the way a crash does: nothing is saved."""


class Crashing:
    """A loader that fails after so many batches."""

    def __init__(self, batches, after):
        self.batches, self.after = batches, after

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            if self.after == 0:
                raise Stop
            self.after -= 1
            yield batch

    def state_dict(self):
        return self.batches.state_dict()

    def load_state_dict(self, state):
        self.batches.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize("crash_after, resumed_at", [(5, 3), (7, 6), (8, 6), (14, 12), (23, 21)])
def test_a_crashed_run_resumes_bit_for_bit(whole, tmp_path, crash_after, resumed_at):
    plan = TrainingPlan(steps=STEPS, checkpoint_every=3)
    with pytest.raises(Stop):
        train(small_engine(), Crashing(small_batches(), crash_after), plan, validation=small_validation, folder=tmp_path)
    seed_everything(99)
    random.random()
    engine = small_engine(seed=99)
    resumed = train(engine, small_batches(), plan, validation=small_validation, folder=tmp_path)
    assert resumed.resumed_at == [resumed_at]
    assert resumed.losses == whole[0].losses
    assert [r.evaluation for r in resumed.epochs] == [r.evaluation for r in whole[0].epochs]
    assert [(r.step, r.steps, r.items, r.loss) for r in resumed.epochs] == [
        (r.step, r.steps, r.items, r.loss) for r in whole[0].epochs
    ]
    assert engine.tokens_seen == STEPS * 80
    for ours, theirs in zip(engine.model.parameters(), whole[1].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_batches_made_ahead_by_threads_train_and_resume_to_the_same_losses(whole, tmp_path):
    """Threads that are ahead of the step when it crashes change nothing: the checkpoint holds the place of the step."""
    with Prefetched(small_batches(resident=False), workers=2) as batches, pytest.raises(Stop):
        train(small_engine(), Crashing(batches, 11), TrainingPlan(steps=STEPS, checkpoint_every=4), folder=tmp_path)
    with Prefetched(small_batches(resident=False), workers=3) as batches:
        engine = small_engine()
        history = train(engine, batches, TrainingPlan(steps=STEPS, checkpoint_every=4), folder=tmp_path)
    assert history.resumed_at == [8] and history.losses == whole[0].losses
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), whole[1].model.parameters(), strict=True))
    assert all(0 <= record.waiting_share < 1 for record in history.epochs if record.timed_steps)


def test_a_finished_run_is_not_trained_again(tmp_path):
    plan = TrainingPlan(epochs=1)
    first = train(small_engine(), small_batches(), plan, folder=tmp_path)
    again = train(small_engine(seed=1), small_batches(), plan, folder=tmp_path)
    assert again.losses == first.losses and again.epochs == first.epochs


def test_more_epochs_go_on_where_it_ended(tmp_path):
    train(small_engine(), small_batches(), TrainingPlan(epochs=2), folder=tmp_path)
    longer = train(small_engine(seed=1), small_batches(), TrainingPlan(epochs=3), folder=tmp_path)
    assert [read_state(tmp_path / f"step-{step:08d}/loop")["seed"] for step in (14, 21)] == [0, 0]
    assert longer.losses == train(small_engine(), small_batches(), TrainingPlan(epochs=3)).losses


def test_more_steps_go_on_within_the_epoch_where_it_ended(tmp_path):
    batches = len(small_batches())
    first, more = batches // 2, 2 * batches + 1
    train(small_engine(), small_batches(), TrainingPlan(steps=first), folder=tmp_path)
    history = train(small_engine(), small_batches(), TrainingPlan(steps=more), folder=tmp_path)
    assert history.losses == train(small_engine(), small_batches(), TrainingPlan(steps=more)).losses
    # The end of the first run divides its epoch into two records.
    assert [record.step for record in history.epochs] == [first, batches, 2 * batches, more]


def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(whole, tmp_path, capsys):
    train(small_engine(), small_batches(), TrainingPlan(steps=STEPS, checkpoint_every=6), folder=tmp_path)
    (newest,) = (tmp_path / f"step-{STEPS:08d}" / "engine").glob("*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-10])
    resumed = train(small_engine(), small_batches(), TrainingPlan(steps=STEPS, checkpoint_every=6), folder=tmp_path)
    assert resumed.resumed_at == [18]
    assert resumed.losses == whole[0].losses
    assert "truncated or modified" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    from hyperion.models import TransformerConfig, TransformerLM
    from hyperion.training import LanguageEngine, adamw

    train(small_engine(), small_batches(), TrainingPlan(steps=3), folder=tmp_path)
    ours = small_engine()
    model = TransformerLM(TransformerConfig(vocab_size=19, context=8, width=32, heads=2, layers=2))
    other = LanguageEngine(model, adamw(model, 1e-3), ours.schedule, ours.precision, ours.device)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        train(other, small_batches(), TrainingPlan(steps=6), folder=tmp_path)


def run_child(folder):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.small", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end_at_batch(child, number, with_signal):
    """Send the signal once the child has asked for that many batches; the lines it printed."""
    for seen, _ in enumerate(iter(child.stdout.readline, ""), start=1):
        if seen == number:
            os.kill(child.pid, with_signal)
            break
    return child.communicate(timeout=60)


def losses_after_resume(folder):
    plan = TrainingPlan(steps=STEPS, checkpoint_every=3)
    return train(small_engine(seed=1), small_batches(), plan, validation=small_validation, folder=folder).losses


@pytest.mark.process
def test_sigkill_at_a_random_step_then_the_same_losses(whole, tmp_path):
    strike = random.SystemRandom().randint(4, STEPS)  # the first checkpoint is there when the fourth batch is asked for
    print("killed at batch", strike)
    child = run_child(tmp_path)
    end_at_batch(child, strike, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert losses_after_resume(tmp_path) == whole[0].losses


def test_sigterm_between_checkpoints_saves_the_step_that_it_met(whole, tmp_path):
    """Here in this process. test_loop_on_ranks sends it to a process and reads its exit code."""

    class Terminated(Crashing):
        def __iter__(self):
            for number, batch in enumerate(self.batches, 1):
                if number == self.after:
                    terminate_self()
                yield batch

    plan = TrainingPlan(steps=STEPS, checkpoint_every=3)
    with pytest.raises(Interrupted, match="stopped by SIGTERM after step 5"):
        train(small_engine(), Terminated(small_batches(), 5), plan, validation=small_validation, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step-*"))[-1] == "step-00000005"
    assert losses_after_resume(tmp_path) == whole[0].losses


def test_interrupted_carries_the_exit_code():
    assert EXIT_CODE == Interrupted("x").exit_code == 75


def terminate_self():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_sigterm_during_the_evaluation_saves_and_evaluates_after_the_resume(whole, tmp_path):
    def interrupted_validation():
        terminate_self()
        return small_validation()

    plan = TrainingPlan(steps=STEPS, checkpoint_every=100)
    with pytest.raises(Interrupted, match="after step 7"):
        train(small_engine(), small_batches(), plan, validation=interrupted_validation, folder=tmp_path)
    resumed = train(small_engine(seed=1), small_batches(), plan, validation=small_validation, folder=tmp_path)
    assert resumed.losses == whole[0].losses
    assert [r.evaluation for r in resumed.epochs] == [r.evaluation for r in whole[0].epochs]
    assert [r.learning_rate for r in resumed.epochs] == [r.learning_rate for r in whole[0].epochs]


def test_sigterm_after_the_last_step_is_not_lost(tmp_path):
    with pytest.raises(Interrupted, match="after step 3 of 3"):
        train(small_engine(), small_batches(), TrainingPlan(steps=3), folder=tmp_path, on_epoch=[lambda record: terminate_self()])
    assert len(train(small_engine(), small_batches(), TrainingPlan(steps=3), folder=tmp_path).losses) == 3


def test_sigterm_without_a_folder_says_that_nothing_was_saved():
    engine = small_engine()
    step = engine.train_step

    def step_then_term(batch):
        terminate_self()
        return step(batch)

    engine.train_step = step_then_term
    with pytest.raises(Interrupted, match="nothing was saved"):
        train(engine, small_batches(), TrainingPlan(steps=3))


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_and_keeps_the_batch(tmp_path):
    engine = small_engine()
    step, seen = engine.train_step, []

    def poisoned(batch):
        seen.append(batch)
        if len(seen) == 5:
            with torch.no_grad():
                engine.model.final_norm.weight[0] = float("nan")
        return step(batch)

    engine.train_step = poisoned
    plan = TrainingPlan(steps=STEPS, checkpoint_every=2)
    with pytest.raises(NonFiniteError, match="step 5: loss nan") as caught:
        train(engine, small_batches(), plan, folder=tmp_path)
    saved = read_state(caught.value.where.parent)
    assert saved["step"] == 5
    assert all(torch.equal(a, b) for a, b in zip(saved["batch"], seen[4], strict=True))
    assert train(small_engine(seed=1), small_batches(), plan, folder=tmp_path).resumed_at == [4]


def test_an_epoch_over_ranks_has_the_items_of_all_and_the_times_of_the_slowest():
    def part(rank: int, loss: float, items: int, time_s: float, memory_gib: float | None) -> EpochRecord:
        shared = {"epoch": 1, "step": 4, "steps": 4, "learning_rate": 0.1, "timed_steps": 4, "evaluation": None}
        measured = {"time_s": time_s, "waited_s": time_s / 4, "items_per_s": items / time_s, "peak_memory_gib": memory_gib}
        return EpochRecord(**shared, **measured, rank=rank, loss=loss, items=items, peak_memory_metric="peak_rss_gib")

    parts = [part(0, 1.0, 10, 2.0, None), part(1, 4.0, 30, 1.0, 3.0)]
    whole = History("token").add_epoch(parts, 2.0, 0, None)
    assert (whole.items, whole.time_s, whole.waited_s, whole.items_per_s) == (40, 2.0, 0.5, 20.0)
    assert whole.peak_memory_gib is None  # one rank's is unknown
    assert mean_over_ranks(parts) == 3.25


def test_progress_is_reported():
    seen = []
    train(small_engine(), small_batches(), TrainingPlan(steps=3), report=lambda *progress: seen.append(progress))
    assert [(done, total) for done, total, _ in seen] == [(1, 3), (2, 3), (3, 3)]


def test_callbacks_see_each_epoch():
    seen = []
    history = train(small_engine(), small_batches(), TrainingPlan(epochs=2), on_epoch=[seen.append])
    assert seen == history.epochs


def test_evaluation_comes_as_often_as_planned():
    history = train(small_engine(), small_batches(), TrainingPlan(epochs=5, evaluate_every=2), validation=small_validation)
    assert [record.evaluation is not None for record in history.epochs] == [False, True, False, True, True]
    plan = TrainingPlan(epochs=2, evaluate_every=len(small_batches()))  # epochs, not steps
    history = train(small_engine(), small_batches(), plan, validation=small_validation)
    assert [record.evaluation is not None for record in history.epochs] == [False, True]


def test_a_loader_that_ends_early_is_an_error():
    class Short(Crashing):
        def __len__(self):
            return 9

    with pytest.raises(HyperionError, match="ended 2 batches before the end of the epoch"):
        train(small_engine(), Short(small_batches(), -1), TrainingPlan(epochs=1))


def test_a_loader_without_a_position_that_has_more_batches_than_it_says_is_an_error():
    class Long:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([next(iter(small_batches()))] * 5)

    with pytest.raises(HyperionError, match=r"more batches than its len\(\) of 3"):
        train(small_engine(), Long(), TrainingPlan(epochs=2))
    # The plan may end within an epoch.
    assert len(train(small_engine(), Long(), TrainingPlan(steps=2)).losses) == 2


class NoticesLate:
    """As torchdata's StatefulDataLoader: an epoch ends only when the iterator is asked for one more batch."""

    def __init__(self, terminate_after=None):
        self.epoch, self.given, self.terminate_after = 0, 0, terminate_after

    def __len__(self):
        return 5

    def __iter__(self):
        for number in range(self.given, 5):
            self.given = number + 1
            if self.terminate_after == 5 * self.epoch + number + 1:
                terminate_self()
            random_BT = torch.randint(0, 19, (4, 9), generator=torch.Generator().manual_seed(5 * self.epoch + number))
            yield random_BT[:, :-1].contiguous(), random_BT[:, 1:].contiguous()
        self.epoch, self.given = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state):
        self.epoch, self.given = state["epoch"], state["given"]


@pytest.mark.parametrize("steps", [3, 5, 10, 12])
def test_a_loader_that_notices_the_end_of_its_epoch_late_resumes_at_every_step(tmp_path, steps):
    whole = train(small_engine(), NoticesLate(), TrainingPlan(steps=15))
    train(small_engine(), NoticesLate(), TrainingPlan(steps=steps), folder=tmp_path)
    resumed = train(small_engine(seed=1), NoticesLate(), TrainingPlan(steps=15), folder=tmp_path)
    assert resumed.resumed_at == [steps] and resumed.losses == whole.losses


@pytest.mark.parametrize("steps", [4, 5])
def test_such_a_loader_resumes_after_sigterm_too(tmp_path, steps):
    whole = train(small_engine(), NoticesLate(), TrainingPlan(steps=10))
    with pytest.raises(Interrupted, match=f"after step {steps} "):
        train(small_engine(), NoticesLate(terminate_after=steps), TrainingPlan(steps=10), folder=tmp_path)
    resumed = train(small_engine(seed=1), NoticesLate(), TrainingPlan(steps=10), folder=tmp_path)
    assert resumed.resumed_at == [steps] and resumed.losses == whole.losses


@pytest.mark.parametrize("most, least_alive, most_alive", [(1 << 30, 6, 8), (2 * 4 * 8 * 8, 1, 4)])
def test_batches_are_held_until_their_losses_are_read_but_not_too_many(monkeypatch, most, least_alive, most_alive):
    monkeypatch.setattr("hyperion.training.loop.MOST_HELD_BYTES", most)
    made, alive = [], []

    class AsOnAnAccelerator(Pulse):
        def __init__(self, device):
            super().__init__(device)
            self.steps = 20

    monkeypatch.setattr("hyperion.training.loop.Pulse", AsOnAnAccelerator)

    class Counting(NoticesLate):
        def __len__(self):
            return 7

        def __iter__(self):
            for _ in range(7):
                random_BT = torch.randint(0, 19, (4, 9))
                batch = random_BT[:, :-1].contiguous(), random_BT[:, 1:].contiguous()
                made.append(weakref.ref(batch[0]))
                alive.append(sum(one() is not None for one in made))
                yield batch

    train(small_engine(), Counting(), TrainingPlan(steps=7))
    assert least_alive <= max(alive) <= most_alive


class ForgetsEval(LanguageEngine):
    """As an engine of one's own may: its evaluation does not switch the model to evaluation mode."""

    def evaluate(self, batches):
        self.modes = [module.training for module in self.model.modules()]
        losses = [self.model(*batch).mean() for batch in batches]
        return {"loss": float(torch.stack(losses).mean())}


def test_an_evaluation_changes_no_training_and_no_mode_of_a_module(whole):
    history, _ = whole
    small = small_engine()
    engine = ForgetsEval(small.model, small.optimizer, small.schedule, small.precision, "cpu")
    frozen = list(engine.model.modules())[-1]
    frozen.eval()
    evaluated = train(engine, small_batches(), TrainingPlan(steps=14), validation=lambda: [next(iter(small_batches()))])
    assert not any(engine.modes) and not frozen.training and engine.model.training
    # Dropout draws from torch's generator. In training mode, the evaluation would have changed the losses after step 7.
    assert evaluated.losses == history.losses[:14]


@pytest.mark.parametrize("option", [{"betas": (0.5, 0.95)}, {"weight_decay": 5.0}, {"eps": 1e-3}])
def test_a_resume_with_another_option_of_the_optimizer_is_refused_and_with_another_learning_rate_it_is_not(tmp_path, option):
    train(small_engine(), small_batches(), TrainingPlan(steps=2), folder=tmp_path)
    other = small_engine()
    for group in other.optimizer.param_groups:
        group.update(option)
    with pytest.raises(CheckpointError, match=f"{next(iter(option))}.* in the checkpoint and .* here"):
        train(other, small_batches(), TrainingPlan(steps=4), folder=tmp_path)
    assert len(train(small_engine(learning_rate=1e-3), small_batches(), TrainingPlan(steps=4), folder=tmp_path).losses) == 4


@pytest.fixture
def deterministic_gpu():
    """The GPU, with torch held to operations that repeat bit for bit."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    seed_everything(0, deterministic=True)
    yield detect()
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_a_crashed_run_resumes_bit_for_bit_on_a_gpu(deterministic_gpu, tmp_path):
    device = deterministic_gpu

    def batches():
        return small_batches(device.torch_device)

    whole = train(small_engine(device=device), batches(), TrainingPlan(steps=STEPS))
    plan = TrainingPlan(steps=STEPS, checkpoint_every=3)
    with pytest.raises(Stop):
        train(small_engine(device=device), Crashing(batches(), 11), plan, folder=tmp_path)
    resumed = train(small_engine(seed=9, device=device), batches(), plan, folder=tmp_path)
    assert resumed.resumed_at == [9]
    assert resumed.losses == whole.losses
    assert whole.epochs[0].peak_memory_metric == "peak_memory_gib"
    assert whole.epochs[0].peak_memory_gib > 0


def test_epochs_or_steps_say_how_long():
    assert TrainingPlan(epochs=3).total_steps(steps_per_epoch=7) == 21
    assert TrainingPlan(steps=10).total_steps(steps_per_epoch=7) == 10


@pytest.mark.parametrize("fields", [{}, {"epochs": 1, "steps": 1}, {"epochs": 0}, {"steps": 5, "checkpoint_every": 0}])
def test_impossible_plans_are_refused(fields):
    with pytest.raises(HyperionError):
        TrainingPlan(**fields)
