"""Reference run: a plain PyTorch training loop around the Llama model of transformers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work


def train(work: Work, observer: Observer, **how: Any) -> dict:
    """Perform the work on one rank and return the record.

    Args:
        work: the training work.
        observer: observer of this rank.
        how: further arguments of AdamW, such as `fused`.
    """
    model = work.load_model(observer.device)
    optimizer = work.adamw(model, **how)
    observer.start(model, model.get_input_embeddings(), model.state_dict())
    for step in range(work.all_steps):
        losses = []
        for rows_BT in work.micro_batch_list(step, device=observer.device):
            with torch.autocast(torch.device(observer.device).type, torch.bfloat16, enabled=work.dtype == "bf16"):
                loss = token_loss(model, rows_BT) / work.micro_batches
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        observer.step(torch.stack(losses).sum(), norm, work.step_tokens)
    return observer.finish(model.state_dict())


def token_loss(model: nn.Module, rows_BT: Tensor, shift: int = 1, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of the predicted tokens.

    Args:
        model: Llama model of transformers.
        rows_BT: int64 tokens of shape [B, T + 1].
        shift: number of tokens from an input to its target. The correct value is 1.
        reduction: "mean" or "sum" over all tokens.
    """
    logits_BTV = model(input_ids=rows_BT[:, :-1], use_cache=False).logits.float()
    targets_BT = rows_BT[:, shift : shift + logits_BTV.shape[1]]
    logits_BTV = logits_BTV[:, : targets_BT.shape[1]]
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction=reduction)


@torch.no_grad()
def first_losses(work: Work, device: str = "cpu") -> dict[int, float]:
    """Return the mean loss of the first step for each label shift of 0, 1 and 2 tokens from an input to its target."""
    model = work.load_model(device)
    rows_BT = work.whole_batch(0, device=device)
    return {shift: float(token_loss(model, rows_BT, shift)) for shift in (0, 1, 2)}
