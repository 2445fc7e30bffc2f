"""Faults strike in the phase they are meant for, a run comes back in every bit, and one that does not is detected."""

from dataclasses import asdict

import pytest

from hyperion.experiments.baselines import recovery
from hyperion.experiments.baselines.recovery import MOST_LOST, STEPS, draw, run_once
from hyperion.experiments.baselines.recovery_faults import KINDS, PHASES, TrainingFault
from hyperion.training import Interrupted, loop
from tests.chapter.toy import perform, toy_context

PARTS = {"losses", "evaluations", "weights", "optimizer", "sampler", "generators"}


@pytest.fixture(autouse=True)
def the_loop_as_it_was(monkeypatch):
    monkeypatch.setattr(loop, "write_run", loop.write_run)  # faults are planted there


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    write_run = loop.write_run
    outcome = run_once(str(tmp_path_factory.mktemp("whole")), "language", 0, watch=True)
    loop.write_run = write_run
    return outcome


def test_every_kind_strikes_in_every_phase_once_before_any_comes_again():
    faults = draw(0, 25)
    assert len({(fault.kind, fault.phase) for fault in faults}) == 25
    assert faults == draw(0, 25) != draw(1, 25)
    assert {fault.kind for fault in faults} == set(KINDS) == set(MOST_LOST)
    assert all(1 <= fault.step <= STEPS and 0 <= fault.moment < 1 for fault in draw(3, 200))


def test_an_undisturbed_run_counts_the_moments_of_every_phase(whole):
    assert set(whole["moments"]) == set(PHASES) and min(whole["moments"].values())[0] >= 2
    assert whole["moments"]["backward"][1] > 20 and whole["moments"]["save"][0] > 500
    assert set(whole["hashes"]) == PARTS


@pytest.mark.parametrize("forgotten", [None, "set_rng_state"])
def test_sigterm_in_the_backward_pass_costs_nothing_unless_the_loop_forgets_its_generators(
    tmp_path, whole, monkeypatch, forgotten
):
    fault = asdict(TrainingFault("SIGTERM", "backward", 8, 0.5))
    with pytest.raises(Interrupted, match="after step 8"):
        run_once(str(tmp_path), "language", 0, fault, whole["moments"])
    assert (tmp_path / "struck").read_text() == "7"  # steps done when it came
    if forgotten:
        monkeypatch.setattr(loop, forgotten, lambda state: None)
    again = run_once(str(tmp_path), "language", 0)
    assert again["resumed_at"] == 8
    differ = {name for name in PARTS if again["hashes"][name] != whole["hashes"][name]}
    assert differ == ({"losses", "evaluations", "weights", "optimizer", "generators"} if forgotten else set())


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_costs_no_step_in_any_phase(tmp_path, whole, phase):
    step = {"evaluation": 10, "save": 9}.get(phase, 8)
    with pytest.raises(Interrupted):
        run_once(str(tmp_path), "language", 0, asdict(TrainingFault("SIGTERM", phase, step, 0.6)), whole["moments"])
    done, again = int((tmp_path / "struck").read_text()), run_once(str(tmp_path), "language", 0)
    assert done - again["resumed_at"] <= MOST_LOST["SIGTERM"] == 0 and again["hashes"] == whole["hashes"]


def test_a_nan_strikes_and_is_told_and_a_full_disk_leaves_the_checkpoint_before(tmp_path, whole):
    outcome = run_once(str(tmp_path / "nan"), "language", 0, asdict(TrainingFault("NaN", "forward", 4, 0.3)), whole["moments"])
    assert outcome["ended"].startswith("NonFiniteError: step 4")
    full = tmp_path / "full"
    outcome = run_once(str(full), "language", 0, asdict(TrainingFault("full disk", "save", 6, 0.2)), whole["moments"])
    assert outcome["ended"].startswith("CheckpointError")
    assert [path.name for path in full.glob("*step*")] == ["step-00000003"]


@pytest.mark.process
def test_a_fault_strikes_a_real_process(tmp_path, monkeypatch):
    chosen = [TrainingFault("power cut", "save", 9, 0.6)]
    monkeypatch.setattr("hyperion.experiments.baselines.recovery.draw", lambda seed, trials: chosen)
    run_job, struck = recovery.run_job, []

    def run(job, **options):
        """The process that the fault strikes is one. The others, to which nothing happens, train in this one."""
        if "fault" not in job.params:
            return run_once(**job.params)
        struck.append(job.params["fault"]["kind"])
        return run_job(job, **options)

    monkeypatch.setattr(recovery, "run_job", run)
    result = perform(toy_context("recovery", {"trials": 1}, tmp_path), tmp_path)
    (trial,) = result.samples.to_dict("records")
    assert struck == ["power cut"]
    assert "SIGKILL" in trial["ended"] and trial["damaged"] and trial["then"] == "finished"
    assert {row.metric: row.value for row in result.rows} == {"steps_lost": trial["lost"], "count": 1}
