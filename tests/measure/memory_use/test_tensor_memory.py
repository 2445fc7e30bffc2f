"""The counter of tensor bytes against bytes counted by hand, and against what autograd says it keeps."""

import mmap

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperion.hardware import detect_cpu
from hyperion.measure import PeakMemoryRegion, SavedForBackward, TensorMemory, bytes_of, state_of
from hyperion.measure.memory_use.tensor_memory import ACTIVATIONS, GRADIENTS, TEMPORARY, MemoryTimeline, allocated_peak

CPU = detect_cpu()
KIB = 256  # float32 elements
WEIGHT, IN, OUT = 4 * 64 * 128, 4 * 32 * 64, 4 * 32 * 128


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


def test_a_storage_that_grows_is_counted_with_its_new_size():
    there = torch.ones(KIB)
    with TensorMemory(CPU, [there]) as memory:
        out = torch.empty(0)
        torch.add(there, 1, out=out)
        assert memory.now_bytes == 2 * 1024
        out.resize_(3 * KIB)
        assert memory.now_bytes == 4 * 1024
        del out
        assert (memory.now_bytes, memory.peak_bytes) == (1024, 4 * 1024)


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


def test_peak_sees_memory_that_was_freed_again():
    held_gib = 0.25
    with PeakMemoryRegion(detect_cpu()) as idle:
        pass
    # Anonymous pages of our own: an allocator might serve the block from pages that were resident before.
    with PeakMemoryRegion(detect_cpu()) as busy, mmap.mmap(-1, int(held_gib * 2**30)) as block:
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    if idle.peak.gib is None:
        pytest.skip(idle.peak.reason)
    assert busy.peak.metric == "peak_rss_gib"
    assert busy.peak.gib - idle.peak.gib == pytest.approx(held_gib, rel=0.2)


def watched(model, x, step, **options):
    standing = {"parameters": model.parameters(), "batch": [x]}
    with MemoryTimeline(model, standing, **options) as timeline:
        step()
    return timeline.history()


def test_lives_of_a_step_by_what_they_are():
    model, x = nn.Linear(64, 128, bias=False), torch.randn(32, 64)

    def step():
        model(x).square().sum().backward()
        model.zero_grad()

    history = watched(model, x, step)
    parts = history.parts
    assert parts.pop(TEMPORARY) >= OUT
    assert parts == {"parameters": WEIGHT, "batch": IN, ACTIVATIONS: pytest.approx(OUT, abs=64), GRADIENTS: WEIGHT}
    assert history.levels()[-1] == pytest.approx(WEIGHT + IN, abs=64), "all that came has gone"
    fullest = history.fullest()
    assert sum(history.at(fullest).values()) == history.peak_bytes == max(history.levels())
    assert history.phase_of(fullest) == "backward"
    assert history.levels(ACTIVATIONS)[history.phase_ends[1] - 1] <= 64, "but for the loss"


def test_blocks_are_rounded_up_and_a_kernel_may_need_more_than_it_gives_out():
    model, x = nn.Linear(64, 128, bias=False), torch.randn(32, 64)

    def step():
        with torch.no_grad():
            model(x).sum()

    plain, asking = watched(model, x, step), watched(model, x, step, inside=lambda operator, arguments: 10**6)
    assert asking.peak_bytes == plain.peak_bytes + 10**6
    assert all(life.size % 512 == 0 for life in watched(model, x, step, block_bytes=512).lives)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def forward(self, x):
        return (x @ self.weight).sum() + (2 * x @ self.weight).sum()


def test_two_gradients_of_one_weight_are_added_in_place_as_unwatched():
    """The profiler sees what the allocator did when no mode watched: never three gradients at once."""

    def step(model, x):
        model(x).backward()
        model.zero_grad()

    model, x = Twice(), torch.randn(4, 512)
    real = allocated_peak(detect_cpu(), lambda: step(model, x), 4 * (512 * 512 + 4 * 512))
    assert watched(model, x, lambda: step(model, x)).peak_bytes > 1.2 * real, "watched, autograd makes a third"
    with FakeTensorMode():
        model, x = Twice(), torch.randn(4, 512)
        assert watched(model, x, lambda: step(model, x), in_place=True).peak_bytes == pytest.approx(real, rel=0.01)
