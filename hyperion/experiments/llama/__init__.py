"""Fine-tuning a Llama with LoRA, on one device and sharded."""
