"""Hugging Face accelerate: `prepare`, `accumulate`, `backward` and `clip_grad_norm_` around a plain loop."""

import torch
from accelerate import Accelerator

from hyperion.engines.observer import Observer
from hyperion.engines.plain import token_loss
from hyperion.engines.work import Work


def train(work: Work, observer: Observer) -> dict:
    """Perform the work and return the record. With several ranks, accelerate wraps the model in DDP."""
    here = observer.here
    accelerator = Accelerator(
        cpu=torch.device(observer.device).type == "cpu",
        mixed_precision="bf16" if work.dtype == "bf16" else "no",
        gradient_accumulation_steps=work.micro_batches,
    )
    model = work.load_model()
    embedding, plain = model.get_input_embeddings(), model
    model, optimizer = accelerator.prepare(model, work.adamw(model))
    observer.start(model, embedding, plain.state_dict())
    for step in range(work.all_steps):
        losses, norm, tokens = [], None, 0
        for rows_BT in work.micro_batch_list(step, here.rank, here.size, observer.device):
            # accelerate divides the loss by the number of micro-batches, and synchronizes gradients only in the last one.
            with accelerator.accumulate(model):
                loss = token_loss(model, rows_BT)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), work.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            tokens += rows_BT[:, 1:].numel()
        observer.step(torch.stack(losses).mean(), norm, tokens)
    return observer.finish(plain.state_dict())
