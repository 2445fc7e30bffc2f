"""Every planted fault is caught by its check and every clean twin passes; without its check a fault is reported as not caught."""

from types import SimpleNamespace

import pytest

from hyperion.chapter import rows
from hyperion.doctor.harness import ALL_FAULTS
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.hardware.cpu import HostLoad
from hyperion.hardware.device import Device
from hyperion.measure import planted_faults
from hyperion.measure.clock import timing
from hyperion.measure.clock.verify import Verification
from hyperion.measure.collectives.collectives import Buffers
from hyperion.measure.planted_faults import FAULTS, PlantedFault, run_self_test
from hyperion.measure.products import gemm
from hyperion.measure.products.gemm import Gemm
from hyperion.models.reference import VisionTransformer
from hyperion.results import Row, series

CPU = detect_cpu()
BY_NAME = {fault.name: fault for fault in ALL_FAULTS}


@pytest.fixture(scope="module")
def results():
    return {result.name: result for result in run_self_test(CPU, ALL_FAULTS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_the_fault_is_caught_and_its_clean_twin_passes(results, name):
    result = results[name]
    assert result.caught, result.message
    assert result.twin_passes, result.twin_message
    assert result.passed and result.believed and result.message


@pytest.mark.slow
def test_the_ways_to_be_wrong_that_the_book_promises_are_all_there(results):
    assert len(FAULTS) >= 10 and set(FAULTS) <= set(ALL_FAULTS) and len(BY_NAME) == len(ALL_FAULTS)
    for words in (
        "no synchronisation",
        "no warm-up",
        "flush",
        "constant data",
        "FLOP",
        "module",
        "GiB",
        "MHz",
        "drift",
        "rank",
        "above the peak",
        "substituted",
        "0 instead of an unreadable value",
        "never written",
        "skips work",
        "labelled cold",
    ):
        assert any(words in name for name in results), words
    assert sum(result.seconds for result in results.values()) < 60


# What each check's place in the production path is, and what leaves it without effect.
DISABLED = {
    "no synchronisation": (timing, "require_whole_work", lambda *given: None),
    "no warm-up": (timing.Timing, "unsteady", ""),
    "no synchronisation after a block of calls": (timing, "require_whole_work", lambda *given: None),
    "a cache flush that reads nothing": (timing, "require_flushed", lambda *given: None),
    "no cache flush": (timing, "require_flushed", lambda *given: None),
    "constant data with a wrong label": (gemm, "require_passed", lambda *given: None),
    "a multiply-add counted as one FLOP": (gemm, "require_product_flops", lambda *given: None),
    "a timed region that skips work": (timing, "require_whole_work", lambda *given: None),
    "an output that is never written": (Gemm, "_verified", lambda product: Verification("none", 0.0, 1.0)),
    "bf16 labelled as fp32": (Gemm, "_verified", lambda product: Verification("none", 0.0, 1.0)),
    "clock drift during sampling": (series, "DRIFT_TOLERANCE", 1e9),
    "work outside of every phase": (Row, "_failure", lambda row: ""),
    "kHz taken for MHz": (Device, "__post_init__", lambda device: None),
    "a value above the peak": (Row, "_failure", lambda row: ""),
    "0 instead of an unreadable value": (Row, "validate", lambda row: None),
    "only the fastest sample": (Row, "validate", lambda row: None),
    "a rank with wrong values": (Buffers, "wrong", lambda buffers: (0, None)),
    "samples of a warm cache labelled cold": (rows, "require_cache_label", lambda *given: None),
    "a substituted model": (VisionTransformer, "build", lambda model: None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISABLED)
def test_without_its_check_a_fault_is_reported_as_not_caught(monkeypatch, name):
    owner, attribute, nothing = DISABLED[name]
    monkeypatch.setattr(owner, attribute, nothing)
    (result,) = run_self_test(CPU, [BY_NAME[name]])
    assert not result.caught and not result.passed and result.believed
    assert result.message == "no error raised"


def test_without_the_device_table_a_module_passes_for_a_die(monkeypatch):
    monkeypatch.setattr(planted_faults, "lookup", lambda device: ("a data sheet", ""))
    names = ["compute units of a whole module instead of one die", "GB taken for GiB"]
    assert [r.caught for r in run_self_test(CPU, [BY_NAME[name] for name in names])] == [False, False]


def test_an_error_for_another_reason_is_not_a_catch_and_a_check_that_refuses_everything_fails_its_twin():
    def breaks(device, broken, believe):
        raise ZeroDivisionError("some other mishap")

    def refuses(device, broken, believe):
        raise timing.HarnessError("the samples drifted")

    other, everything = run_self_test(
        CPU,
        [
            PlantedFault("other", "c", "the samples drifted", breaks),
            PlantedFault("everything", "c", "the samples drifted", refuses),
        ],
    )
    assert not other.caught and other.message == "ZeroDivisionError: some other mishap"
    assert everything.caught and not everything.twin_passes and not everything.passed


@pytest.mark.parametrize(
    ("share", "caught_at", "tries", "passed"),
    [(0.5, 1, 1, True), (0.5, 2, 2, True), (0.5, 3, 3, True), (0.5, 4, 3, False), (0.05, 2, 1, False), (None, 2, 1, False)],
)
def test_a_fault_that_load_may_hide_is_planted_again_and_any_other_is_not(share, caught_at, tries, passed, monkeypatch):
    planted = []

    def plant(device, broken, believe):
        if broken:
            planted.append(1)
            if len(planted) >= caught_at:
                raise HyperionError("refused", where="a check", next_step="none")

    seen = None if share is None else HostLoad(share, 0.0)
    monkeypatch.setattr(planted_faults, "OtherLoad", lambda: SimpleNamespace(shares=lambda: seen))
    (result,) = run_self_test(CPU, [PlantedFault("a fault", "a check", "refused", plant)])
    assert (len(planted), result.passed) == (tries, passed)
