"""The busy time of a GPU comes from the events of the profiler on that GPU, and not from those of the host."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure.steps import profiled

CPU = detect_cpu()
GPU = replace(CPU, kind="cuda")


def recorded(monkeypatch, *events):
    """Let the profiler return these events: pairs of the kind of device and the duration in microseconds."""
    made = [
        SimpleNamespace(device_type=SimpleNamespace(name=kind), time_range=SimpleNamespace(elapsed_us=lambda us=us: us))
        for kind, us in events
    ]
    monkeypatch.setattr(profiled, "profiled", lambda call, device: SimpleNamespace(events=lambda: made))


def test_the_busy_time_leaves_out_the_gaps_and_the_host(monkeypatch):
    recorded(monkeypatch, ("CPU", 900), ("CUDA", 30), ("CUDA", 20))
    assert profiled.device_seconds(lambda: None, GPU) == pytest.approx(50e-6)


def test_a_gpu_without_kernels_is_an_error_and_a_cpu_is_not(monkeypatch):
    recorded(monkeypatch, ("CPU", 900))
    with pytest.raises(HyperionError, match="no kernel on the GPU"):
        profiled.device_seconds(lambda: None, GPU)
    assert len(profiled.profiled_events(lambda: None, CPU)) == 1
