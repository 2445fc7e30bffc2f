"""Chapter 2.11: megatron-core without CUDA, compared with this library's own model."""
