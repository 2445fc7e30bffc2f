"""What the figures of runtimes show, and which rows the claims about runtimes refuse."""

from dataclasses import replace
from functools import partial

import pytest

from hyperion.experiments.inference.claims import (
    fusion_claims,
    parity_claims,
    provider_claims,
    runtime_quality_claims,
    time_claims,
)
from hyperion.experiments.inference.figures import PLOTS, TITLES, kernel_counts, runtime_latency, runtime_throughput
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.run import GPU
from tests.book.made_up.runtimes import made_up_row, runtime_chapters


@pytest.fixture
def rows():
    return runtime_chapters()[0][2]


@pytest.fixture
def material(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in runtime_chapters():
        run.record(chapter, experiment, rows, samples, input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        return function(material)


def labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_each_model_has_a_panel_with_a_bar_for_each_percentile(material):
    figure = drawn(runtime_latency, material)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["llama", "resnet18"]
    assert labels(figure.axes[0])[:3] == ["eager, p50", "eager, p95", "eager, p99"]
    assert [bar.get_width() for bar in figure.axes[0].patches][:3] == pytest.approx([2.0, 3.0, 4.0])
    assert figure.get_supxlabel() == "AOTInductor: not measured (SIGSEGV: made up)."


def test_a_note_says_which_model_and_percentile_of_a_drawn_runtime_is_missing(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in runtime_chapters():
        lost = [("latency_p95_s", "llama"), ("latency_p99_s", "llama")]
        lost += [(f"latency_p{percent}_s", "resnet18") for percent in (50, 95, 99)]
        changed = [
            replace(row, value=None, ci_low=None, ci_high=None, value_reason="made up")
            if (row.metric, row.params.get("model")) in lost[: 2 if row.variant == "eager" else None] and row.variant in names
            else row
            for row in rows
            for names in [("eager", "torch.compile")]
        ]
        run.record(chapter, experiment, changed, samples, input_hash="h")
    note = " ".join(drawn(runtime_latency, Material(run)).get_supxlabel().split())
    assert "eager, llama, p95; eager, llama, p99" in note and "torch.compile, resnet18" in note
    assert "torch.compile, resnet18, p" not in note


def test_the_best_batch_is_drawn_and_not_the_search(material):
    axes = drawn(runtime_throughput, material).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [990.0, 991.0, 992.0]
    assert labels(axes)[0] == "eager, batch 16"


def test_the_batches_of_torch_compile_are_named_if_it_tries_fewer_than_eager_mode(tmp_path):
    run = Run.create(tmp_path / "run", {"environment": GPU})
    for chapter, experiment, rows, samples in runtime_chapters():
        fewer = [row for row in rows if (row.variant, row.params.get("batch")) != ("torch.compile", 4)]
        run.record(chapter, experiment, fewer, samples, input_hash="h")
    note = "torch.compile: only the batches 16 were tried, because each needs a compilation."
    assert note in drawn(runtime_throughput, Material(run)).get_supxlabel()


def test_kernels_have_one_bar_for_each_runtime(material):
    assert [bar.get_width() for bar in drawn(kernel_counts, material).axes[1].patches] == [60.0, 30.0, 20.0]


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {}))
    assert [function(empty) for function in (runtime_latency, runtime_throughput, kernel_counts)] == [None] * 3


def test_every_figure_belongs_to_a_titled_experiment():
    assert {plot.experiment for plot in PLOTS} == set(TITLES)


def test_claims_hold_for_good_rows(rows):
    measured = [row for row in rows if row.value is not None]
    claims = parity_claims(measured) + runtime_quality_claims(rows) + fusion_claims(rows)
    assert len(claims) == 6 + 6 + 2 and all(holds for holds, _ in claims)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_perplexity_of_4_bit_weights_refutes_its_claim(dtype):
    good = replace(made_up_row("AOTInductor", "perplexity_ratio", 1.0004, {"model": "llama"}), dtype=dtype)
    assert all(holds for holds, _ in runtime_quality_claims([good]))
    assert not any(holds for holds, _ in runtime_quality_claims([replace(good, value=1.002)]))


def test_a_session_on_another_provider_or_device_refutes_its_claim():
    params = {"model": "llama", "against": "float64", "asked_provider": "CPUExecutionProvider", "device": "cpu"}
    good = made_up_row("ONNX Runtime CPU", "relative_difference", 1e-6, params | {"providers": "CPUExecutionProvider"})
    assert all(holds for holds, _ in provider_claims([good]))
    asked_gpu = params | {"asked_provider": "CUDAExecutionProvider", "providers": "CPUExecutionProvider", "device": "cuda"}
    assert not all(holds for holds, _ in provider_claims([replace(good, params=asked_gpu)]))
    assert not all(holds for holds, _ in provider_claims([replace(good, params=good.params | {"device": "cuda"})]))


def test_threads_that_compete_refute_the_claim_about_times():
    base = {"model": "resnet18", "batch": 1}
    made_up = partial(made_up_row, "ONNX Runtime CPU")
    own = [
        made_up("latency_p50_s", 2.4e-3, base),
        made_up("samples_per_s", 400.0, base | {"role": "search"}),
        made_up("samples_per_s", 300.0, base | {"role": "one example", "order": "blocks"}),
    ]
    other = made_up_row("original", "inference_time_s", 2.6e-3, base | {"idle_threads": "sleep"})
    assert [holds for holds, _ in time_claims(own, [other])] == [True]
    assert [holds for holds, _ in time_claims(own, [replace(other, value=27.2e-3, ci_low=None, ci_high=None)])] == [False]
    slow = made_up("samples_per_s", 107.0, base | {"role": "one example", "order": "blocks"})
    assert [holds for holds, _ in time_claims([*own[:2], slow], [other])] == [False]
    # The rows of an earlier version lack these params, and another batch size is not compared.
    assert time_claims(own[:2], [replace(other, value=27.2e-3, params=base)]) == []
    assert [holds for holds, _ in time_claims(own, [replace(other, value=27.2e-3, params=other.params | {"batch": 4})])] == [
        True,
        True,
    ]


def test_no_fusion_and_no_rows_refute_their_claims(rows):
    same = [replace(row, value=60.0, ci_low=None, ci_high=None) if row.metric == "kernels_per_call" else row for row in rows]
    assert not any(holds for holds, _ in fusion_claims(same))
    assert not any(holds for holds, _ in parity_claims([]) + runtime_quality_claims([]))
