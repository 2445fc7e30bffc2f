"""What is reported of a compilation: planted breaks, recompilations and missing compilers, cold caches. No speed is asserted."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.measure.steps import compilation as compilations
from hyperion.measure.steps.compilation import (
    _first_calls,
    _forget,
    _kernel_calls,
    _loud_and_quiet,
    _recompiles,
    cold_caches,
    count_graph_breaks,
    measure_compilation,
    missing_compiler,
    probe_vector_instructions,
)


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


class Branching(torch.nn.Module):
    """Two layers with a branch on data between them: one graph cannot hold it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if x.sum() > 1e9:
            x = x + 1
        return self.second(x)


@pytest.fixture(scope="module")
def broken(cpu, tmp_path_factory):
    """A compilation with a planted graph break, with what went in and came out."""
    torch.manual_seed(0)
    module, x = Branching().eval(), torch.randn(4, 8)
    with torch.inference_mode():
        probe_vector_instructions(cpu, tmp_path_factory.mktemp("probe"))
        compiled, compilation = measure_compilation(module, (x,), "reduce-overhead", cpu)
        return compilation, compiled(x), module(x)


@pytest.mark.process
def test_a_planted_graph_break_is_counted_with_its_reason(broken):
    compilation = broken[0]
    assert (compilation.graphs, compilation.graph_breaks) == (2, 1)
    assert list(compilation.break_reasons) == ["Data-dependent branching"]


@pytest.mark.process
def test_what_the_compiler_wrote_is_counted(broken):
    calls = broken[0].kernel_calls
    assert calls["library"] == 2 and calls["template"] == 0  # the two products
    assert calls["fused"] == 1  # ReLU, sum and comparison in one loop


@pytest.mark.process
def test_first_calls_end_when_nothing_is_compiled_any_more(broken):
    compilation = broken[0]
    assert len(compilation.first_calls_s) == 4  # one that compiles, three that do not
    assert 0 < compilation.compile_time_s < sum(compilation.first_calls_s)
    assert compilation.recompiles == ()


@pytest.mark.process
def test_a_cpu_says_that_it_has_no_cuda_graphs(broken):
    assert broken[0].cuda_graphs == "skipped: a CPU has no CUDA graphs"


@pytest.mark.process
def test_the_compiled_function_computes_the_same(broken):
    torch.testing.assert_close(broken[1], broken[2])


def test_breaks_are_counted_without_a_compiler():
    x = torch.randn(4, 8)
    assert count_graph_breaks(Branching(), (x,))[0] == 1
    assert count_graph_breaks(torch.nn.Linear(8, 8), (x,)) == (0, {})


def test_a_recompilation_is_no_graph_break():
    _forget()
    captured = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    captured(torch.zeros(2))
    captured(torch.zeros(3))
    assert len(_recompiles()) == 1 and "size mismatch" in _recompiles()[0]


class Counting(torch.nn.Module):
    """Its first calls change an attribute that the compiled code contains as a constant."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls = min(self.calls + 1, 2)
        return x * self.calls


def counting_outside_of_the_graph():
    """Dynamo does not trace the assignment: the code before it is compiled again too, and has no graph."""
    holder = SimpleNamespace(calls=0)

    def changing(x):
        holder.calls = min(holder.calls + 1, 2)
        return x * holder.calls

    return changing


@pytest.mark.process
@pytest.mark.parametrize(("make", "recompiles"), [(Counting, 2), (counting_outside_of_the_graph, 3)])
def test_graphs_are_those_of_the_first_compilation_of_each_code(cpu, make, recompiles):
    _, compilation = measure_compilation(make(), (torch.ones(4),), "default", cpu)
    assert (compilation.graphs, len(compilation.recompiles), compilation.graph_breaks) == (1, recompiles, 0)


def test_a_function_that_is_compiled_again_and_again_is_refused(cpu):
    from torch._dynamo.utils import counters

    def restless():
        counters["frames"]["total"] += 1

    with pytest.raises(HyperionError, match="still being compiled"):
        _first_calls(restless, (), cpu)


def test_an_unknown_mode_is_refused(cpu):
    with pytest.raises(HyperionError, match="'fast' is not a mode"):
        measure_compilation(torch.nn.Identity(), (torch.zeros(1),), "fast", cpu)


@pytest.mark.process
def test_a_missing_compiler_is_told_with_the_remedy(cpu):
    import torch._inductor.config

    assert missing_compiler(cpu) == ""
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "install g++" in missing_compiler(cpu)


def test_caches_are_empty_and_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with cold_caches() as folder:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder) and not list(folder.iterdir())
        assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine" and "TRITON_CACHE_DIR" not in os.environ
    assert not folder.exists()


def test_candidates_that_autotuning_rejects_leave_no_tracebacks(caplog):
    autotuning = logging.getLogger("torch._inductor.select_algorithm")
    before = autotuning.level
    with _loud_and_quiet():
        autotuning.error("No valid triton configs", exc_info=ValueError("out of resource"))
    assert not caplog.records and autotuning.level == before
    autotuning.error("afterwards")
    assert [record.message for record in caplog.records] == ["afterwards"]


def test_calls_of_a_gpu_wrapper_are_told_apart(tmp_path):
    (tmp_path / "wrapper.py").write_text(
        """
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', '''
def triton_poi_fused_relu_0(in_out_ptr0, xnumel): ...
''')
async_compile.wait(globals())
class Runner:
    def call(self, args):
            buf0 = extern_kernels.convolution(arg0_1, arg1_1, stride=(1, 1))
            triton_poi_fused_relu_0.run(buf0, 1024, stream=stream0)
            triton_tem_fused_addmm_1.run(buf0, arg2_1, buf1, 8, 1, 1, stream=stream0)
            extern_kernels.addmm(arg3_1, buf1, arg4_1, alpha=1, beta=1, out=buf2)
            buf3 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf2, buf2, buf2)
            assert_size_stride(buf3, (4, 8), (8, 1))
"""
    )
    (tmp_path / "kernel.py").write_text("def call(args):\n    triton_.run(*args, stream=0)\n")
    assert _kernel_calls(tmp_path) == {"fused": 1, "template": 1, "library": 3}


def test_calls_of_a_function_with_compiled_parts_count_what_they_take_longer_than_the_fastest(monkeypatch):
    monkeypatch.setattr(compilations, "_first_calls", lambda function, arguments, device: [3.0, 1.0, 1.5, 1.0])
    assert compilations.measure_first_calls(lambda: None, detect_cpu()) == 2.5
