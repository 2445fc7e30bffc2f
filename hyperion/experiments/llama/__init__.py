"""Experiments on fine-tuning a Llama with LoRA, on one device and sharded over several ranks."""
