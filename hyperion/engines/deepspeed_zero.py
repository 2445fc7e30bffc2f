"""DeepSpeed ZeRO: stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the parameters."""

from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch

from hyperion.engines.observer import Observer
from hyperion.engines.plain import token_loss
from hyperion.engines.work import Work


def train(work: Work, observer: Observer, stage: int) -> dict:
    """Perform the work and return the record.

    Args:
        work: the training work.
        observer: observer of this rank.
        stage: ZeRO stage, 1 to 3.
    """
    here = observer.here
    # DeepSpeed would compile a shared-memory communication library for the CPU here. A run that is killed during the compilation
    # leaves a lock, for which all later runs wait. If the dict did not exist, DeepSpeed would start compilers to fill it.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    plain = work.load_model(observer.device)
    deepspeed.init_distributed(dist_backend=here.backend)
    engine: Any
    engine, _, _, _ = deepspeed.initialize(model=plain, optimizer=work.adamw(plain), config=_config(work, here.size, stage))
    observer.start(engine, plain.get_input_embeddings(), _state(plain, stage))
    for step in range(work.all_steps):
        losses, tokens = [], 0
        for rows_BT in work.micro_batch_list(step, here.rank, here.size, observer.device):
            loss = token_loss(engine, rows_BT)
            engine.backward(loss)  # divides the loss by the number of micro-batches
            engine.step()  # updates after the last micro-batch
            losses.append(loss.detach())
            tokens += rows_BT[:, 1:].numel()
        observer.step(torch.stack(losses).mean(), engine.get_global_grad_norm(), tokens)
    return observer.finish(_state(plain, stage))


def _config(work: Work, ranks: int, stage: int) -> dict[str, Any]:
    bf16 = work.dtype == "bf16"
    return {
        "train_batch_size": work.batch_size,
        "train_micro_batch_size_per_gpu": work.batch_size // (ranks * work.micro_batches),
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": work.clip_norm,
        "zero_optimization": {"stage": stage},
        # Use torch's AdamW, so that DeepSpeed does not compile its own optimizer.
        "zero_allow_untested_optimizer": True,
        # With the option "bf16", DeepSpeed would round the initial state to bf16 before it copies it to float32.
        # DeepSpeed reduces the gradients of these modules in bf16. They do not change which products are in bf16.
        **({"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}} if bf16 else {}),
        "communication_data_type": "fp32",
        "steps_per_print": 2**31,
    }


def _state(plain: torch.nn.Module, stage: int) -> dict[str, torch.Tensor]:
    if stage < 3:
        return plain.state_dict()
    with deepspeed.zero.GatheredParameters(list(plain.parameters())):
        return {name: tensor.detach().cpu().clone() for name, tensor in plain.state_dict().items()}
