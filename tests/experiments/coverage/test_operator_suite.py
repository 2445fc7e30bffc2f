"""The operator suite at toy sizes: counts, gaps with reasons, crashes that name the operator, and planted faults."""

import functools
import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from hyperion.chapter import experiment_named, load_profile
from hyperion.experiments.coverage import operator_checks, operator_suite
from hyperion.experiments.coverage.claims import operator_claims
from hyperion.experiments.coverage.figures import count_table, gaps
from hyperion.experiments.coverage.operator_checks import KIND_OF
from hyperion.experiments.coverage.operator_suite import OperatorSuiteOptions, collect_outcomes, status_of
from hyperion.experiments.coverage.rounding import Case, errors_over_tolerance, forward_backward
from tests.chapter.toy import perform, toy_context
from tests.experiments.coverage import dying_operators

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"formats": ["fp32", "bf16"], "samples": 1, "probes": 2}


@pytest.fixture(autouse=True)
def metrics_of_the_subject():
    """Looking up an experiment registers the metrics of its subject."""
    experiment_named("operator_suite")


@pytest.fixture(scope="module")
def checker(one_thread):
    """A checker in this process. The database must not freeze the settings of the backends for other tests."""
    pytest.importorskip("expecttest")
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    patch.setattr(torch.backends.cudnn.rnn, "fp32_precision", torch.backends.cudnn.rnn.fp32_precision)  # restored at the end
    checker = operator_checks._Checker(["fp32"], 2, 4, 0)
    yield checker
    checker._precision.__exit__(None, None, None)  # restores the settings
    patch.undo()


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 3])
def test_an_operator_that_ends_the_process_is_named_and_the_others_are_checked(tmp_path, workers):
    context = toy_context("operator_suite", SIZES, tmp_path)
    # With three processes, the first checks "first" and then "last", and the second is the one that ends.
    options, names, reports = OperatorSuiteOptions.of(context), ["first", "boom", "bad", "last"], []
    outcomes, unavailable = collect_outcomes(
        context, options, names, lambda *line: reports.append(line[:2]), dying_operators.check, workers
    )
    assert list(outcomes) == names and not unavailable and reports[-1] == (4, 4)
    statuses = [status_of(outcomes[name], "bf16", "backward") for name in names]
    assert statuses == ["passed", "failed", "failed", "passed"]
    assert "exit code 7" in outcomes["boom"][0]["reason"]
    rows = [row.without_failed_value() for name in names for row in operator_suite._rows_of(context, name, outcomes[name])]
    report = {(line["operator"], line["dtype"]): line for line in gaps(rows)}
    assert set(report) == {(name, dtype) for name in ("boom", "bad") for dtype in ("fp32", "bf16")}
    assert "the process ended" in report["boom", "fp32"]["reason"] and "failed its check" in report["bad", "bf16"]["reason"]


@pytest.mark.process
def test_a_process_that_ends_after_its_last_operator_costs_no_outcome(tmp_path):
    context = toy_context("operator_suite", SIZES, tmp_path)
    names = ["first", "crash at exit"]
    options = OperatorSuiteOptions.of(context)
    outcomes, _ = collect_outcomes(context, options, names, lambda *_: None, dying_operators.check, 1)
    assert [status_of(outcomes[name], "fp32", "forward") for name in names] == ["passed", "passed"]


@pytest.mark.slow
def test_real_operators_pass_and_those_without_a_kernel_are_gaps(checker):
    for name in ("add", "softmax", "nn.functional.conv2d", "gather", "fft.rfft"):
        outcomes = checker.check(name, False)
        assert {status_of(outcomes, "fp32", which) for which in ("forward", "backward")} == {"passed"}, outcomes
    checker.formats = ["bf16"]
    (outcome,) = checker.check("fft.rfft", False)
    checker.formats = ["fp32"]
    assert outcome["status"] == "unsupported" and "BFloat16" in outcome["reason"]
    assert status_of([outcome], "bf16", "backward") == "unsupported"


def test_a_patched_operator_fails(checker, monkeypatch):
    (operator,) = checker._entries["tanh"].values()
    monkeypatch.setattr(operator, "op", lambda x: torch.tanh(x) * (1 if x.dtype == torch.float64 else 1.0001))
    assert status_of(checker.check("tanh", False), "fp32", "forward") == "failed"


def unstable(x):
    """Sort so that equal elements come in the opposite order of a stable sort."""
    values, indices = torch.sort(x.flip(0), stable=True)
    return values, len(x) - 1 - indices


def first_of_ties(x):
    """Sort, but give equal elements the index of the first of them."""
    values, indices = torch.sort(x, stable=True)
    return values, indices[torch.searchsorted(values, values)]


def off_by_one(x):
    values, indices = x.sort()
    return values, (indices + 1) % len(x)


@pytest.mark.parametrize(("sort", "error"), [(unstable, False), (off_by_one, True), (first_of_ties, True)])
def test_equal_elements_may_be_sorted_in_any_order_but_each_occurs_once(sort, error):
    x = torch.tensor([3.0, 1.0, 1.0, 1.0, 2.0, 2.0], dtype=torch.bfloat16)

    def on_device(given, *args):
        return sort(given) if given.dtype == torch.bfloat16 else given.sort()

    call = functools.partial(operator_checks._with_values_at_indices, on_device, 0)
    ratios = errors_over_tolerance(Case(call, (x,), {}), torch.bfloat16, 0, 4)
    assert (ratios["forward"] > 1) == error


def test_a_stable_sort_must_return_the_same_indices():
    x = torch.ones(4, dtype=torch.bfloat16)
    outputs = operator_checks._with_values_at_indices(lambda x, **kwargs: unstable(x), 0, x, stable=True)
    assert [one.tolist() for one in outputs] == [[1.0] * 4, [3, 2, 1, 0]]


@pytest.mark.parametrize("name", list(operator_checks._NO_DROPOUT))
def test_attention_is_checked_without_dropout(name, checker, monkeypatch):
    monkeypatch.setattr(checker, "samples", 0)
    (operator,) = checker._entries[name].values()
    results = []
    for seed in (1, 2):
        cases = checker._cases(operator, "fp32")
        operator_of = {"nn.functional.scaled_dot_product_attention": torch.nn.functional.scaled_dot_product_attention}
        call = operator_of.get(name, torch.nn.functional.multi_head_attention_forward)
        torch.manual_seed(seed)
        results.append([call(*case.args, **case.kwargs) for case in cases])
    assert results[0] and all(
        torch.equal(one, again) for pair in zip(*results, strict=True) for one, again in zip(*map(tree_leaves, pair), strict=True)
    )


def test_no_operator_uses_tf32(checker):
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    assert [backend.fp32_precision for backend in backends] == ["ieee"] * 3
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


def test_an_operator_that_raises_an_error_in_the_backward_pass_alone_passes_forward(checker, monkeypatch):
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.tanh(x)

        @staticmethod
        def backward(ctx, *grads):
            raise NotImplementedError("no gradient here")

    (operator,) = checker._entries["tanh"].values()
    monkeypatch.setattr(operator, "op", lambda x: torch.tanh(x) if x.dtype == torch.float64 else Refusing.apply(x))
    outcomes = checker.check("tanh", False)
    assert status_of(outcomes, "fp32", "forward") == "passed" and status_of(outcomes, "fp32", "backward") == "unsupported"


def test_every_operator_of_the_list_is_in_the_database(checker):
    assert not [name for name in KIND_OF if name not in checker._entries]
    assert len(KIND_OF) >= 80 and all((name, which)[0] in KIND_OF for name, which in operator_checks.KNOWN_GAPS)


def test_a_known_gap_has_its_cause_and_an_unknown_one_is_refused(tmp_path):
    context = toy_context("operator_suite", SIZES, tmp_path)
    one = {
        "entry": "logcumsumexp",
        "dtype": "bf16",
        "mode": "eager",
        "pass": "backward",
        "status": "failed",
        "samples": 1,
        "error": 0.9,
    }
    (known,) = operator_suite._rows_of(context, "logcumsumexp", [one | {"ratio": 30.0}])
    (unknown,) = operator_suite._rows_of(context, "logcumsumexp", [one | {"ratio": 30.0, "pass": "forward"}])
    assert known.without_failed_value().value == 30 and [line["status"] for line in gaps([known])] == ["known"]
    assert unknown.without_failed_value().value is None
    assert [holds for holds, _ in operator_claims([known])] == [False]  # nothing was counted
    assert "logcumsumexp, bf16, forward" in operator_claims([unknown.without_failed_value()])[0][1]
    # The gap of the backward pass does not hide a smaller, unknown error of the forward pass.
    both = [one | {"ratio": 30.0}, one | {"ratio": 10.0, "pass": "forward"}]
    (hidden,) = operator_suite._rows_of(context, "logcumsumexp", both)
    assert hidden.without_failed_value().is_unexpected and hidden.params["worst pass"] == "forward"
    (right,) = operator_suite._rows_of(context, "logcumsumexp", [both[0], one | {"ratio": 0.5, "pass": "forward"}])
    assert right.without_failed_value().value == 30
    # A gradient that is not finite cannot be a value, so its row states the cause instead.
    one = one | {"entry": "nn.functional.normalize", "ratio": math.inf}
    fp16, bf16 = (operator_suite._rows_of(context, "nn.functional.normalize", [one | {"dtype": d}])[0] for d in ("fp16", "bf16"))
    assert fp16.value is None and not fp16.is_unexpected and [line["status"] for line in gaps([fp16])] == ["known"]
    assert bf16.without_failed_value().is_unexpected


@pytest.mark.parametrize(
    ("name", "ratio", "error"),
    [("logcumsumexp", 46.0, 0.9), ("logcumsumexp", 25.0, 1.0), ("nn.functional.normalize", math.inf, 1.0)],
    ids=["above the ceiling", "zeros below the ceiling", "no finite gradient"],
)
def test_a_known_gap_with_a_larger_error_is_refused(name, ratio, error, tmp_path):
    context = toy_context("operator_suite", SIZES, tmp_path)
    dtype = "fp16" if math.isinf(ratio) else "bf16"
    one = {"entry": name, "dtype": dtype, "mode": "eager", "pass": "backward", "status": "failed", "samples": 1}
    (row,) = operator_suite._rows_of(context, name, [one | {"ratio": ratio, "error": error}])
    assert row.without_failed_value().is_unexpected


def test_a_gradient_of_zeros_of_a_known_gap_is_refused(checker, tmp_path, monkeypatch):
    def zeros(*given):
        outputs, gradients, cotangents = forward_backward(*given)
        return outputs, [torch.zeros_like(one) for one in gradients], cotangents

    def row_of(dtype):
        outcomes = [one for one in checker.check("logcumsumexp", False) if (one["dtype"], one["pass"]) == (dtype, "backward")]
        return operator_suite._rows_of(context, "logcumsumexp", outcomes)[0].without_failed_value()

    context = toy_context("operator_suite", SIZES, tmp_path)
    monkeypatch.setattr(checker, "formats", ["fp32", "bf16", "fp16"])
    assert not any(row_of(dtype).is_unexpected for dtype in checker.formats)
    monkeypatch.setattr(operator_checks, "forward_backward", zeros)
    assert all(row_of(dtype).is_unexpected for dtype in checker.formats)


def test_without_the_database_the_rows_have_the_reason_and_the_layers_are_checked(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "expecttest" else find(name, *rest))
    reason = operator_checks.why_no_database()
    assert reason.startswith("unavailable") and "pip install expecttest" in reason
    layer = "nn.Linear"
    checker = operator_checks._Checker(["fp32"], 1, 2, 0)
    found = {name: checker.check(name, False) for name in ("add", layer)}
    assert not found["add"] and status_of(found[layer], "fp32", "backward") == "passed"
    monkeypatch.setattr(operator_suite, "collect_outcomes", lambda *_: (found, reason))
    rows = perform(toy_context("operator_suite", SIZES | {"formats": ["fp32"]}, tmp_path), tmp_path).rows
    counts = [row for row in rows if row.variant == operator_suite.ALL]
    assert len(counts) == 2 and {row.value_reason for row in counts} == {reason}
    assert operator_claims(counts) == []
    broken = [replace(row, value_reason="unavailable: the database cannot be imported: ImportError: made up") for row in counts]
    assert [holds for holds, _ in operator_claims(broken)] == [False, False]
    assert "ImportError: made up" in operator_claims(broken)[0][1]


@pytest.mark.parametrize("profile", ["smoke", "full", "study"])
def test_the_sizes_of_the_profiles_are_valid(profile):
    options = OperatorSuiteOptions.parse(load_profile(profile).sizes("operator_suite"), "operator_suite")
    assert options.formats == ("fp32", "bf16", "fp16") and set(options.compiled) <= set(KIND_OF)
    assert bool(options.compiled) == (profile != "smoke")


def test_the_table_of_counts_has_a_line_for_each_format_and_pass(tmp_path):
    context = toy_context("operator_suite", SIZES, tmp_path)
    one = {"entry": "add", "dtype": "fp32", "mode": "eager", "pass": "forward", "status": "passed", "ratio": 0.1, "samples": 1}
    table = count_table(operator_suite._counts(context, {"add": [one]}, "", "fp32", "forward"))
    assert table.to_dict("records")[0]["passed"] == "1"
