"""Lightning Fabric: `setup`, `backward` and `clip_gradients` around a plain loop."""

import contextlib
from typing import Any

import torch
from lightning_fabric import Fabric  # pyright: ignore[reportMissingImports]
from lightning_fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment  # pyright: ignore[reportMissingImports]

from hyperion.engines.observer import Observer
from hyperion.engines.plain import token_loss
from hyperion.engines.work import Work


def train(work: Work, observer: Observer) -> dict:
    """Perform the work and return the record. With several ranks, the strategy is DDP."""
    here = observer.here
    fabric = Fabric(
        accelerator="cpu" if torch.device(observer.device).type == "cpu" else "cuda",
        devices=here.size if torch.device(observer.device).type == "cpu" else [here.local_rank] if here.size == 1 else here.size,
        strategy="ddp" if here.size > 1 else "auto",
        precision="bf16-mixed" if work.dtype == "bf16" else "32-true",
        # Without it, Fabric would look for the tasks of Slurm and MPI, and fail if mpi4py does not find its library.
        plugins=TorchElasticEnvironment() if here.size > 1 else LightningEnvironment(),
    )
    fabric.launch()  # starts no processes: torchrun has already started the ranks
    plain = work.load_model()
    embedding = plain.get_input_embeddings()
    model: Any
    optimizer: Any
    model, optimizer = fabric.setup(plain, work.adamw(plain))
    observer.start(model, embedding, plain.state_dict())
    for step in range(work.all_steps):
        losses, tokens = [], 0
        parts = work.micro_batch_list(step, here.rank, here.size, observer.device)
        for number, rows_BT in enumerate(parts, 1):
            last = number == len(parts)
            with contextlib.nullcontext() if last else fabric.no_backward_sync(model):
                loss = token_loss(model, rows_BT)
                fabric.backward(loss / work.micro_batches)
            losses.append(loss.detach())
            tokens += rows_BT[:, 1:].numel()
        norm = fabric.clip_gradients(model, optimizer, max_norm=work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        observer.step(torch.stack(losses).mean(), norm, tokens)
    return observer.finish(plain.state_dict())
