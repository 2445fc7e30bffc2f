"""The observer: what it measures does not change the steps that are timed."""

import importlib.metadata
import json
import sys
import time
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from hyperion.engines import observer as observers
from hyperion.engines import plain
from hyperion.engines.observer import Observer, sha256_of_state, versions_of
from hyperion.engines.record import Group, Record
from hyperion.engines.work import Work, distinct_rows
from hyperion.errors import HyperionError
from hyperion.hardware import Telemetry
from hyperion.measure.memory_use.tensor_memory import PeakMemory
from hyperion.measure.steps.step_parts import PARTS


def test_the_start_of_the_sampler_is_in_no_timed_step(monkeypatch, tmp_path):
    calls = []

    def read() -> Telemetry:
        time.sleep(0 if calls else 0.3)  # the first reading opens a library
        calls.append(len(observer._ends_s))
        return Telemetry(power_w=10.0)

    monkeypatch.setattr(observers, "reader_for", lambda device: read)
    monkeypatch.setattr(Observer, "_row_numbers", lambda self, parts: [])
    observer = Observer(Work(str(tmp_path), 4, 1, 1, timed=True), "stack", (), tmp_path)
    state = {"weight": torch.zeros(1)}
    observer.start(observer, None, state)
    for _ in range(4):
        observer.step(1.0, 1.0, 1)
    record = Record.of(observer.finish(state))
    assert record.step_times_s[1] > 0.3 and max(record.step_times_s[2:]) < 0.2
    assert calls[0] == 1 and record.energy_steps == 2
    assert record.energy_j == 10.0 * sum(record.step_times_s[2:])


@pytest.mark.parametrize("traced", [0, 2])
def test_energy_and_memory_end_with_the_last_step(monkeypatch, tmp_path, traced):
    used_gib = 1.0

    class Region:
        def __init__(self, device):
            self.peak = None

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            self.peak = PeakMemory("peak_rss_gib", used_gib)

    # A device of 100 W with an energy counter.
    monkeypatch.setattr(observers, "reader_for", lambda device: lambda: Telemetry(energy_j=100.0 * time.monotonic()))
    monkeypatch.setattr(observers, "PeakMemoryRegion", Region)
    monkeypatch.setattr(observers, "StepTracer", NoTracer)
    monkeypatch.setattr(Observer, "_row_numbers", lambda self, parts: [])
    observer = Observer(Work(str(tmp_path), 4, 1, 1, timed=True, traced=traced), "stack", (), tmp_path)
    state = {"weight": torch.zeros(1)}
    observer.start(observer, None, state)
    for _ in range(4):
        time.sleep(0.15)
        observer.step(1.0, 1.0, 1)
    used_gib = 9.0
    for _ in range(1 + traced if traced else 0):
        observer.step(1.0, 1.0, 1)
    time.sleep(0.6)  # as long as an adapter copies the final state of a large model to the host
    record = Record.of(observer.finish(state))
    assert len(record.step_times_s) == len(record.losses) == 4 and record.counted_tokens == 4
    assert record.energy_j == pytest.approx(100.0 * sum(record.step_times_s[2:]), rel=0.01)
    assert record.peak_memory_gib == 1.0


class NoTracer:
    """A profiler that does not start."""

    def __init__(self, device, steps):
        pass

    def start(self):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    def stop(self):
        raise RuntimeError("the profiler does not run")


def test_a_profiler_that_fails_leaves_the_record_and_a_reason(monkeypatch, tmp_path, tiny_work):
    monkeypatch.setattr(observers, "StepTracer", NoTracer)
    work = replace(tiny_work, timed=True, traced=1)
    record = Record.of(plain.train(work, Observer(work, "plain loop", (), tmp_path)))
    assert record.trace is None and len(record.losses) == 4
    assert record.unreadable["trace"] == "not traced: RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"


def test_traced_steps_change_nothing_in_the_record(tmp_path, tiny_work):
    """The judge sees the same run, so the traced steps are those of an equal work."""
    timed = replace(tiny_work, timed=True)
    runs = [replace(timed, traced=traced) for traced in (0, 1)]
    hooks = len(_global_optimizer_pre_hooks)
    without, traced = (Record.of(plain.train(work, Observer(work, "plain loop", (), tmp_path))) for work in runs)
    assert len(_global_optimizer_pre_hooks) == hooks
    same = ("losses", "norms", "clipped_norms", "rows", "counted_tokens", "groups", "optimizer_steps", "initial_sha256")
    assert [getattr(without, name) for name in same] == [getattr(traced, name) for name in same]
    assert without.trace is None and "trace" not in without.unreadable
    assert traced.trace is not None and traced.trace.steps == 1 and set(traced.trace.parts_s) == set(PARTS)
    assert Record.of(json.loads(json.dumps(traced.as_dict()))) == traced


def test_a_run_that_fails_in_a_traced_step_still_has_its_times(tmp_path, tiny_work):
    def failing(work: Work, steps: int) -> Record | None:
        observer = Observer(work, "plain loop", (), tmp_path)
        observer.start(observer, None, {"weight": torch.zeros(1)})
        for _ in range(steps):
            observer.step(1.0, 1.0, 1)
        answer = observer.finish_after(RuntimeError("out of memory"))
        assert not torch.autograd._profiler_enabled()  # a process that ends with a running profiler crashes
        return None if answer is None else Record.of(answer)

    def ended_early(work: Work) -> Record:
        observer = Observer(work, "plain loop", (), tmp_path)
        observer.start(observer, None, {"weight": torch.zeros(1)})
        for _ in range(work.steps + 1):
            observer.step(1.0, 1.0, 1)
        record = Record.of(observer.finish({}))
        assert not torch.autograd._profiler_enabled()
        return record

    timed = replace(tiny_work, timed=True)
    record = failing(replace(timed, traced=2), 5)
    assert record is not None and len(record.step_times_s) == 4
    assert record.unreadable["trace"] == "not traced: RuntimeError: out of memory"
    assert "before its last traced step" in ended_early(replace(timed, traced=2)).unreadable["trace"]
    assert failing(replace(timed, traced=2), 3) is None  # in a step of the work
    assert failing(timed, 4) is None  # after the steps of a work that traces none


def rank(rows, time_s=1.0, elements=8.0, squares=4.0, memory=1.0, energy_j=1.0) -> dict:
    """What one rank has seen in one step."""
    group = Group(elements, 0.1, (0.9, 0.95), 1e-8, (1e-3,), "float32", "torch.optim.adamw.AdamW")
    seen = {"losses": [2.0], "norms": [None], "rows": [rows], "times_s": [time_s], "squares": [squares], "tokens": 16}
    return seen | {"groups": [group], "updates": 1, "reduced": {}, "memory": memory, "energy_j": energy_j}


@pytest.fixture
def combined(tmp_path, monkeypatch):
    """Return the record of ranks that train a model of 8 parameters, of which `readers` read the same rows."""

    monkeypatch.setattr(Observer, "_row_numbers", lambda self, parts: [])

    def combine(*ranks: dict, readers: int = 1) -> Record:
        observer = Observer(Work(str(tmp_path), 1, 4, 4, timed=True), "stack", (), tmp_path)
        observer.start(observer, None, {"weight": torch.zeros(8)}, readers=readers)
        observer.step(2.0, None, 16)
        observer.finish({})
        return observer._combined(list(ranks), "", {})

    return combine


def test_replicas_count_once_and_the_slowest_and_fullest_rank_counts(combined):
    record = combined(rank([2, 3], time_s=1.0, memory=3.0), rank([0, 1], time_s=2.0, memory=1.0))
    assert record.rows == [[0, 1, 2, 3]] and record.counted_tokens == 32
    assert [group.elements for group in record.groups] == [8.0] and record.clipped_norms == [2.0]
    assert record.step_times_s == [2.0] and record.peak_memory_gib == 3.0 and record.energy_j == 2.0
    unreadable = combined(rank([2, 3]), rank([0, 1], memory=None, energy_j=None))
    assert unreadable.peak_memory_gib is None and unreadable.energy_j is None


def test_shards_add_up(combined):
    record = combined(rank([2, 3], elements=5.0, squares=9.0), rank([0, 1], elements=3.0, squares=16.0))
    assert [group.elements for group in record.groups] == [8.0] and record.clipped_norms == [5.0]


def test_rows_that_two_ranks_read_together_count_once(combined):
    record = combined(rank([0, 1]), rank([0, 1]), readers=2)
    assert record.rows == [[0, 1]] and record.counted_tokens == 16


def test_a_rank_counts_its_share_of_elements_and_gradients(monkeypatch, tmp_path):
    monkeypatch.setattr(Observer, "_row_numbers", lambda self, parts: [])
    observer = Observer(Work(str(tmp_path), 2, 1, 1, timed=True), "stack", (), tmp_path)
    weight = torch.nn.Parameter(torch.zeros(8))
    weight.grad = torch.ones(8)
    observer.start(observer, None, {"weight": weight}, own_share=lambda parameter: 0.5)
    torch.optim.AdamW([weight]).step()
    observer.step(1.0, 1.0, 1)
    record = Record.of(observer.finish({}))
    assert [group.elements for group in record.groups] == [4.0] and record.clipped_norms == [2.0]


def test_ranks_and_micro_batches_divide_the_rows_of_a_step_in_order(tmp_path):
    work = Work(str(tmp_path), 2, 8, 1, micro_batches=2)
    parts = [work.row_numbers(1, rank, 2) for rank in range(2)]
    assert parts == [[range(8, 10), range(10, 12)], [range(12, 14), range(14, 16)]]


def test_distinct_rows_keep_the_order_of_the_text():
    rows = distinct_rows(np.array([5, 6, 1, 2, 5, 7, 3, 4]), 3, 1)
    assert rows.tolist() == [[5, 6], [1, 2], [3, 4]]


def test_only_a_timed_work_can_have_traced_steps(tiny_work):
    with pytest.raises(HyperionError, match="not timed"):
        replace(tiny_work, traced=2)
    work = replace(tiny_work, timed=True, traced=2)
    assert work.all_steps == 4 + 1 + 2 and work.row_numbers(4) == work.row_numbers(0)


def test_a_timed_run_writes_no_final_state(monkeypatch, tmp_path):
    monkeypatch.setattr(Observer, "_row_numbers", lambda self, parts: [])
    for timed in (False, True):
        folder = tmp_path / str(timed)
        observer = Observer(Work(str(tmp_path), 2, 1, 1, timed=timed), "stack", (), folder)
        state = {"weight": torch.zeros(1)}
        observer.start(observer, None, state)
        observer.step(1.0, 1.0, 1)
        record = Record.of(observer.finish(state))
        assert bool(record.final_file) == (folder / "final.safetensors").exists() == (not timed)


def test_the_norm_of_a_large_gradient_needs_no_large_copy(monkeypatch):
    sizes, norm = [], torch.linalg.vector_norm

    def counted(tensor, **options):
        sizes.append(tensor.numel())
        return norm(tensor, **options)

    gradient = torch.full((5, 1 << 23), 0.5)
    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    assert observers._sum_of_squares(gradient) == 0.25 * gradient.numel()
    assert max(sizes) <= 1 << 24 and sum(sizes) == gradient.numel()


def test_the_hash_of_a_state_depends_on_names_and_values_but_not_on_their_order():
    state = {"b": torch.arange(4.0), "a": torch.zeros(3)}
    same = {"a": torch.zeros(3), "b": torch.arange(4.0, dtype=torch.float64)}
    assert sha256_of_state(state) == sha256_of_state(same)
    others = (
        {"b": torch.zeros(3), "a": torch.arange(4.0)},
        {"b": torch.arange(4.0), "a": -torch.zeros(3)},
        {"b": torch.arange(4.0)},
        {"c": torch.arange(4.0), "a": torch.zeros(3)},
    )
    assert len({sha256_of_state(other) for other in (state, *others)}) == 5


def test_rank_0_reports_steps_at_most_once_a_second(monkeypatch, tmp_path):
    times = iter((0.0, 0.4, 0.8, 1.3, 1.5, 2.4, 9.0))
    monkeypatch.setattr(Observer, "_now", lambda self: next(times))
    seen = []
    work = Work(str(tmp_path), 50, 1, 1)
    observer = Observer(work, "stack", (), tmp_path, lambda step, loss: seen.append((step, loss)))
    observer.start(observer, None, {"weight": torch.zeros(1)})
    try:
        for step in range(1, 6):
            observer.step(None if step == 3 else float(step), 1.0, 1)
        observer.here = replace(observer.here, rank=1)
        observer.step(6.0, 1.0, 1)
    finally:
        for handle in observer._handles:  # one of them is called at each update of any optimizer
            handle.remove()
    assert seen == [(1, 1.0), (4, 4.0)]


def test_versions_are_those_of_imported_packages_also_where_the_distribution_has_another_name(monkeypatch):
    import safetensors  # noqa: F401
    import yaml.nodes  # noqa: F401

    monkeypatch.setitem(sys.modules, "of_no_distribution", ModuleType("of_no_distribution"))
    found = versions_of(["safetensors", "yaml.nodes", "of_no_distribution", "never_imported"])
    assert found == {
        "safetensors": importlib.metadata.version("safetensors"),
        "yaml.nodes": importlib.metadata.version("PyYAML"),
        "of_no_distribution": "unknown",
    }
