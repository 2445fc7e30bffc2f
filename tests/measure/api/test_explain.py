"""A step's parts add up whatever overlaps, on invented timelines and on a real training step; what is planted is found."""

import json
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn

from hyperion import measure
from hyperion.errors import HyperionError
from hyperion.measure.steps.trace import (
    COMMUNICATION,
    COPIES,
    DATA,
    GAPS,
    GEMM,
    GPU_ORDER,
    MEMORY,
    UNEXPLAINED,
    Event,
    gpu_events,
    innermost,
    kernel_kind,
    operator_kind,
    partition,
)
from hyperion.results import rows_from_csv, rows_to_csv

PLACE = {"notebook": "my_notebook", "experiment": "my_experiment", "variant": "mlp"}
QUICK = {"device": "cpu", "profiled_steps": 3, "minimum_samples": 5, "time_limit_s": 0.05}
ORDER = ("a", "b", "c")

moments = st.integers(-50, 150)
events = st.builds(
    lambda start, length, stream, kind: Event("x", start, start + length, stream, kind),
    moments,
    st.integers(0, 60),
    st.integers(0, 2),
    st.sampled_from(ORDER),
)
timelines = st.lists(events, max_size=25)


# The arithmetic of intervals


@given(timelines)
def test_parts_add_up_exactly_and_none_is_negative(timeline):
    parts = partition(timeline, 0, 100, ORDER)
    assert sum(parts.values()) == 100 and min(parts.values()) >= 0


@given(timelines)
def test_each_moment_belongs_to_the_first_kind_that_goes_on_then(timeline):
    owners = [
        next((kind for kind in ORDER if any(e.kind == kind and e.start_ns <= t < e.end_ns for e in timeline)), UNEXPLAINED)
        for t in range(100)
    ]
    assert partition(timeline, 0, 100, ORDER) == {kind: owners.count(kind) for kind in (*ORDER, UNEXPLAINED)}


@given(timelines, st.data())
def test_splitting_doubling_or_moving_an_event_to_another_stream_changes_nothing(timeline, data):
    before = partition(timeline, 0, 100, ORDER)
    if timeline:
        event = data.draw(st.sampled_from(timeline))
        cut = data.draw(st.integers(event.start_ns, event.end_ns))
        halves = [
            Event("left", event.start_ns, cut, event.stream, event.kind),
            Event("right", cut, event.end_ns, event.stream + 1, event.kind),
        ]
        rest = [other for other in timeline if other is not event]
        assert partition(rest + halves, 0, 100, ORDER) == before
        assert partition([*timeline, event], 0, 100, ORDER) == before
    assert partition(reversed(timeline), 0, 100, ORDER) == before


@given(timelines, st.integers(0, 100))
def test_two_halves_of_a_window_make_the_whole(timeline, cut):
    whole, left, right = (partition(timeline, *ends, ORDER) for ends in ((0, 100), (0, cut), (cut, 100)))
    assert whole == {kind: left[kind] + right[kind] for kind in whole}


def test_an_event_of_no_kind_or_of_negative_length_is_refused():
    with pytest.raises(ValueError):
        partition([Event("x", 0, 1, 0, "none")], 0, 10, ORDER)
    with pytest.raises(ValueError):
        partition([Event("x", 2, 1, 0, "a")], 0, 10, ORDER)


@given(timelines)
def test_innermost_pieces_overlap_nowhere_on_a_stream_and_cover_what_the_events_cover(timeline):
    pieces = innermost(timeline)
    for stream in (0, 1, 2):
        mine = sorted((piece for piece in pieces if piece.stream == stream), key=lambda piece: piece.start_ns)
        assert all(left.end_ns <= right.start_ns for left, right in pairwise(mine))
        covered = {t for piece in mine for t in range(piece.start_ns, piece.end_ns)}
        assert covered == {t for e in timeline if e.stream == stream for t in range(e.start_ns, e.end_ns)}


def test_an_operator_keeps_its_own_time_without_that_of_the_ones_it_calls():
    linear, addmm, copy = Event("linear", 0, 10, 0, "a"), Event("addmm", 2, 9, 0, "b"), Event("copy", 3, 4, 0, "c")
    assert partition(innermost([copy, linear, addmm]), 0, 10, ORDER) == {"a": 3, "b": 6, "c": 1, UNEXPLAINED: 0}


# A GPU's trace, as PyTorch's profiler writes it


def kernel(name, start, end, category="kernel", device=0, stream=7):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "args": {"device": device, "stream": stream},
    }


def test_kernels_of_a_gpu_timeline_find_their_parts():
    raw = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99, "args": {}},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "hyperion: step", "ts": 0, "dur": 99, "args": {"device": 0}},
        kernel("Memcpy HtoD (Pinned -> Device)", 10, 20, "gpu_memcpy"),
        kernel("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", 20, 40),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 30, 60, stream=20),
        kernel("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", 50, 55),
        kernel("Memset (Device)", 60, 61, "gpu_memset"),
        kernel("Memcpy DtoD (Device -> Device)", 61, 62, "gpu_memcpy"),
        kernel("Cijk_Ailk_Bljk_HHS_BH_MT128x128x16", 0, 100, device=1),
    ]
    host = [Event("data", 0, 15_000, "host", DATA), Event("step", 15_000, 90_000, "host", GAPS)]
    parts = partition(gpu_events(raw, 0) + host, 0, 100_000, GPU_ORDER)
    assert {kind: ns / 1000 for kind, ns in parts.items()} == {
        DATA: 10,
        COPIES: 10,
        GEMM: 20,
        COMMUNICATION: 15,
        MEMORY: 7,
        GAPS: 28,
        UNEXPLAINED: 10,
    }


def test_a_device_that_is_alone_is_the_one_whatever_the_tracer_calls_it():
    assert len(gpu_events([kernel("k", 0, 1, device=4)], 0)) == 1


@pytest.mark.parametrize(
    "name, kind",
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", GEMM),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_256x128_32x3_nn_align8>", GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", GEMM),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x32_MI32x32x8x1", GEMM),
        ("sm80_xmma_fprop_implicit_gemm_bf16f32_nhwckrsc", GEMM),
        ("miopenSp3AsmConv_v30_3_1_gfx90a_fp16_dot2_edc_dilation2", GEMM),
        ("igemm_fwd_gtcx2_nhwc_bf16_bx0_ex1", GEMM),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", GEMM),
        ("triton_tem_fused_addmm_relu_0", GEMM),
        ("triton_poi_fused_add_convert_element_type_3", MEMORY),
        ("triton_red_fused_native_layer_norm_7", MEMORY),
        ("triton_poi_fused__native_batch_norm_legit_functional_convolution_relu_2", MEMORY),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_1", MEMORY),
        ("triton_poi_fused_all_gather_into_tensor_cat_4", MEMORY),
        ("triton_tem_fused__unsafe_view_flex_attention_0", GEMM),
        ("triton_fwd_attention_kernel", GEMM),  # one of the reader's own
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", MEMORY),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>", MEMORY),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", MEMORY),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", COMMUNICATION),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgs)", COMMUNICATION),
        ("multimem_all_reduce_kernel", COMMUNICATION),
    ],
)
def test_kinds_of_kernels_by_their_names(name, kind):
    assert kernel_kind(name) == kind


def test_kinds_of_operators_by_their_names():
    products = (
        "mm",
        "addmm",
        "bmm",
        "mkldnn_convolution",
        "convolution_backward",
        "linear",
        "_int_mm",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    assert {operator_kind(f"aten::{name}") for name in products} == {GEMM}
    assert {operator_kind(f"aten::{name}") for name in ("add_", "copy_", "native_layer_norm", "mul", "sum")} == {MEMORY}
    assert operator_kind("autograd::engine::evaluate_function: AddmmBackward0") == operator_kind("MmBackward0") == GAPS
    assert operator_kind("c10d::allreduce_") == operator_kind("gloo:all_reduce") == COMMUNICATION


# A real training step on the CPU


class Training:
    """A small perceptron whose step can be made to wait."""

    def __init__(self, width=256):
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(128, width)
        self.pause_s = self.data_pause_s = 0.0

    def batch(self):
        self._wait(self.data_pause_s)
        return self.x

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        self._wait(self.pause_s)
        loss.backward()
        self.optimizer.step()

    def _wait(self, seconds):
        if seconds:  # a sleep of 0 s gives the core away
            time.sleep(seconds)


@pytest.fixture(scope="module")
def clean():
    training = Training()
    return measure.explain(training.step, data=training.batch, label="mlp", **QUICK)


def test_the_parts_of_a_real_step_add_up_and_hold_what_it_does(clean):
    assert sum(part.nanoseconds for part in clean.parts) == round(clean.profiled_step_s * clean.steps * 1e9)
    assert sum(part.share for part in clean.parts) == pytest.approx(1, abs=1e-12)
    assert sum(part.seconds for part in clean.parts) == pytest.approx(clean.estimate.value)
    assert all(part.nanoseconds >= 0 for part in clean.parts)
    assert min(clean[name].nanoseconds for name in (GEMM, MEMORY, GAPS)) > 0
    assert clean[COMMUNICATION].share == clean[COPIES].share == 0
    assert clean[UNEXPLAINED].share < 0.5  # nothing but the loop itself; a busy machine may take the core away just there


def test_it_prints_the_table_both_step_times_and_draws(clean):
    said = str(clean)
    assert all(part.name in said for part in clean.parts) and "100.0 %" in said
    assert "3 profiled steps" in said and "the profiler costs" in said and f"n={clean.estimate.n}" in said
    figure = clean.plot()
    assert isinstance(figure, Figure) and figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(KeyError, match="data wait"):
        clean["coffee"]


def test_its_rows_are_shares_by_what_and_the_step(clean):
    rows = rows_from_csv(rows_to_csv(clean.rows(**PLACE, dtype="fp32", params={"batch": 128})))
    step, *shares = rows
    assert (step.metric, step.value, step.params["cache"]) == ("step_time_s", clean.estimate.value, "hot")
    assert {row.params["what"]: row.value for row in shares} == {part.name: part.share for part in clean.parts}
    assert sum(row.value for row in shares) == pytest.approx(1) and all(row.params["batch"] == 128 for row in rows)
    assert len({json.dumps(row.params, sort_keys=True) for row in shares}) == len(shares)


def test_a_planted_wait_for_data_is_found_and_only_there(clean):
    training = Training()
    training.data_pause_s = 0.04
    found = measure.explain(training.step, data=training.batch, **QUICK)
    # A sleep never ends early: all of it must be there, and on a machine that does little else it is nearly everything.
    assert found[DATA].nanoseconds >= found.steps * 40e6 and found[DATA].share > 0.5 > clean[DATA].share
    assert found[GAPS].nanoseconds < found[DATA].nanoseconds / 2
    assert found.verdict.startswith("largest part: data wait")


def test_a_planted_sleep_between_operators_is_a_gap_and_only_there(clean):
    training = Training()
    training.pause_s = 0.04
    found = measure.explain(training.step, data=training.batch, **QUICK)
    assert found[GAPS].nanoseconds >= found.steps * 40e6 and found[GAPS].share > max(0.5, clean[GAPS].share)
    assert found[DATA].nanoseconds < found[GAPS].nanoseconds / 2
    assert found.verdict.startswith("largest part: launch gaps")


def test_without_data_nothing_waits_for_it():
    training = Training()
    assert measure.explain(lambda: training.step(training.x), **QUICK)[DATA].nanoseconds == 0


@pytest.mark.slow
def test_a_ceiling_splits_the_products_and_one_too_low_is_called_out():
    training = Training()
    flops = measure.flops(lambda: training.step(training.x)).total
    far = measure.explain(training.step, data=training.batch, ceilings=measure.Ceilings(1e3, None, "invented"), **QUICK)
    ideal = far["GEMM at the ceiling"]
    assert far.flops == flops and ideal.nanoseconds == round(flops * far.steps / 1e15 * 1e9)
    assert far["GEMM inefficiency"].share > 10 * ideal.share and not any("WARNING" in note for note in far.notes)
    low = measure.explain(training.step, data=training.batch, ceilings=measure.Ceilings(1e-6, None, "invented"), **QUICK)
    assert low["GEMM inefficiency"].nanoseconds == 0 and any("WARNING" in note for note in low.notes)
    assert sum(part.share for part in low.parts) == pytest.approx(1, abs=1e-12)


# What is handed over


def test_a_loader_is_begun_anew_where_it_ends():
    seen = []
    measure.explain(lambda batch: seen.append(batch), data=[1, 2, 3], **QUICK)
    assert seen[:7] == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
    "data, fault",
    [
        ((x for x in (1, 2)), "cannot be restarted"),
        ([], "cannot be restarted"),
        (3, "type int, which is neither callable nor iterable"),
    ],
)
def test_data_that_runs_dry_is_refused(data, fault):
    with pytest.raises(HyperionError, match=fault):
        measure.explain(lambda batch: None, data=data, **QUICK)


def test_a_step_that_cannot_be_called_so_is_refused():
    with pytest.raises(HyperionError, match="is not callable"):
        measure.explain(torch.ones(1))
    with pytest.raises(HyperionError, match="missing a required argument"):
        measure.explain(lambda batch: None, **QUICK)
    with pytest.raises(HyperionError, match="too many positional"):
        measure.explain(lambda: None, data=[1], **QUICK)
    with pytest.raises(HyperionError, match="profiled_steps is 0"):
        measure.explain(lambda: None, **{**QUICK, "profiled_steps": 0})


def test_a_step_s_own_error_comes_through_with_a_note():
    def broken(batch):
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit") as raised:
        measure.explain(broken, data=[1], **QUICK)
    assert any("hyperion.measure.explain" in note for note in raised.value.__notes__)
