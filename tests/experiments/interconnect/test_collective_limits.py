"""What the links allow, by device, number of ranks, and whether the switch may do the adding."""

import pytest

from hyperion.experiments.interconnect.collectives import LOOPBACK, busbw_limit
from hyperion.hardware import detect, detect_cpu
from hyperion.measure import ALL_COLLECTIVES
from tests.hardware.machines import facts


@pytest.fixture
def limit(monkeypatch):
    def of(machine: str, name: str, ranks: int, nvls: str | None = "0"):
        if nvls is None:
            monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
        else:
            monkeypatch.setenv("NCCL_NVLS_ENABLE", nvls)
        return busbw_limit(detect(facts(machine)), ALL_COLLECTIVES[name], ranks)

    return of


def test_links_bound_every_collective_alike(limit):
    for name in ALL_COLLECTIVES:
        value, source = limit("H200", name, 4)
        assert (
            value == 450
            and source.startswith("link")
            and "NVLink 4, all links together, each way" in source
            and "NVIDIA" in source
        )


@pytest.mark.parametrize(("ranks", "most"), [(2, 450), (4, 675), (8, 787.5)])
def test_a_switch_that_adds_may_beat_the_link_and_only_in_an_all_reduce(limit, ranks, most):
    """482 GB/s have been published for eight H200s: bus bandwidth counts bytes that an adding switch does not send."""
    assert limit("H200", "all_reduce", ranks, nvls=None)[0] == most
    assert limit("H200", "all_gather", ranks, nvls=None)[0] == 450
    assert "NVLS" in limit("H200", "all_reduce", ranks, nvls=None)[1]


def test_a_limit_without_the_switch_says_which_setting_turned_it_off(limit):
    value, source = limit("H200", "all_reduce", 4, nvls="0")
    assert value == 450 and source.endswith("NVLS off (NCCL_NVLS_ENABLE=0)")
    # Where the switch has no part in it, neither has the setting.
    others = [("H200", "all_gather", "0"), ("A100-80", "all_reduce", "0"), ("MI300X", "all_reduce", "0")]
    for machine, name, nvls in [*others, ("H200", "all_reduce", "1")]:
        assert "NVLS off" not in limit(machine, name, 4, nvls=nvls)[1]


def test_amd_has_no_such_switch_and_its_links_are_shared_by_the_peers(limit):
    assert limit("MI300X", "all_reduce", 8, nvls=None)[0] == 448
    assert limit("MI300X", "all_reduce", 2, nvls=None)[0] == 64
    value, reason = limit("MI250X", "all_reduce", 8)
    assert value is None and reason.startswith("no limit: ") and "different numbers of links" in reason


def test_a_message_to_one_other_has_the_links_of_that_pair_and_an_all_to_all_those_to_all_others(limit):
    """On MI300X a pair has a seventh of a device's links, in whatever company; an H200's go to whom it likes."""
    assert limit("MI300X", "send_recv", 8)[0] == 64 and limit("MI300X", "all_to_all", 8)[0] == 448
    assert limit("H200", "send_recv", 4)[0] == 450
    assert limit("H200", "send_recv", 2)[1].startswith("link, from each device to one other, one direction: ")
    assert limit("H200", "all_to_all", 2)[1].startswith("link, from each device to all others at once, one direction: ")
    # A ring over all dies of MI250X has pairs with fewer links.
    assert limit("MI250X", "send_recv", 2)[0] == 200 and limit("MI250X", "send_recv", 8)[0] is None


def test_without_links_there_is_no_limit_and_the_reason(limit):
    assert limit("H100 PCIe", "all_reduce", 2)[0] is None
    assert busbw_limit(detect_cpu(), ALL_COLLECTIVES["broadcast"], 2) == (None, LOOPBACK)
