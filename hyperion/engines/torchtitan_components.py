"""torchtitan's Llama model, converter of Hugging Face weights, loss and gradient clipping, in our own training loop.

torchtitan's Trainer needs an accelerator, so only its components are used. Its loss is a sum over tokens. By default, it applies
the RoPE scaling of Llama 3.1, which the initial state does not use.
"""

import torch
from torchtitan.components.loss import cross_entropy_loss  # pyright: ignore[reportMissingImports]
from torchtitan.distributed.utils import clip_grad_norm_  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3 import Llama3StateDictAdapter, Transformer, TransformerModelArgs  # pyright: ignore[reportMissingImports]
from torchtitan.models.llama3.model.args import RoPEScalingArgs  # pyright: ignore[reportMissingImports]

from hyperion.engines.observer import Observer
from hyperion.engines.work import Work


def train(work: Work, observer: Observer) -> dict:
    """Perform the work on one rank and return the record."""
    arguments = _arguments(work)
    converter = Llama3StateDictAdapter(arguments, None)
    with torch.device(observer.device):
        model = Transformer(arguments)
    model.load_state_dict(converter.from_hf(dict(work.load_model(observer.device).state_dict())))
    model.train()
    optimizer = work.adamw(model)

    def state() -> dict[str, torch.Tensor]:
        return converter.to_hf(model.state_dict())

    observer.start(model, model.tok_embeddings, state())
    device_type = torch.device(observer.device).type
    for step in range(work.all_steps):
        losses, tokens = [], 0
        for rows_BT in work.micro_batch_list(step, device=observer.device):
            with torch.autocast(device_type, torch.bfloat16, enabled=work.dtype == "bf16"):
                logits_BTV = model(rows_BT[:, :-1].contiguous())
                loss = cross_entropy_loss(logits_BTV, rows_BT[:, 1:]) / work.step_tokens
            loss.backward()
            losses.append(loss.detach())
            tokens += rows_BT[:, 1:].numel()
        norm = clip_grad_norm_(list(model.parameters()), work.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        observer.step(torch.stack(losses).sum(), norm, tokens)
    return observer.finish(state())


def _arguments(work: Work) -> TransformerModelArgs:
    config = work.config()
    wide, inner = config["intermediate_size"], int(2 * 4 * config["hidden_size"] / 3)
    return TransformerModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        # torchtitan rounds the inner width up to a multiple of this number. With the width itself, the result is exact.
        multiple_of=wide,
        ffn_dim_multiplier=wide / inner if inner > wide else None,
        norm_eps=config["rms_norm_eps"],
        rope_theta=(config.get("rope_parameters") or config)["rope_theta"],
        # These values disable RoPE scaling: equal factors leave no band between them, and a scale of 1 changes no angle.
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0, low_freq_factor=1.0, high_freq_factor=1.0),
        max_seq_len=work.sequence_length,
    )
