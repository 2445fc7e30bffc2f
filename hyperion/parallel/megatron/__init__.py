"""Megatron-core: its adaptation to devices without CUDA, and a Llama in its layouts."""
