"""What `measure.time` and `measure.compare` accept: outputs that are right in every element, written by every call and finished
when the call returns, arguments within their ranges, and limits that limit."""

import contextlib
import functools
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hyperion import measure
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure import HarnessError
from hyperion.measure.api import functions, outputs, unfinished_work
from hyperion.measure.api.outputs import Returned, captured_tensors, difference, element_tolerance
from hyperion.measure.api.unfinished_work import WorkLeft, require_nothing_left
from hyperion.measure.clock.verify import OutputMismatchError
from hyperion.results import RowError
from hyperion.results.statistics import order_interval

CPU = detect_cpu()
SHORT = {"device": "cpu", "cold": False, "minimum_samples": 5, "time_limit_s": 1.5}
PLACE = {"notebook": "my_notebook", "experiment": "my_experiment", "variant": "mine"}
# A generous bound on a hang, not a target.
HANG_S = 60


def snapshot(value):
    return Returned([("", value)], "one leaf", draws=False).snapshot()


def apart(a, b, **options):
    return difference(snapshot(a), snapshot(b), **{"reduction": 4096, **options})


def noise(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


# Element by element


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_one_wrong_element_of_a_million_is_found_and_named(dtype):
    x = noise(1000, 1000, dtype=dtype)
    row, column = divmod(int((x.double().abs() - 1).abs().argmin()), 1000)  # of a size like most of them
    wrong = x.clone()
    wrong[row, column] *= 1.09
    found = apart(wrong, x)
    assert found.error <= found.tolerance or dtype == torch.float64, "the norm alone lets it pass"
    assert not found.agrees and f"output[{row}, {column}]: " in found.worst


@pytest.mark.slow
def test_a_wrong_element_makes_the_answer_say_so_and_refuses_its_row():
    x = noise(1000, 1000)
    factor = torch.ones_like(x)
    factor[7, 9] = 1.09
    answer = measure.compare(lambda: x * factor, lambda: x * 1, **{**SHORT, "time_limit_s": 5.0})
    assert answer.outputs_agree is False and "OUTPUTS DIFFER" in str(answer) and "output[7, 9]: " in str(answer)
    with pytest.raises(RowError, match="worst element of the outputs"):
        answer.row(**PLACE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("terms", [64, 4096])
def test_another_order_of_the_sums_passes(dtype, terms):
    a, b = noise(64, terms, dtype=dtype), noise(terms, 64, dtype=dtype)
    order = torch.randperm(terms, generator=torch.Generator().manual_seed(1))
    assert apart(a @ b, a[:, order] @ b[order], reduction=a.numel()).agrees


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz])
def test_eight_bits_may_be_rounded_but_not_scaled(dtype):
    x = noise(64, 64)
    assert apart(x.to(dtype), x).agrees and apart(x, x.to(dtype)).agrees
    neighbour = x.to(dtype).view(torch.uint8).clone()
    neighbour[0, 0] += 1
    assert apart(x.to(dtype), neighbour.view(dtype)).agrees
    assert not apart((2 * x).to(dtype), x).agrees and not apart((2 * x).to(dtype), x.to(dtype)).agrees


def test_outputs_without_elements_agree_and_say_so():
    found = apart(torch.empty(0, 3), torch.empty(0, 3))
    assert found.agrees and found.worst == "output: it has no elements"


def test_the_tolerance_of_an_element_grows_with_the_root_of_the_reduction_and_ends():
    eps = torch.finfo(torch.float32).eps
    assert element_tolerance(torch.float32, 1 << 16) == pytest.approx((4 + 256) * eps)
    assert element_tolerance(torch.float32, 1) == element_tolerance(torch.float32, 1 << 12)
    assert element_tolerance(torch.float32, 1 << 30) == element_tolerance(torch.float32, 1 << 24)
    assert element_tolerance(torch.bfloat16, 1) == pytest.approx(4 * torch.finfo(torch.bfloat16).eps + 64 * eps)
    assert element_tolerance(torch.int64, 1 << 20) == 0


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_agree_only_with_themselves_at_the_same_place(strange):
    x = noise(100)
    a, b = x.clone(), x.clone()
    a[3] = strange
    assert not apart(a, b).agrees and "output[3]: " in apart(a, b).worst
    b[3] = strange
    assert apart(a, b).agrees and apart(a, b).error == 0
    b[3], b[4] = x[3], strange
    assert not apart(a, b).agrees
    b = a.clone()
    b[3] = 1.0 if np.isnan(strange) else -strange
    assert not apart(a, b).agrees


def test_integers_beyond_float64_and_complex_numbers_are_compared_exactly_and_by_element():
    large = torch.tensor([2**53, 5])
    assert apart(large, large).agrees and not apart(large, large + torch.tensor([1, 0])).agrees
    z = torch.complex(noise(50), noise(50))
    wrong = z.clone()
    wrong[7] += 0.01j
    assert apart(z, z.clone()).agrees and "output[7]: " in apart(wrong, z).worst and not apart(wrong, z).agrees
    assert apart(torch.empty(0), torch.empty(0)).agrees


@pytest.mark.parametrize("tolerance", [-1e-3, float("nan"), float("inf"), "1e-3"])
def test_a_tolerance_is_a_relative_error(tolerance):
    with pytest.raises(HyperionError, match="tolerance is"):
        measure.compare(lambda: None, lambda: None, tolerance=tolerance, **SHORT)


# Checked again after the timing


def turning(after, right, wrong):
    """A function that computes something else from a call on."""
    calls = []

    def function():
        calls.append(None)
        return (right if len(calls) <= after else wrong)()

    return function


def test_an_output_that_changed_while_it_was_timed_is_refused():
    x = noise(64)
    with pytest.raises(
        HarnessError, match=r"a call after the timing returned a different value than the first two calls: output\[\d+\]"
    ):
        measure.time(turning(5, lambda: x * 2, lambda: x * 2.1), **SHORT)
    answer = measure.compare(turning(5, lambda: x * 2, lambda: x * 2.1), lambda: x * 2, **SHORT)
    assert answer.outputs_agree is False
    with pytest.raises(OutputMismatchError, match="shapes"):
        measure.time(turning(5, lambda: x * 2, lambda: x[:3] * 2), **SHORT)


def test_both_sides_that_change_alike_are_found_by_their_own_first_output():
    x = noise(64)
    sides = [turning(5, lambda: x * 2, lambda: x * 0) for _ in range(2)]
    assert measure.compare(*sides, labels=("A", "B"), **SHORT).outputs_agree is False


def test_a_second_call_that_differs_between_the_sides_is_found():
    x = noise(64)
    assert measure.compare(turning(1, lambda: x * 2, lambda: x * 3), lambda: x * 2, **SHORT).outputs_agree is False


def test_a_function_that_changes_the_input_of_the_other_is_named_with_the_tensor():
    x, alone, buffer = noise(64), noise(64), torch.empty(64)
    changes, reads = (lambda: x.mul_(1.5).sum()), (lambda: x.sum())
    note = "A writes to x, which B uses too"
    assert note in str(measure.compare(changes, reads, labels=("A", "B"), **SHORT))
    assert "B writes to x, which A uses too" in str(measure.compare(reads, changes, labels=("A", "B"), **SHORT))
    assert note not in str(measure.compare(lambda: alone.mul_(1.5).sum(), reads, labels=("A", "B"), **SHORT))
    # Memory of the same name counts only if it is the same memory.
    writes = lambda: torch.mul(alone, 2, out=buffer)  # noqa: E731
    assert "uses too" not in str(measure.compare(writes, lambda: alone * 2, **SHORT))
    # A view shares the memory of its base.
    part = x[:8]
    assert note in str(measure.compare(changes, lambda: part.sum(), labels=("A", "B"), **SHORT))


def test_a_model_that_both_functions_train_is_named_once_with_the_number_of_its_tensors():
    model, x = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), noise(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    text = str(measure.compare(step, lambda: model(x).sum().detach(), labels=("step", "forward"), **SHORT))
    assert text.count("which forward uses too") == 1 and "and 3 other tensors" in text


def test_different_outputs_of_functions_that_draw_random_numbers_say_why():
    x = noise(64)
    note = "draw random numbers"
    ours, theirs = (lambda: torch.rand(64) * x), (lambda: torch.rand(65)[1:] * x)
    assert note in str(measure.compare(ours, theirs, **SHORT))
    assert note not in str(measure.compare(ours, ours, labels=("A", "B"), **SHORT))
    assert note not in str(measure.compare(lambda: x * 2, lambda: x * 3, **SHORT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_outputs_that_are_not_finite_agree_with_a_note(dtype):
    values = torch.tensor([1.0, float("nan"), float("inf"), 2.0]).to(dtype)
    answer = measure.compare(lambda: [values.clone(), 1.0], lambda: [values.clone(), 1.0], labels=("A", "B"), **SHORT)
    assert answer.outputs_agree
    for label in "AB":
        assert f"{label}: 2 of 4 values of output[0] are NaN or infinite" in str(answer)
    finite = torch.ones(4).to(dtype)
    assert "NaN" not in str(measure.time(finite.clone, **SHORT))
    assert "2 of 4 values of output are NaN" in str(measure.time(values.clone, **SHORT))


def test_a_step_that_changes_its_state_is_timed_and_says_what_was_not_checked():
    weight = torch.ones(8)

    def step():
        weight.mul_(1.5)
        return weight.sum()

    answer = measure.time(step, **SHORT)
    assert "calls return different values" in str(answer)


# Written by every call


def cached():
    made = []

    def function():
        if not made:
            made.append(noise(64) * 2)
        return made[0]

    return function


def late_cache(after):
    calls, made = [], []

    def function():
        calls.append(None)
        if len(calls) <= after:
            return noise(64) * 2
        made[1:] = []
        made[:] = made or [noise(64) * 2]
        return made[0]

    return function


@pytest.mark.parametrize(
    "make",
    [cached, lambda: functools.cache(lambda: noise(64) * 2), lambda: late_cache(5)],
    ids=["a cache", "functools.cache", "a cache that begins late"],
)
@pytest.mark.parametrize(
    "ask", [measure.time, lambda f, **options: measure.compare(f, lambda: noise(64) * 2, **options)], ids=["time", "compare"]
)
def test_a_call_that_writes_nothing_is_refused(ask, make):
    with pytest.raises(HarnessError, match="(of an earlier call|is made.0.) .*did not write to"):
        ask(make(), **SHORT)


def test_a_buffer_that_is_no_longer_written_is_refused_and_left_as_it_was():
    x, out, calls = noise(64), torch.zeros(64), []

    def function():
        calls.append(None)
        return torch.mul(x, 2, out=out) if len(calls) <= 5 else out

    with pytest.raises(HarnessError, match=r"the output aliases an input: it is out \(torch.float32 \[64\]\)"):
        measure.time(function, **SHORT)
    assert torch.equal(out, x * 2)


@pytest.mark.slow
def test_outputs_that_are_inputs_are_refused_by_name_and_left_as_they_were():
    x, held = noise(8, 8), {"weights": [noise(4)]}
    layer, count = torch.nn.Linear(4, 4), torch.arange(3)
    before = x.clone()
    for function, name in (
        (lambda: x, "x"),
        (lambda: x.T, "x"),
        (lambda: x[1:, :2], "x"),
        (lambda: held["weights"][0], r"held\['weights'\]\[0\]"),
        (lambda: layer.weight, "layer.weight"),
        (lambda: count, "count"),
        (functools.partial(lambda given: given, x), r"\[0\]"),
        (lambda: x.expand(3, 8, 8), "x"),
    ):
        with pytest.raises(HarnessError, match=f"the output aliases an input: it is {name} "):
            measure.time(function, **SHORT)
    assert torch.equal(x, before) and count.tolist() == [0, 1, 2] and torch.isfinite(layer.weight).all()


def test_buffers_that_every_call_writes_are_timed_and_hold_their_result():
    x, out = noise(64), torch.empty(64)
    assert "settled" in measure.time(lambda: torch.mul(x, 2, out=out), **SHORT).verdict
    assert torch.equal(out, x * 2)
    with torch.inference_mode():
        kept = torch.empty(64)
        assert measure.time(lambda: kept.copy_(x), **SHORT).notes == ()
    array, source = np.zeros(64), np.ones(64)
    tensor = torch.from_numpy(array)
    assert measure.time(lambda: (np.copyto(array, source), tensor)[1], **SHORT).notes == (
        "the function: it is unknown whether the call wrote its output: its memory is shared with NumPy or another library",
    )


@pytest.mark.slow
def test_the_state_of_a_training_step_is_left_as_it_was():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(4, 4), noise(8, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-6)

    def step():
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
        return layer.weight

    measure.time(step, **SHORT)
    held = [*layer.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    assert all(torch.isfinite(tensor).all() for tensor in held)


def test_nothing_that_a_call_could_read_is_ever_overwritten():
    x, seen = noise(64), []
    out = torch.zeros(64)

    def watched():
        seen.append(bool(torch.isfinite(out).all()))
        return torch.mul(x, 2, out=out)

    measure.time(watched, **SHORT)
    measure.time(lambda: x.relu_(), **SHORT)
    assert all(seen) and (x >= 0).all()


def test_inputs_beside_what_is_computed_are_returned_unharmed_with_a_note():
    ids, table = torch.arange(5), torch.nn.Embedding(5, 3)
    answer = measure.time(lambda: {"ids": ids, "h": table(ids)}, **SHORT)
    assert "returns its input ids in addition to computed values" in str(answer) and ids.tolist() == [0, 1, 2, 3, 4]
    kept = []

    def cached_beside():
        kept[:] = kept or [noise(8)]
        return kept[0], table(ids)

    assert "in addition to computed values" in str(measure.time(cached_beside, **SHORT))
    with pytest.raises(HarnessError, match="of an earlier call .*did not write to this memory"):
        hidden = functools.cache(lambda: noise(8))
        measure.time(lambda: (hidden(), table(ids)), **SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, rate, dtype",
    [(torch.optim.AdamW, 3e-4, torch.bfloat16), (torch.optim.SGD, 1e-6, torch.float32), (torch.optim.SGD, 1e-1, torch.float32)],
)
def test_a_step_whose_loss_changes_slowly_is_timed_with_a_note(optimizer, rate, dtype):
    def training():
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(64, 64, dtype=dtype), noise(32, 64, dtype=dtype)
        steps = optimizer(layer.parameters(), lr=rate)

        def step():
            steps.zero_grad()
            loss = layer(x).square().mean() * 100
            loss.backward()
            steps.step()
            return loss.detach()

        return step

    longer = {**SHORT, "time_limit_s": 3.0, "minimum_samples": 200}
    measure.time(training(), **longer)
    answer = measure.compare(training(), training(), labels=("A", "B"), **longer)
    assert "OUTPUTS DIFFER" not in str(answer)


def test_notes_on_the_output_stand_apart_from_the_verdict():
    weight = torch.ones(8)
    answer = measure.time(lambda: weight.add_(1.0).sum(), **{**SHORT, "time_limit_s": 2.0})
    assert "different values" not in answer.verdict and "\nnote: " in str(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(5).to(torch.uint16),
        lambda: torch.arange(5).to(torch.uint32),
        lambda: torch.arange(5).to(torch.uint64),
        lambda: torch.quantize_per_tensor(torch.arange(5.0), 0.1, 0, torch.quint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.arange(5.0).to(torch.float8_e4m3fn),
        lambda: torch.ones(3, dtype=torch.complex32),
        lambda: torch.eye(3).to_sparse(),
    ],
    ids=["uint16", "uint32", "uint64", "quantized", "nested", "float8", "complex32", "sparse"],
)
def test_outputs_of_rare_kinds_are_compared(make):
    kept = make()
    assert measure.compare(make, make, labels=("A", "B"), **SHORT).outputs_agree
    with contextlib.suppress(HarnessError):  # it is refused, or cannot be seen to be written
        measure.time(lambda: kept, **SHORT)


def test_an_output_without_numbers_is_said_not_to_be_compared():
    answer = measure.time(lambda: torch.empty(3, device="meta"), **SHORT)
    assert "the values of output cannot be read, so they were not compared" in str(answer)


def test_large_outputs_are_sampled_evenly():
    large = torch.zeros(1 << 12, 1 << 4)
    bits = outputs._bits(large, most=1 << 10)
    assert bits.numel() <= 4 << 10
    large += 1.0
    assert not torch.equal(bits, outputs._bits(large, most=1 << 10))
    assert outputs._bits(torch.ones(1).expand(1 << 40)).numel() == 4


def test_the_inputs_of_a_function_are_found_wherever_it_keeps_them():
    a, b, c, d = (torch.ones(1) for _ in range(4))

    class Step:
        def __init__(self):
            self.state = {"a": a}

        def __call__(self, given=b):
            return given

    def outer(function, *, named=c):
        return lambda: (function, named, d)

    found = captured_tensors(outer(Step()))
    assert {id(tensor) for tensor in found.values()} >= {id(a), id(c), id(d)}
    assert [id(t) for t in captured_tensors(Step().__call__).values()] == [id(b), id(a)]


# Finished when the call returns


def test_work_left_to_a_new_thread_is_refused():
    def leave():
        threading.Thread(target=time.sleep, args=(0.05,)).start()

    def work():
        time.sleep(0.05)

    with pytest.raises(HarnessError, match="is still working after the call returned"):
        measure.time(leave, **{**SHORT, "time_limit_s": 5.0})
    with pytest.raises(HarnessError, match="is still working after the call returned"):
        measure.compare(lambda: threading.Thread(target=work).start(), work, **{**SHORT, "time_limit_s": 5.0})


@pytest.fixture
def pool():
    pool = ThreadPoolExecutor(1)
    yield pool
    pool.shutdown(cancel_futures=True)


def test_work_left_to_a_pool_is_refused_and_a_future_that_is_not_done_too(pool):
    pool.submit(int).result()

    def leave():
        pool.submit(time.sleep, 0.5)

    with pytest.raises(HarnessError, match="is still working after the call returned"):
        measure.time(leave, **SHORT)
    with pytest.raises(HarnessError, match="returned a Future whose work is not done"):
        measure.time(lambda: pool.submit(time.sleep, 0.5), **SHORT)


def test_work_that_waits_in_the_queue_of_a_pool_is_refused(pool):
    gate, started = threading.Event(), threading.Event()
    pool.submit(lambda: started.set() or gate.wait())
    started.wait()
    # The only thread waits for the event, so it looks idle, as it would on a machine that is too busy to start it.
    try:
        with pytest.raises(HarnessError, match="is still working after the call returned"):
            measure.time(lambda: pool.submit(int) and None, **SHORT)
    finally:
        gate.set()


def test_work_that_starts_after_the_first_look_is_refused_before_the_timing(monkeypatch, pool):
    look, looks, submitted = WorkLeft.after_a_call, [], []

    def late(watch):
        looks.append(look(watch))
        return "" if len(looks) == 1 else looks[-1]

    monkeypatch.setattr(WorkLeft, "after_a_call", late)
    with pytest.raises(HarnessError, match="is still working after the call returned"):
        measure.time(lambda: submitted.append(pool.submit(time.sleep, 0.2)), **SHORT)
    assert len(submitted) == 2


def test_a_thread_that_is_blocked_in_a_read_is_nobody_s_work_and_one_that_computes_is():
    read, write = os.pipe()
    started, over = [], threading.Event()

    def start(target, *args):
        if not started:
            started.append(threading.Thread(target=target, args=args, daemon=True))
            started[0].start()

    def compute():
        while not over.is_set():
            sum(range(1000))

    measure.time(lambda: start(os.read, read, 1), **SHORT)
    os.write(write, b"x")
    started.pop().join()
    measure.time(lambda: start(lambda: os.read(read, 1)), **SHORT)
    os.write(write, b"x")
    started.pop().join()
    try:
        with pytest.raises(HarnessError, match="is still working after the call returned"):
            measure.time(lambda: start(compute), **SHORT)
    finally:
        over.set()
        started.pop().join()
        os.close(read)
        os.close(write)


def test_a_thread_that_has_not_reached_its_function_yet_does_not_wait():
    gate, reached, over = threading.Event(), threading.Event(), threading.Event()

    class SlowStart(threading.Event):
        def set(self):
            super().set()
            gate.wait()

    thread = threading.Thread(target=lambda: (reached.set(), over.wait()))
    thread._started = SlowStart()
    thread.start()
    try:
        assert not unfinished_work._waits(sys._current_frames()[thread.ident]) and not reached.is_set()
        gate.set()
        assert reached.wait(60)
        while not unfinished_work._waits(sys._current_frames()[thread.ident]):
            time.sleep(1e-3)
    finally:
        gate.set()
        over.set()
        thread.join()


def test_threads_that_rest_or_that_were_there_before_are_nobody_s_fault():
    over = threading.Event()

    def monitor():
        while not over.is_set():
            time.sleep(0.01)

    watcher = threading.Thread(target=monitor)
    watcher.start()
    try:
        with ThreadPoolExecutor(2) as pool:  # its threads begin with the first call
            answer = measure.time(lambda: list(pool.map(lambda i: time.sleep(1e-3), range(2))), **SHORT)
        assert len(answer.timing.samples_s) >= 5
    finally:
        over.set()
        watcher.join()


def test_once_is_a_thread_on_its_way_to_rest_and_twice_is_work():
    require_nothing_left(["a thread works", ""], "f")
    require_nothing_left([], "f")
    with pytest.raises(HarnessError, match="f: a thread works"):
        require_nothing_left(["a thread works", "a thread works"], "f")


@pytest.mark.parametrize("late_s, said", [(0.0, ""), (0.02, "on streams other than the current stream")])
def test_work_on_other_streams_shows_as_a_device_that_is_busy_after_the_current_one(monkeypatch, late_s, said):
    """An injected device: the event of the current stream has passed, and the device itself is busy for so long."""
    order = []

    class Event:
        def record(self):
            order.append("record")

        def synchronize(self):
            order.append("event")

    class Gpu:
        kind, torch_device = "cuda", "cuda:0"

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (order.append("device"), time.sleep(late_s)))
    monkeypatch.setattr(unfinished_work, "_STREAM_SETTLES_S", 0.01)
    assert WorkLeft(Gpu()).after_a_call().endswith(said) and order == ["record", "event", "device"]
    assert bool(WorkLeft(Gpu()).after_a_call()) == bool(said)


# Arguments


@pytest.mark.parametrize(
    "name, value",
    [
        ("minimum_samples", 2),
        ("minimum_samples", 0),
        ("minimum_samples", -5),
        ("minimum_samples", 3.5),
        ("minimum_samples", True),
        ("back_to_back", -1),
        ("back_to_back", 1.5),
        ("time_limit_s", 0),
        ("time_limit_s", -1.0),
        ("time_limit_s", float("nan")),
        ("time_limit_s", float("inf")),
        ("time_limit_s", "5"),
        ("device", "cpu:3"),
        ("device", "cuda:99"),
        ("device", "kuda"),
        ("device", ""),
        ("cold", "no"),
        ("quick", 1),
        ("alone", "yes"),
    ],
)
def test_arguments_outside_of_their_range_are_refused_with_it(name, value):
    for ask in (measure.time, lambda f, **options: measure.compare(f, lambda: None, **options)):
        with pytest.raises(HyperionError) as refused:
            ask(lambda: None, **{**SHORT, name: value})
        assert refused.value.next_step and not isinstance(refused.value, HarnessError)
    if name in ("minimum_samples", "back_to_back", "time_limit_s"):
        with pytest.raises(HyperionError, match=f"{name} is "):
            measure.time_function(lambda: None, CPU, **{"cold": False, name: value})


@pytest.mark.parametrize("labels", [("", "B"), ("A", " "), ("A", "A"), ("A",), "AB", ("A", 3), ("A", "B", "C")])
def test_labels_are_two_names_that_differ(labels):
    with pytest.raises(HyperionError, match="label"):
        measure.compare(lambda: None, lambda: None, labels=labels, **SHORT)


@pytest.mark.parametrize("ask", [measure.time, functools.partial(measure.memory), measure.flops])
def test_an_empty_label_is_refused(ask):
    with pytest.raises(HyperionError, match="label is ''"):
        ask(lambda: None, label="")


def test_calls_in_a_row_are_hot_unless_cold_is_asked_for():
    assert not measure.time(lambda: None, device="cpu", back_to_back=3, time_limit_s=0.2).timing.cold
    with pytest.raises(HyperionError, match="cannot start with a cold cache"):
        measure.time(lambda: None, device="cpu", back_to_back=3, cold=True)


# Limits


@pytest.mark.parametrize("call_s, limit_s", [(0.4, 0.5), (0.1, 0.3)])
def test_a_limit_that_three_samples_do_not_fit_into_is_refused_after_two_calls(call_s, limit_s):
    calls = []
    with pytest.raises(HyperionError, match=f"3 samples do not fit into {limit_s:g} s: a call of .* takes 0.") as refused:
        measure.time(lambda: (calls.append(None), time.sleep(call_s))[0], device="cpu", time_limit_s=limit_s)
    assert len(calls) == 2 and "time_limit_s=" in refused.value.next_step


@pytest.mark.slow
def test_a_limit_ends_sampling_before_the_minimum_and_says_so():
    calls, began = [], time.monotonic()

    def slow():
        calls.append(None)
        time.sleep(0.1)

    answer = measure.time(slow, device="cpu", cold=False, minimum_samples=30, time_limit_s=1.2)
    taken = len(answer.timing.samples_s)
    assert 3 <= taken < 12 and f"{taken} of 30 samples fit into the time limit" in answer.verdict
    # The first call is not counted; sleeps on a busy machine take longer than they ask for, and at most one call is over.
    assert len(calls) <= 14 and time.monotonic() - began < HANG_S


def test_without_a_limit_a_slow_function_gets_the_fewest_calls(monkeypatch):
    monkeypatch.setattr(functions, "_LIMIT_S", 0.01)
    answer = measure.time(lambda: time.sleep(0.05), device="cpu", cold=False)
    assert 3 <= len(answer.timing.samples_s) < 12


def test_the_limit_of_explain_ends_its_samples_too():
    calls = []

    def step():
        calls.append(None)
        time.sleep(0.05)
        return torch.ones(4) * 2

    answer = measure.explain(step, device="cpu", profiled_steps=1, minimum_samples=30, time_limit_s=0.4)
    assert 3 <= len(answer.timing.samples_s) < 8 and len(calls) < 25
    for wrong in ({"minimum_samples": 2}, {"time_limit_s": -1.0}, {"profiled_steps": 0}, {"profiled_steps": 1.5}):
        with pytest.raises(HyperionError):
            measure.explain(step, device="cpu", **wrong)


@pytest.mark.slow
def test_few_samples_give_the_interval_of_order_statistics_and_say_what_it_holds():
    assert order_interval(np.arange(5.0), 0.95) == (0.0, 4.0)
    assert order_interval(np.arange(20.0), 0.95) == (5.0, 14.0)  # holds with 95.86 %, by the binomial distribution
    taken = measure.time(lambda: None, device="cpu", cold=False, quick=True)
    for n, says in ((5, True), (6, False)):
        samples = np.array([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])[:n]
        answer = replace(taken, timing=replace(taken.timing, samples_s=samples))
        assert ("not 95 %" in answer.verdict) == says
        assert (answer.estimate.ci_low, answer.estimate.ci_high) == (1.0, samples.max())


@pytest.mark.parametrize("n", [7, 10, 20])
def test_the_intervals_of_few_samples_hold_the_median_as_often_as_they_say(n):
    generator = np.random.default_rng(0)
    held = []
    for _ in range(1000):
        low, high = order_interval(generator.lognormal(0, 1, n), 0.95)
        held.append(low <= 1 <= high)
    assert np.mean(held) >= 0.935  # 0.95 less two standard errors


# Quick


@pytest.mark.slow
def test_quick_takes_a_fifth_of_a_second_of_sampling_and_says_what_it_gives_up():
    answer = measure.time(lambda: time.sleep(1e-3), device="cpu", quick=True)
    samples = answer.timing.samples_s
    assert not answer.timing.cold and len(samples) >= 10
    assert samples.sum() <= 0.25 * (1 + samples.max() / 1e-3), "sampling ends with the limit"
    assert answer.estimate.ci_low <= answer.estimate.value <= answer.estimate.ci_high
    assert measure.compare(lambda: None, lambda: None, labels=("A", "B"), device="cpu", quick=True).ratio.n >= 10


@dataclass
class ModelOutput:
    logits: torch.Tensor
    label: str = "cat"


def test_the_fields_of_dataclasses_are_compared():
    ones, zeros = torch.ones(3), torch.zeros(3)
    same = measure.compare(lambda: (ones.sum(), ModelOutput(ones * 1)), lambda: (ones.sum(), ModelOutput(ones * 1)), **SHORT)
    assert same.difference is not None and same.difference.agrees and "not compared" not in str(same)
    other = measure.compare(lambda: (ones.sum(), ModelOutput(ones * 1)), lambda: (ones.sum(), ModelOutput(zeros * 1)), **SHORT)
    assert other.difference is not None and not other.difference.agrees and "output[1]['logits'][0]" in str(other)


@pytest.mark.parametrize(
    "other", [lambda values: ModelOutput(values * 1, "dog"), lambda values: {"logits": values, "label": "cat"}]
)
def test_other_texts_and_other_types_are_another_structure(other):
    values = torch.ones(3)
    with pytest.raises(OutputMismatchError, match="different structures"):
        measure.compare(lambda: ModelOutput(values * 1), lambda: other(values), **SHORT)


def test_an_object_beside_a_tensor_is_named_as_not_compared():
    values = torch.ones(3)
    answer = measure.compare(lambda: (values.sum(), object()), lambda: (values.sum(), object()), **SHORT)
    assert "the values of output[1] cannot be read, so they were not compared" in str(answer)


async def waits() -> float:
    return 1.0


def test_a_returned_generator_or_coroutine_is_refused():
    with pytest.raises(HarnessError, match=r"returned a generator, which has not run yet"):
        measure.time(lambda: (i for i in range(3)), **SHORT)
    coroutine = waits()
    with pytest.raises(HarnessError, match=r"returned a coroutine, which has not run yet"):
        measure.time(lambda: coroutine, **SHORT)
    coroutine.close()
