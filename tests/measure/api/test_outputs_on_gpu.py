"""`measure.time` and `measure.compare` refuse wrong calls on a GPU too, where work ends after the call returns."""

import pytest
import torch

from hyperion import measure
from hyperion.hardware import detect
from hyperion.measure import HarnessError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
SHORT = {"cold": False, "minimum_samples": 5, "time_limit_s": 20.0}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(detect().torch_device)


def test_one_wrong_element_of_a_million_is_found():
    x = _noise(1000, 1000)

    def wrong():
        y = x * 2
        y[3, 5] = x[3, 5] * 2.2
        return y

    answer = measure.compare(lambda: x * 2, wrong, **SHORT)
    assert answer.outputs_agree is False and "[3, 5]" in str(answer)


def test_an_output_that_changed_while_it_was_timed_is_refused():
    x, calls = _noise(64), []

    def function():
        calls.append(None)
        return x * (2.0 if len(calls) <= 5 else 2.1)

    with pytest.raises(HarnessError, match="a call after the timing returned a different value"):
        measure.time(function, **SHORT)


def test_a_call_that_writes_nothing_is_refused():
    x, made = _noise(64), []

    def function():
        if not made:
            made.append(x * 2)
        return made[0]

    with pytest.raises(HarnessError, match="did not write to"):
        measure.time(function, **SHORT)


def test_an_output_that_is_an_input_is_refused_and_left_as_it_was():
    x = _noise(64)
    before = x.clone()
    with pytest.raises(HarnessError, match="the output aliases an input: it is x "):
        measure.time(lambda: x[1:], **SHORT)
    assert torch.equal(x, before)


def test_work_on_another_stream_is_refused():
    x, other = _noise(4096, 4096), torch.cuda.Stream()

    def function():
        with torch.cuda.stream(other):
            for _ in range(20):
                y = x @ x
        return y

    with pytest.raises(HarnessError, match="on streams other than the current stream"):
        measure.time(function, **SHORT)


def test_a_replayed_graph_that_writes_its_buffer_is_timed():
    x, out = _noise(64), torch.empty(64, device=detect().torch_device)
    torch.mul(x, 2, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(x, 2, out=out)

    def replay():
        graph.replay()
        return out

    answer = measure.time(replay, **SHORT)
    assert torch.equal(out, x * 2) and answer.timing.estimate.value > 0
