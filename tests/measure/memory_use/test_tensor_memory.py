"""The counter of tensor bytes against bytes counted by hand, and against what autograd says it keeps."""

import pytest
import torch
from torch import nn

from hyperion.hardware import detect_cpu
from hyperion.measure import SavedForBackward, TensorMemory, bytes_of, state_of

CPU = detect_cpu()
KIB = 256  # float32 elements


def test_views_share_a_storage_and_what_goes_is_forgotten():
    there = torch.ones(KIB)
    with TensorMemory(CPU, [there, there.view(16, 16)]) as memory:
        assert memory.now_bytes == 1024
        a = torch.zeros(4 * KIB)
        view = a.view(64, 16)[3:]
        assert memory.now_bytes == 5 * 1024
        del a
        assert memory.now_bytes == 5 * 1024, "the view keeps the storage"
        del view, there
        # The list that was handed over has gone, so the first tensor has gone too.
        assert memory.now_bytes == 0
    assert memory.peak_bytes == 5 * 1024


def test_peak_holds_inputs_and_outputs_of_the_moment_and_can_be_reset():
    with TensorMemory(CPU) as memory:
        kept = (torch.ones(KIB) + 1) * 2  # three tensors come, never more than two at once
        assert (memory.now_bytes, memory.peak_bytes) == (1024, 2048)
        memory.reset_peak()
        assert memory.peak_bytes == 1024
        kept.add_(1)
        torch.mul(kept, 2, out=kept)
    assert memory.peak_bytes == 1024, "in place there is nothing new"


def test_nothing_counts_outside_the_context_and_other_devices_never_do():
    with TensorMemory(CPU) as memory:
        inside = torch.ones(KIB)
        torch.ones(KIB, device="meta")
    outside = torch.ones(KIB)
    del inside
    assert memory.now_bytes == memory.peak_bytes == 1024 and outside.numel()


def linear_and_square() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(64, 128, bias=False), torch.randn(32, 64)


def test_forward_and_backward_of_a_hand_example():
    model, x = linear_and_square()
    weight_bytes, out_bytes = 4 * 64 * 128, 4 * 32 * 128
    with TensorMemory(CPU, [model.weight, x]) as memory:
        start = memory.now_bytes
        with SavedForBackward([model.weight, x]) as saved:
            loss = model(x).square().sum()
        # square keeps its input, the layer's output; the layer keeps weight and x, which were there before.
        assert saved.bytes == out_bytes
        assert memory.now_bytes - start == out_bytes + 4
        assert memory.peak_bytes - start == 2 * out_bytes + 4
        loss.backward()
        assert saved.bytes == 0
        assert memory.now_bytes - start == weight_bytes + 4
    assert bytes_of([model.weight.grad]) == weight_bytes


def test_under_no_grad_nothing_is_kept():
    model, x = linear_and_square()
    with TensorMemory(CPU, [model.weight, x]) as memory, SavedForBackward([model.weight, x]) as saved, torch.no_grad():
        start = memory.now_bytes
        model(x).square().sum()
    assert saved.bytes == 0 and memory.now_bytes == start


@pytest.mark.parametrize("optimizer, moments", [("AdamW", 2), ("SGD", 1)])
def test_the_state_of_a_training_by_what_it_is(optimizer, moments):
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    assert bytes_of(state_of(model, chosen)["gradients"]) == bytes_of(state_of(model, chosen)["optimizer state"]) == 0
    model(torch.randn(8, 16)).sum().backward()
    chosen.step()
    parts = {name: bytes_of(tensors) for name, tensors in state_of(model, chosen).items()}
    parameters = 4 * (16 * 32 + 32 + 2 * 32)
    steps = 4 * 4 if optimizer == "AdamW" else 0  # one counter a parameter
    assert parts == {
        "parameters": parameters,
        "buffers": 4 * 2 * 32 + 8,
        "gradients": parameters,
        "optimizer state": moments * parameters + steps,
    }
