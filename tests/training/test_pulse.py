import pytest

from hyperion.hardware import Device, detect_cpu
from hyperion.training.pulse import SYNC_STEPS, Pulse


def test_a_cpu_reads_every_loss():
    assert Pulse(detect_cpu()).steps == 1


def test_one_accelerator_waits_seldom(monkeypatch):
    cpu = detect_cpu()
    fields = {name: getattr(cpu, name) for name in cpu.__dataclass_fields__} | {"kind": "cuda"}
    assert Pulse(Device(**fields)).steps == SYNC_STEPS


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_alone_a_rank_agrees_with_itself(stop, fault):
    assert Pulse(detect_cpu()).agree(stop, fault, 3) == (stop, fault)
