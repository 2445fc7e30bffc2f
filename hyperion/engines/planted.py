"""Deliberately unequal work: the plain loop with one unfairness, to test the judge."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperion.engines.observer import Observer
from hyperion.engines.plain import token_loss
from hyperion.engines.work import Work

# Maps each unfairness to the name of the difference that the judge must report.
PLANTED = {
    "learning rate x 1.1": "learning rate",
    "learning rate decays": "learning rate",
    "SGD": "optimizer",
    "Adam with L2": "optimizer",
    "AMSGrad": "optimizer",
    "beta2 0.999": "betas",
    "eps 1e-6": "eps",
    "weight decay 0.01": "weight decay",
    "weight decay on norms": "decay on norms",
    "labels not shifted": "label shift",
    "labels shifted twice": "label shift",
    "rows shuffled": "data order",
    "one row twice": "data order",
    "loss is a sum": "loss reduction",
    "gradient of a sum": "gradient reduction",
    "micro-batches not averaged": "gradient reduction",
    "one micro-batch left out after step 1": "later gradients",
    "no clipping": "gradient clipping",
    "clipped to half of the limit": "gradient clipping",
    "bf16 weights": "master dtype",
    "gradients reduced in bf16": "reduction dtype",
    "one layer frozen": "updated elements",
    "NaN from step 3": "not finite",
    "one step less": "optimizer steps",
    "one step more": "optimizer steps",
    "tokens counted per rank": "tokens counted",
    "other initial state": "initial state",
}
# Fields of the work that an unfairness multiplies by a factor.
_FACTORS = {"learning rate x 1.1": ("learning_rate", 1.1), "eps 1e-6": ("eps", 100.0), "weight decay 0.01": ("weight_decay", 0.1)}


def train(work: Work, observer: Observer, unfairness: str) -> dict:
    """Perform the work with one unfairness, and return the record. The work needs at least two micro-batches.

    "gradients reduced in bf16" needs a process group of at least one rank.

    Args:
        work: the training work.
        observer: observer of this rank.
        unfairness: a key of `PLANTED`, or "" for the unchanged loop.
    """
    model: Any = work.load_model(observer.device)
    if unfairness == "other initial state":
        nn.init.normal_(next(model.parameters()), std=0.1)
    if unfairness == "bf16 weights":
        model = model.to(torch.bfloat16)
    if unfairness == "one layer frozen":
        for name, parameter in model.model.layers[0].named_parameters():
            parameter.requires_grad = "norm" in name
    optimizer = _optimizer(work, model, unfairness)
    observer.start(model, model.get_input_embeddings(), model.state_dict())
    steps = work.steps - 1 if unfairness == "one step less" else work.steps
    for step in range(steps):
        if unfairness == "learning rate decays":
            for group in optimizer.param_groups:
                group["lr"] = work.learning_rate * (1 - step / work.steps)
        loss, norm = _gradients(work, observer, model, step, unfairness)
        if unfairness == "NaN from step 3" and step == 2:
            next(model.parameters()).grad.fill_(torch.nan)
        if unfairness != "no clipping":
            limit = work.clip_norm / 2 if unfairness == "clipped to half of the limit" else work.clip_norm
            norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if unfairness == "one step more" and step == steps - 1:
            optimizer.step()
        optimizer.zero_grad()
        observer.step(loss, norm, work.step_tokens // (2 if unfairness == "tokens counted per rank" else 1))
    return observer.finish(model.state_dict())


def _gradients(work: Work, observer: Observer, model: nn.Module, step: int, unfairness: str) -> tuple[Any, Any]:
    """Compute the gradients of a step. Return the loss, and the norm before clipping if the unfairness skips clipping."""
    shift = {"labels not shifted": 0, "labels shifted twice": 2}.get(unfairness, 1)
    parts = work.micro_batch_list(step, device=observer.device)
    if unfairness == "rows shuffled":
        parts = work.micro_batch_list((step + 1) % work.steps, device=observer.device)
    if unfairness == "one row twice":
        parts[-1] = torch.cat([parts[-1][:-1], parts[-1][:1]])
    total: Any = 0.0
    for rows_BT in parts:
        loss = token_loss(model, rows_BT, shift) / work.micro_batches
        scale = work.step_tokens if unfairness in ("loss is a sum", "gradient of a sum") else 1
        if unfairness != "one micro-batch left out after step 1" or step == 0 or rows_BT is parts[0]:
            (loss * (work.micro_batches if unfairness == "micro-batches not averaged" else scale)).backward()
        total = total + loss.detach() * (work.step_tokens if unfairness == "loss is a sum" else 1)
    if unfairness == "gradients reduced in bf16":
        for parameter in model.parameters():
            if parameter.grad is not None:
                rounded = parameter.grad.to(torch.bfloat16)
                dist.all_reduce(rounded)
                parameter.grad.copy_(rounded)
    if unfairness == "no clipping":
        return total, nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return total, None


def _optimizer(work: Work, model: nn.Module, unfairness: str) -> torch.optim.Optimizer:
    if unfairness in _FACTORS:
        name, factor = _FACTORS[unfairness]
        work = replace(work, **{name: factor * getattr(work, name)})
    if unfairness == "beta2 0.999":
        work = replace(work, betas=(work.betas[0], 0.999))
    if unfairness == "SGD":
        return torch.optim.SGD(work.parameter_groups(model), lr=work.learning_rate)
    optimizer = work.adamw(model, amsgrad=unfairness == "AMSGrad")
    if unfairness == "Adam with L2":
        groups = work.parameter_groups(model)
        return torch.optim.Adam(groups, lr=work.learning_rate, betas=work.betas, eps=work.eps)
    if unfairness == "weight decay on norms":
        optimizer.param_groups[1]["weight_decay"] = work.weight_decay
    return optimizer
