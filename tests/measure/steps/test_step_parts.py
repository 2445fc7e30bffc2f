"""The parts of a step: each kernel has the part of the operator that launched it, and all parts add up to the step."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure.steps.step_parts import (
    _MARK,
    ATTENTION,
    CASTS,
    ELEMENTWISE,
    EXCHANGE,
    IDLE,
    LOSS,
    OPTIMIZER,
    OTHER,
    PARTS,
    PRODUCTS,
    StepParts,
    StepTracer,
    step_part,
    step_parts,
)

VECTORIZED = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
REDUCE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_256x128_32x3_nn_align8>", PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", PRODUCTS),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x256x32_MI32x32x8x1", PRODUCTS),
        ("triton_tem_fused_mm_1", PRODUCTS),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>", ATTENTION),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true>", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1", ATTENTION),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", ATTENTION),
        ("void ck_tile::kentry<FmhaFwdKernel>", ATTENTION),
        ("attn_fwd", ATTENTION),
        ("bwd_kernel_dk_dv", ATTENTION),
        ("bwd_kernel_fuse", ATTENTION),
        ("bwd_preprocess", ATTENTION),
        ("triton_tem_fused_flex_attention_0", ATTENTION),
        (FOREACH + "at::native::FusedAdamMathFunctor<float, 4, at::native::ADAM_MODE::ADAMW>>", OPTIMIZER),
        (FOREACH + "at::native::LpNormFunctor<float, at::native::NormType::L2>>", OPTIMIZER),
        (FOREACH + "at::native::CopyFunctor<float, float>>", CASTS),
        ("triton_for_fused_0", OPTIMIZER),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>", LOSS),
        ("void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>", LOSS),
        ("triton_red_fused__log_softmax_nll_loss_forward_3", LOSS),
        ("nll_and_slope", LOSS),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", EXCHANGE),
        ("rcclGenericKernel<1, false>", EXCHANGE),
        (VECTORIZED, ELEMENTWISE),
        (REDUCE, ELEMENTWISE),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>", ELEMENTWISE),
        ("triton_poi_fused_mul_silu_0", ELEMENTWISE),
        ("triton_red_fused__to_copy_mean_mul_pow_rsqrt_2", ELEMENTWISE),
        # The product, the attention and the collective in these names are computed by another kernel.
        ("triton_poi_fused_mm_mul_silu_2", ELEMENTWISE),
        ("triton_poi_fused__scaled_dot_product_flash_attention_clone_1", ELEMENTWISE),
        ("triton_poi_fused_all_gather_into_tensor_mul_4", ELEMENTWISE),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>", CASTS),
        ("void at::native::elementwise_kernel<128, 4, at::native::bfloat16_copy_kernel_cuda>", CASTS),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4, 64, 64>", CASTS),
        ("triton_poi_fused__to_copy_0", CASTS),
        ("void at::native::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>", OTHER),
    ],
)
def test_the_part_by_the_name_of_the_kernel(kernel, part):
    assert step_part(kernel) == part


@pytest.mark.parametrize(
    ("kernel", "callers", "part"),
    [
        (VECTORIZED, ("aten::add_", "Optimizer.step#AdamW.step"), OPTIMIZER),
        ("void at::native::direct_copy_kernel_cuda", ("aten::copy_", "Optimizer.step#AdamW.step"), OPTIMIZER),
        (REDUCE, ("aten::linalg_vector_norm",), OPTIMIZER),
        (VECTORIZED, ("aten::mul_", "aten::_foreach_mul_"), OPTIMIZER),
        (VECTORIZED, ("aten::add",), ELEMENTWISE),
        (VECTORIZED, ("aten::_fused_rms_norm_backward",), ELEMENTWISE),
        ("void vectorized_rms_norm_backward", ("aten::_fused_rms_norm_backward", "FusedRmsNormBackward0"), ELEMENTWISE),
        (VECTORIZED, ("aten::sub", "aten::_log_softmax_backward_data", "LogSoftmaxBackward0"), LOSS),
        (VECTORIZED, ("aten::div", "NllLossBackward0"), LOSS),
        ("nvjet_tst_64x8", ("aten::mm", "hyperion::head_loss"), PRODUCTS),
        ("nvjet_tst_64x8", ("aten::bmm", "aten::_scaled_dot_product_attention_math"), ATTENTION),
        ("void cudnn::fusion::compute_dot_do_o", ("aten::_scaled_dot_product_cudnn_attention_backward",), ATTENTION),
        ("bfloat16_copy_kernel_cuda", ("aten::copy_", "aten::_to_copy", "aten::scaled_dot_product_attention"), CASTS),
        (VECTORIZED, ("aten::copy_", "aten::to", "aten::linear"), CASTS),
        ("some_library_kernel", ("aten::mm", "MmBackward0"), PRODUCTS),
        ("void indexSelect", ("aten::index_select", "aten::embedding"), OTHER),
        (VECTORIZED, ("aten::fill_", "aten::zero_"), OTHER),
    ],
)
def test_the_operator_that_launched_a_kernel_decides_before_its_name(kernel, callers, part):
    assert step_part(kernel, callers) == part


class TraceOfAGpu:
    """A trace as the profiler writes it: two marks around a step of 1 ms with kernels that operators launched."""

    def __init__(self):
        self.raw = [self.host("user_annotation", "hyperion: end of step", at, at + 1) for at in (1000, 2000)]
        self.ids = iter(range(1, 100))

    @staticmethod
    def host(category, name, start, end, tid=1, **about):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": about}

    def launch(self, kernel, operator, start, end, by="External id", stream=7, tid=1):
        """Add a kernel, and the operator that launches it 100 microseconds before."""
        number = next(self.ids)
        linked = {"External id": number} if by == "External id" else {}
        self.raw.append(self.host("cpu_op", operator, start - 100, start - 50, tid, **linked))
        if by == "correlation":
            self.raw.append(self.host("cuda_runtime", "cudaLaunchKernel", start - 80, start - 70, tid, correlation=number))
        about = {"device": 0, "stream": stream, "correlation": number, **linked}
        self.raw.append({"ph": "X", "cat": "kernel", "name": kernel, "ts": start, "dur": end - start, "args": about})

    def parts(self) -> StepParts:
        return step_parts(self.raw, [(5.0, 5.000_002), (5.001, 5.001_001)], gpu=True, index=0)


@pytest.mark.parametrize("by", ["External id", "correlation"])
def test_the_kernels_of_a_gpu_find_their_operators(by):
    trace = TraceOfAGpu()
    trace.launch("nvjet_tst_192x192", "aten::mm", 1100, 1500, by)
    trace.raw.append(trace.host("user_annotation", "Optimizer.step#AdamW.step", 1450, 1560))
    trace.launch(VECTORIZED, "aten::add_", 1600, 1700, by)
    trace.launch(VECTORIZED, "aten::add", 1800, 1850, by, tid=2)
    trace.launch(VECTORIZED, "aten::add", 2100, 2200, by)  # after the step
    parts = trace.parts()
    assert parts.parts_s == pytest.approx(
        dict.fromkeys(PARTS, 0) | {PRODUCTS: 4e-4, OPTIMIZER: 1e-4, ELEMENTWISE: 5e-5, IDLE: 4.5e-4}
    )
    assert [(kernel.operator, kernel.part, kernel.calls) for kernel in parts.kernels] == [
        ("aten::mm", PRODUCTS, 1),
        ("aten::add_", OPTIMIZER, 1),
        ("aten::add", ELEMENTWISE, 1),
    ]
    assert StepParts.of(json.loads(json.dumps(asdict(parts)))) == parts


def test_launches_of_one_kernel_are_counted_and_their_times_added():
    trace = TraceOfAGpu()
    trace.launch("nvjet_tst_192x192", "aten::mm", 1200, 1300)
    trace.launch("nvjet_tst_192x192", "aten::mm", 1500, 1900)
    (kernel,) = trace.parts().kernels
    assert (kernel.calls, kernel.time_s) == (2, pytest.approx(5e-4))


def test_kernels_that_run_at_the_same_time_count_once_and_exposed_communication_is_a_part():
    trace = TraceOfAGpu()
    trace.launch("nvjet_tst_192x192", "aten::mm", 1100, 1500)
    trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "c10d::allreduce_", 1300, 1800, stream=20)
    trace.raw.append(trace.raw[-1] | {"cat": "gpu_memcpy", "name": "CopyHostToDevice", "ts": 1900, "dur": 50})
    parts = trace.parts()
    expected = {PRODUCTS: 4e-4, EXCHANGE: 3e-4, CASTS: 5e-5, IDLE: 2.5e-4}
    assert parts.parts_s == pytest.approx(dict.fromkeys(PARTS, 0) | expected)
    assert sum(parts.parts_s.values()) == pytest.approx(parts.step_time_s, abs=parts.tolerance_s)
    assert parts.step_time_s == pytest.approx(1e-3) and parts.tolerance_s == pytest.approx(2e-6 + 5e-7)


def test_a_kernel_of_a_replayed_graph_has_the_part_of_its_name():
    trace = TraceOfAGpu()
    trace.launch(FOREACH + "FusedAdamMathFunctor<float>>", "cudaGraphLaunch", 1100, 1500, by="correlation")
    trace.launch("nvjet_tst_64x8", "cudaGraphLaunch", 1500, 1600, by="correlation")
    assert [(kernel.operator, kernel.part) for kernel in trace.parts().kernels] == [("", OPTIMIZER), ("", PRODUCTS)]


def test_a_trace_without_kernels_or_without_marks_is_refused():
    trace = TraceOfAGpu()
    with pytest.raises(HyperionError, match="recorded no kernel on the GPU"):
        trace.parts()
    trace.raw.pop(0)
    with pytest.raises(HyperionError, match="1 marks instead of 2"):
        trace.parts()


def test_the_time_of_two_marks_is_a_tolerance_of_the_mean_of_all_steps():
    raw = [TraceOfAGpu.host("user_annotation", _MARK, 1e6 * n, 1e6 * n + 1) for n in range(5)]
    marked_s = [(n, n + 4e-4) for n in range(5)]
    assert step_parts(raw, marked_s, gpu=False).tolerance_s == pytest.approx(4e-4 / 4 + 5e-4)


def test_the_steps_of_a_real_loop_add_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs, targets = torch.randn(256, 64), torch.zeros(256, dtype=torch.int64)
    tracer = StepTracer(detect_cpu(), 2)
    tracer.start()
    finished = []
    for _ in range(3):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        finished.append(tracer.end_step())
    parts = tracer.parts()
    assert finished == [False, False, True] and parts.steps == 2
    assert abs(sum(parts.parts_s.values()) - parts.step_time_s) <= parts.tolerance_s < parts.step_time_s / 2
    assert min(parts.parts_s[part] for part in (PRODUCTS, ELEMENTWISE, LOSS, OPTIMIZER, IDLE)) > 0
    calls = {kernel.name: kernel.calls for kernel in parts.kernels}
    assert calls["aten::addmm"] >= 2 and calls["aten::silu"] == 1
    assert {kernel.part for kernel in parts.kernels if kernel.name.startswith("aten::_fused_adamw")} == {OPTIMIZER}
    assert not Path("trace.json").exists()
