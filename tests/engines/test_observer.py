"""The observer: what it measures does not change the steps that are timed."""

import importlib.metadata
import sys
import time
from dataclasses import replace
from types import ModuleType

import torch

from hyperion.engines import observer as observers
from hyperion.engines.observer import Observer, sha256_of_state, versions_of
from hyperion.engines.record import Record
from hyperion.engines.work import Work
from hyperion.hardware import Telemetry


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
    )
    assert len({sha256_of_state(other) for other in (state, *others)}) == 4


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
