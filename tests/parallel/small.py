"""Small real models of the parallel tests."""

import torch
from torch import nn


def tiny_llama(seed: int = 0) -> nn.Module:
    """A Llama of two layers, width 32, four query and two key heads, 64 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
        )
    )  # fmt: skip
