"""What two ranks do in the test of `measure.explain`: a step of DDP, whose all-reduce has nothing to hide behind."""

import torch
from torch import nn

from hyperion import measure
from hyperion.processes import world


def explain_ddp() -> dict:
    """Steps of a layer whose gradients take long to reduce and little to compute."""
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(1, 1024)

    def step():
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    found = measure.explain(step, device="cpu", profiled_steps=2, minimum_samples=5, time_limit_s=0.05)
    return {
        "rank": world().rank,
        "samples": found.timing.samples_s.tolist(),
        "shares": {part.name: part.share for part in found.parts},
    }
