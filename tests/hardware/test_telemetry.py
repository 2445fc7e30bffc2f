import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.hardware import Sampler, Telemetry, detect, detect_cpu, read, telemetry
from hyperion.hardware.cpu import HostLoad
from hyperion.hardware.telemetry import QUANTITIES, from_raw, median_of
from tests.hardware.machines import facts

READINGS = st.lists(
    st.builds(
        from_raw,
        st.fixed_dictionaries(
            {
                "clock_mhz": st.none() | st.floats(0, 4000),
                "power_w": st.none() | st.floats(0, 1500),
                "throttle": st.none() | st.sampled_from(["none", "sw_power_cap", "sw_power_cap+hw_slowdown"]),
            }
        ),
        st.just("not reported"),
    ),
    min_size=1,
    max_size=20,
)


def test_a_zero_is_unreadable_with_its_reason():
    reading = from_raw({"clock_mhz": 0, "power_w": 120.0}, "not reported")
    assert reading.clock_mhz is None and reading.power_w == 120.0
    assert reading.unreadable["clock_mhz"] == "not reported" and "power_w" not in reading.unreadable
    assert reading.power_scope == "device"


@given(READINGS)
def test_medians_are_never_zero_and_missing_ones_have_a_reason(readings):
    summary = median_of(readings)
    assert summary.samples == len(readings)
    for name in QUANTITIES:
        value = getattr(summary, name)
        assert value != 0
        assert (value is None) == (name in summary.unreadable)


def test_medians_skip_what_was_unreadable_and_join_throttle_reasons():
    readings = [
        Telemetry(clock_mhz=1000, throttle="none"),
        Telemetry(clock_mhz=None, throttle="sw_power_cap+hw_thermal"),
        Telemetry(clock_mhz=1400, throttle="sw_power_cap"),
    ]
    summary = median_of(readings)
    assert summary.clock_mhz == 1200 and summary.throttle == "hw_thermal+sw_power_cap"
    assert median_of([Telemetry(throttle="none")]).throttle == "none"
    assert median_of([Telemetry()]).throttle is None


def test_the_sampler_reads_beside_the_block():
    seen = threading.Event()
    readings = iter(range(1, 10**9))

    def reader():
        value = next(readings)
        if value == 5:
            seen.set()
        return Telemetry(clock_mhz=float(value))

    with Sampler(detect_cpu(facts()), interval_s=0.001, reader=reader) as sampler:
        assert seen.wait(30)
    assert sampler.telemetry.samples >= 5 and sampler.telemetry.clock_mhz >= 3
    assert not sampler._thread.is_alive()


def test_the_shortest_block_has_a_reading():
    with Sampler(detect_cpu(facts()), interval_s=60, reader=lambda: Telemetry(clock_mhz=7.0)) as sampler:
        pass
    assert sampler.telemetry.clock_mhz == 7.0 and sampler.telemetry.samples == 1


def test_a_fault_of_the_reader_is_raised_and_does_not_hide_the_blocks_own():
    def reader():
        raise ValueError("sensor gone")

    with pytest.raises(ValueError, match="sensor gone"), Sampler(detect_cpu(facts()), reader=reader):
        pass
    with pytest.raises(KeyError), Sampler(detect_cpu(facts()), reader=reader):
        raise KeyError("the block's own")


def test_this_machines_cpu_is_read_without_zeros():
    reading = read(detect_cpu())
    assert all(getattr(reading, name) != 0 for name in QUANTITIES)
    assert reading.power_w is None and reading.unreadable["power_w"]


@pytest.mark.parametrize(
    ("share", "ranks", "throttle"),
    [(0.3, "1", "busy"), (0.05, "1", "none"), (None, "1", None), (0.3, "2", None), (0.3, "abc", None)],
)
@pytest.mark.parametrize("stolen", [0.0, 0.04])
def test_a_cpu_that_others_use_is_busy(monkeypatch, share, ranks, throttle, stolen):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    load = None if share is None else HostLoad(share - stolen, stolen)
    monkeypatch.setattr(telemetry.OtherLoad, "shares", lambda of_host: load)
    monkeypatch.setattr(telemetry, "_BUSY_SHARE", 0.1)
    with Sampler(detect_cpu()) as sampler:
        pass
    assert sampler.telemetry.throttle == throttle
    assert ("throttle" in sampler.telemetry.unreadable) == (throttle is None)
    assert sampler.telemetry.host_load == (load if ranks == "1" else None)


def test_a_busy_host_is_recorded_for_a_gpu_and_does_not_count_as_its_throttling(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(telemetry.OtherLoad, "shares", lambda of_host: HostLoad(0.5, 0.1))
    monkeypatch.setattr(telemetry, "_BUSY_SHARE", 0.1)
    reading = Telemetry(clock_mhz=1980.0, throttle="none")
    with Sampler(detect(facts("H100 SXM")), reader=lambda: reading) as sampler:
        pass
    assert sampler.telemetry.throttle == "none" and sampler.telemetry.host_load == HostLoad(0.5, 0.1)
