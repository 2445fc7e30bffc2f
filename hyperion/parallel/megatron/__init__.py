"""Megatron-core: adapt it to devices without CUDA, and train a Llama with its tensor, pipeline and data parallelism."""
