"""A researcher's four questions: what is answered is measured, printed, drawn and stored; what cannot be asked is said. No speed
is asserted, only who of two sleepers is faster."""

import subprocess
import sys
import time as clock
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from hyperion import measure
from hyperion.errors import HyperionError
from hyperion.hardware import Telemetry, detect_cpu
from hyperion.measure import Timing
from hyperion.measure.api.answers import ComparisonAnswer, _doubts, bytes_text, estimate_text, flops_text, seconds_text
from hyperion.measure.api.arguments import device_of
from hyperion.measure.api.outputs import OUTPUT_TOLERANCE, call_from_seed
from hyperion.measure.clock.verify import OutputMismatchError
from hyperion.results import Estimate, RowError, rows_from_csv, rows_to_csv

PLACE = {"notebook": "my_notebook", "experiment": "my_experiment", "variant": "mine"}
QUICK = {"device": "cpu", "cold": False, "minimum_samples": 10, "time_limit_s": 1.5}
KIB = 256  # float32 elements


def sleeper(milliseconds, returns=None):
    def sleep():
        clock.sleep(milliseconds / 1e3)
        return returns

    return sleep


def stored(*rows):
    """The rows as they come back from disk, where every rule is applied to them."""
    return rows_from_csv(rows_to_csv(rows))


def timing_of(*samples):
    return Timing(np.array(samples), (1.0,), True, False, "interval", Telemetry())


# Numbers in words


def test_numbers_take_the_prefix_that_fits():
    assert [seconds_text(s) for s in (0, 2.5e-9, 1.2345e-4, 0.5, 90)] == ["0 ns", "2.5 ns", "123.5 µs", "500 ms", "90 s"]
    assert [flops_text(n) for n in (0, 7, 2e9, 1.5e15)] == ["0 FLOP", "7 FLOP", "2 GFLOP", "1.5 PFLOP"]
    assert [bytes_text(n) for n in (0, 1023, 3 << 20, 3 << 29)] == ["0 B", "1023 B", "3 MiB", "1.5 GiB"]
    assert estimate_text(Estimate(2e-3, 1.9e-3, 2.25e-3, 31)) == "2 ms (95 % CI 1.9 … 2.25, n=31)"


# Time


def test_time_answers_in_words_as_a_row_and_as_a_picture():
    answer = measure.time(sleeper(2), label="two sleeps", **{**QUICK, "time_limit_s": 2.0})
    assert answer.timing.samples_s.min() >= 2e-3 and answer.estimate.n >= 10
    said = str(answer)
    assert said == repr(answer) and len(said.splitlines()) <= 3
    for part in ("two sleeps", " ms (95 % CI ", f"n={answer.estimate.n}", "hot cache", detect_cpu().name, "settled"):
        assert part in said
    assert "two sleeps" in answer._repr_html_()
    (row,) = stored(answer.row(**PLACE, dtype="fp32", params={"batch": 3}))
    assert (row.metric, row.value, row.n) == ("call_time_s", answer.estimate.value, answer.estimate.n)
    assert row.params == {"batch": 3, "cache": "hot"} and row.hot and row.limit_source.startswith("no limit")
    assert row.ci_low <= row.value <= row.ci_high
    assert is_drawn(answer.plot())
    with pytest.raises(RowError, match="dtype is 'floaty', which is no known number format"):
        answer.row(**PLACE, dtype="floaty")


def test_a_row_takes_the_limit_it_is_given_and_refuses_to_beat_it():
    answer = measure.time(sleeper(1), **QUICK)
    row = answer.row(**PLACE, limit=1e-4, limit_source="a sleep of 0.1 ms")
    assert (row.limit, row.limit_source) == (1e-4, "a sleep of 0.1 ms")
    with pytest.raises(RowError, match="beyond its limit"):
        answer.row(**PLACE, limit=10.0, limit_source="a sleep of 10 s")


@pytest.mark.slow
def test_cold_is_said_and_is_the_default():
    answer = measure.time(lambda: None, device="cpu", minimum_samples=5, time_limit_s=1.0)
    assert answer.timing.cold and "cold cache" in str(answer) and answer.row(**PLACE).params["cache"] == "cold"


def test_calls_in_a_row_are_one_sample():
    calls = []
    answer = measure.time(lambda: calls.append(None), back_to_back=7, **QUICK)
    assert len(calls) >= 7 * len(answer.timing.samples_s)


def test_five_samples_are_too_few_for_an_interval_of_95_percent():
    said = "the range of 5 samples contains the median with a probability of 94 %, not 95 %"
    assert _doubts(timing_of(*[1.0] * 5), None, 3) == [said]
    assert _doubts(timing_of(*[1.0] * 6), None, 3) == []


@pytest.mark.slow
def test_an_unsteady_function_is_not_called_settled():
    pauses = iter(range(10_000))
    answer = measure.time(lambda: clock.sleep(next(pauses) * 3e-5), **QUICK)
    assert answer.verdict.startswith("not settled: ")


# Compare


@pytest.mark.slow
def test_the_faster_one_is_named_whichever_comes_first():
    quick, slow = sleeper(1), sleeper(12)
    patient = {**QUICK, "time_limit_s": 2.0}
    ahead = measure.compare(quick, slow, labels=("quick", "slow"), **patient)
    behind = measure.compare(slow, quick, labels=("slow", "quick"), **patient)
    assert ahead.verdict.startswith("quick is ") and "× (95 % CI " in ahead.verdict and "faster than slow" in ahead.verdict
    assert behind.verdict.startswith("quick is ") and "faster than slow" in behind.verdict
    assert ahead.ratio.ci_low > 1 > behind.ratio.ci_high
    assert "outputs not compared: they do not both return tensors" in str(ahead) and ahead.outputs_agree is None
    (row,) = stored(ahead.row(**PLACE))
    assert (row.metric, row.value, row.check) == ("speedup", ahead.ratio.value, "")
    assert row.params == {"a": "quick", "b": "slow", "cache": "hot"}
    assert is_drawn(ahead.plot()) and len(str(ahead).splitlines()) <= 3


def test_the_same_function_twice_shows_no_difference():
    answer = measure.compare(lambda: None, lambda: None, labels=("A", "B"), **QUICK)
    # Samples drawn from one distribution: on a busy machine two honest series of ten may differ by chance.
    drawn = np.random.default_rng(0).normal(1e-3, 1e-4, (2, 40))
    timings = tuple(replace(timing, samples_s=samples) for timing, samples in zip(answer.timings, drawn, strict=True))
    answer = replace(answer, timings=timings)
    assert answer.ratio.ci_low <= 1 <= answer.ratio.ci_high
    assert answer.verdict.startswith("no difference shown: the speed of A is ")


def test_the_interval_of_few_pairs_reaches_from_the_slowest_of_one_to_the_fastest_of_the_other():
    timings = timing_of(*[1.0] * 8, 2.0), timing_of(*[1.0] * 9)
    assert ComparisonAnswer(("a", "b"), timings, detect_cpu(), None, "", 3, ()).ratio.ci_low == 0.5


def test_outputs_are_compared_in_float64_and_the_error_is_the_row_s_check():
    x = torch.randn(64, generator=torch.Generator().manual_seed(1))
    answer = measure.compare(lambda: x * 1, lambda: x * 1.00001, **QUICK)
    assert answer.output_error == pytest.approx(1e-5, rel=0.05) and answer.outputs_agree
    (row,) = stored(answer.row(**PLACE))
    assert (row.check_error, row.check_tolerance) == (answer.output_error, OUTPUT_TOLERANCE[torch.float32])


@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_a_wrong_output_is_shouted_and_has_no_row(wrong):
    x = torch.ones(64)
    answer = measure.compare(lambda: x * wrong, lambda: x * 1, **QUICK)
    assert answer.outputs_agree is False and "OUTPUTS DIFFER" in str(answer)
    with pytest.raises(RowError):
        answer.row(**PLACE)


def test_a_tolerance_of_one_s_own_decides():
    x = torch.ones(8)
    assert measure.compare(lambda: x * 1, lambda: x * 1.5, tolerance=0.5, **QUICK).outputs_agree
    assert not measure.compare(lambda: x * 1, lambda: x * 1.00001, tolerance=1e-6, **QUICK).outputs_agree


def test_the_coarser_dtype_sets_the_tolerance_and_integers_have_none():
    x = torch.randn(256, generator=torch.Generator().manual_seed(1))
    assert measure.compare(lambda: x * 1, lambda: x.bfloat16(), **QUICK).outputs_agree
    off_by_one = measure.compare(lambda: torch.arange(1, 9), lambda: torch.arange(8), **QUICK)
    assert off_by_one.output_tolerance == 0 and off_by_one.outputs_agree is False


def test_of_a_nest_the_worst_tensor_counts():
    def nest(last):
        return lambda: {"loss": torch.ones(3), "logits": [torch.ones(2), torch.full((4,), last)]}

    assert measure.compare(nest(1.0), nest(1.0), **QUICK).output_error == 0
    answer = measure.compare(nest(1.0), nest(3.0), **QUICK)
    assert answer.output_error == pytest.approx(2 / 3) and "output['logits'][1][0]: 1 against 3" in str(answer)


@pytest.mark.parametrize(
    "other, reason",
    [
        (lambda: torch.ones(3), r"the shapes differ: \(2,\) and \(3,\)"),
        (lambda: None, "the other function does not"),
        (lambda: 1.0, r"the shapes differ: \(2,\) and \(\)"),
        (lambda: (torch.ones(2),), "different structures"),
        (lambda: torch.ones(2, dtype=torch.int64), "different kinds of numbers"),
        (lambda: torch.ones(2) > 0, "different kinds of numbers"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused_before_the_timing(other, reason):
    calls = []

    def counted():
        calls.append(None)
        return other()

    with pytest.raises(OutputMismatchError, match=reason):
        measure.compare(lambda: torch.ones(2), counted, **QUICK)
    assert len(calls) == 2


@pytest.mark.slow
def test_sparse_tensors_arrays_and_numbers_are_compared_too():
    for make in (lambda: torch.ones(2).to_sparse(), lambda: np.ones(2), lambda: 0.5, lambda: {"n": 3, "on": True}):
        assert measure.compare(make, make, labels=("A", "B"), **QUICK).outputs_agree
    assert not measure.compare(lambda: 0.5, lambda: 0.6, labels=("A", "B"), **QUICK).outputs_agree


def test_an_output_buffer_that_both_share_does_not_hide_a_difference():
    buffer = torch.zeros(4)
    answer = measure.compare(lambda: buffer.fill_(1), lambda: buffer.fill_(2), **QUICK)
    assert answer.output_error == pytest.approx(0.5)


def test_both_start_from_the_same_random_state_and_leave_the_reader_s_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    answer = measure.compare(
        lambda: nn.functional.dropout(torch.ones(99)), lambda: nn.functional.dropout(torch.ones(99)), **QUICK
    )
    assert answer.output_error == 0
    torch.manual_seed(7)
    call_from_seed(lambda: torch.rand(5), detect_cpu())
    assert torch.rand(1) == expected


# Memory


def test_memory_of_a_hand_example():
    x = torch.ones(KIB)
    answer = measure.memory(lambda: (x + 1) * 2, device="cpu")  # x, then the sum, then the product beside the sum
    assert (answer.before_bytes, answer.peak_bytes, answer.added_bytes) == (1024, 3 * 1024, 2048)
    assert answer.peak_operator == "aten::mul" and answer.history_bytes == (2048, 3 * 1024)
    assert "3 KiB" in str(answer) and "counted by dispatch" in str(answer) and "peak after aten::mul" in str(answer)
    (row,) = stored(*answer.rows(**PLACE))
    assert (row.metric, row.value * 2**30) == ("tensor_memory_gib", 3 * 1024) and row == answer.row(**PLACE)
    assert is_drawn(answer.plot())


def test_memory_counts_what_was_there_once_and_what_is_let_go_not_at_all():
    x = torch.ones(64, 64)
    views = measure.memory(lambda: x.T.contiguous().T, device="cpu")
    assert (views.before_bytes, views.peak_bytes) == (4 * 64 * 64, 2 * 4 * 64 * 64)
    in_place = measure.memory(lambda: x.mul_(1), device="cpu")
    assert in_place.added_bytes == 0 and in_place.before_bytes == 4 * 64 * 64


@pytest.mark.filterwarnings("ignore:Sparse C")
def test_memory_of_sparse_tensors_is_that_of_their_indices_and_values():
    ends, places, values = torch.arange(65), torch.arange(64), torch.ones(64)
    coordinates = torch.sparse_coo_tensor(torch.stack([places, places]), values, check_invariants=False)
    rows = torch.sparse_csr_tensor(ends, places, values, check_invariants=False)
    columns = torch.sparse_csc_tensor(ends, places, values, check_invariants=False)
    for sparse, indices in ((coordinates, 2 * 64), (rows, 64 + 65), (columns, 64 + 65)):
        answer = measure.memory(sparse.clone, device="cpu")
        assert (answer.before_bytes, answer.added_bytes) == (indices * 8 + 64 * 4, indices * 8 + 64 * 4)


def test_memory_of_a_training_step_knows_its_optimizer_state():
    model = nn.Linear(64, 32, bias=False)
    optimizer, x = torch.optim.AdamW(model.parameters(), foreach=False), torch.randn(16, 64)
    weight, batch = 4 * 64 * 32, 4 * 16 * 64

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    answer = measure.memory(step, device="cpu")
    # Weight, two moments and the step's counter were there; a gradient is made, and the update makes at most a few more.
    assert answer.before_bytes == 3 * weight + batch + 4
    assert weight <= answer.added_bytes <= 4 * weight


# FLOPs


def test_a_multiply_add_of_complex_numbers_is_eight_flops():
    x = torch.randn(4, 8, dtype=torch.complex64)
    assert measure.flops(lambda: x @ x.T).total == 8 * 4 * 8 * 4


def test_flops_of_sparse_products_are_not_those_of_dense_ones():
    x = torch.randn(8, 8)
    for sparse in (torch.eye(8).to_sparse(), torch.eye(8).to_sparse_csr()):
        answer = measure.flops(lambda sparse=sparse: (x @ x, sparse @ x))
        assert answer.total == 2 * 8**3 and "a lower bound: no formula for aten::mm of sparse tensors (1×)" in str(answer)


def test_flops_of_a_hand_example_by_operator_and_module():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    x = torch.randn(3, 8)
    answer = measure.flops(lambda: model(x).sum().backward())
    first, second = 2 * 3 * 8 * 16, 2 * 3 * 16 * 4
    # Backward: both weights' gradients, and that of the second layer's input; nobody asked for that of x.
    assert answer.total == 2 * first + 3 * second == sum(answer.by_operator.values())
    assert answer.by_module["Sequential.2"] == 3 * second
    assert "aten::relu" in {found.name for found in answer.uncounted if found.pointwise}
    (row,) = stored(answer.row(**PLACE))
    assert (row.metric, row.value, row.unit) == ("flops", answer.total, "FLOP")
    assert is_drawn(answer.plot()) and "a lower bound" in str(answer)


def test_an_operator_of_one_s_own_is_named_first_and_a_zero_is_not_believed():
    @torch.library.custom_op("hyperion_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(a.numpy() @ b.numpy())

    x = torch.randn(8, 8)
    alone = measure.flops(lambda: product(x, x))
    assert alone.total == 0 and "THE NUMBER OF FLOPS IS UNKNOWN" in str(alone) and "hyperion_test::product (1×)" in str(alone)
    beside = measure.flops(lambda: (product(x, x) @ x).cumsum(0))
    assert beside.total == 2 * 8**3 and beside.uncounted[0].name == "hyperion_test::product"
    assert "a lower bound" in str(beside) and "hyperion_test::product" in str(beside)
    assert beside.row(**PLACE).params["without_formula"] == ["hyperion_test::product", "aten::cumsum"]


def test_a_row_of_flops_that_nothing_could_count_has_no_value():
    x = torch.randn(8, 8)
    for function, reason in ((lambda: x.cumsum(0), "THE NUMBER OF FLOPS IS UNKNOWN"), (lambda: None, "no PyTorch operator")):
        (row,) = stored(measure.flops(function).row(**PLACE))
        assert row.value is None and row.value_reason.startswith(reason)
    assert measure.flops(lambda: x + x).row(**PLACE).value == 0, "an element-wise operator counts as 0"


def test_a_plain_product_has_a_formula_for_all_of_it_and_a_view_is_none():
    x = torch.randn(4, 8)
    assert measure.flops(lambda: x @ x.T).verdict == "every operator has a formula"


def test_a_compiled_function_is_counted_uncompiled():
    compiled_calls = []

    def backend(graph, _):
        def run(*inputs):
            compiled_calls.append(None)
            return graph(*inputs)

        return run

    x = torch.randn(16, 16)
    compiled = torch.compile(lambda: torch.relu(x @ x), backend=backend)
    compiled()
    before = len(compiled_calls)
    answer = measure.flops(compiled)
    assert answer.total == 2 * 16**3 and "1 element-wise operator counts" in str(answer)
    assert measure.memory(compiled, device="cpu").added_bytes == 2 * 4 * 16 * 16
    assert before >= 1 and len(compiled_calls) == before + 1, "its warm-up only is compiled"
    compiled()
    assert len(compiled_calls) == before + 2, "afterwards it is what it was"


def test_what_no_dispatcher_sees_is_said():
    assert "no PyTorch operator was dispatched" in str(measure.flops(lambda: sum(range(9))))


def test_attention_on_a_cpu_is_counted_which_torch_s_registry_leaves_out():
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    forward = 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert measure.flops(lambda: nn.functional.scaled_dot_product_attention(q, q, q)).total == forward
    both = measure.flops(lambda: nn.functional.scaled_dot_product_attention(q, q, q).sum().backward())
    assert both.total == pytest.approx(forward * 3.5)


# What cannot be asked

QUESTIONS = [measure.time, measure.memory, measure.flops, lambda function: measure.compare(function, lambda: None)]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_what_is_no_call_is_refused_with_the_remedy(ask):
    async def coroutine():
        return None

    def generator():
        yield 1

    with pytest.raises(HyperionError, match="Tensor is not callable") as refused:
        ask(torch.ones(2))
    assert "lambda: model(x)" in refused.value.next_step
    with pytest.raises(HyperionError, match="missing a required argument: 'x'"):
        ask(lambda x: x)
    for empty in (coroutine, generator):
        with pytest.raises(HyperionError, match="does no work"):
            ask(empty)


@pytest.mark.parametrize("ask", QUESTIONS)
def test_the_function_s_own_error_comes_through_with_a_note(ask):
    def broken():
        return {}["a key"]

    with pytest.raises(KeyError, match="a key") as raised:
        ask(broken)
    assert any("hyperion.measure." in note and "broken" in note for note in raised.value.__notes__)
    assert raised.traceback[-1].name == "broken"


def test_built_in_functions_without_a_signature_can_be_asked():
    assert measure.time(dict, **QUICK).label == "dict"


def test_devices_by_name():
    assert device_of("cpu") == detect_cpu() == device_of(detect_cpu()) == device_of(torch.device("cpu"))
    assert device_of(None).kind == ("cpu" if not torch.cuda.is_available() else device_of("cuda").kind)
    for unknown in ("meta", "abacus", 1.5):
        with pytest.raises(HyperionError):
            device_of(unknown)
    if not torch.cuda.is_available():
        with pytest.raises(HyperionError, match="no GPU"):
            device_of("cuda:0")


@pytest.mark.process
def test_the_names_stay_functions_and_drawing_is_imported_only_for_drawing():
    code = (
        "import sys, hyperion.measure.memory_use.tensor_memory, hyperion.measure.api.explain, hyperion.experiments\n"
        "from hyperion import measure\n"
        "assert all(callable(getattr(measure, n)) for n in ('time', 'compare', 'memory', 'flops', 'explain'))\n"
        "named = {name: module.time for name, module in sys.modules.items() if name.startswith('hyperion.')\n"
        "         and name not in ('hyperion.measure', 'hyperion.measure.api.functions') and hasattr(module, 'time')}\n"
        "assert named and all(found is sys.modules['time'] for found in named.values()), named\n"
        "assert 'matplotlib' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def is_drawn(figure) -> bool:
    return isinstance(figure, Figure) and figure._repr_png_().startswith(b"\x89PNG")
