"""Configurations of the architectures. Each one builds a model of transformers with a few thousand random parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

VOCABULARY, WIDTH, LENGTH = 96, 32, 9
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = _SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
_ENCODER = _SIZES | {"intermediate_size": 48, "max_position_embeddings": 64}
_GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64}
_PAIR = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_PAIR |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
_PIXELS = {"image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 5}
_VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48} | _PIXELS
_STAGES = {"num_channels": 3, "num_labels": 5, "depths": [1, 1], "hidden_sizes": [16, 32]}
_SOUND = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "num_labels": 5}
_SOUND |= {"conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [4, 4], "num_feat_extract_layers": 2}
_SOUND |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = _ENCODER | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_DEEPSEEK |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
_TWO_TOWERS = {"text_config": _ENCODER, "vision_config": _VISION, "projection_dim": 16}


@dataclass(frozen=True)
class Architecture:
    """An architecture to check.

    Args:
        family: kind of architecture, for tables.
        auto: transformers class that creates the model from its configuration.
        sizes: options of the configuration.
        inputs: function of a random generator that returns the inputs of the model, including labels.
    """

    family: str
    auto: str
    sizes: dict = field(repr=False)
    inputs: Callable[[torch.Generator], dict[str, Any]] = field(repr=False)


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    # The inputs omit the smallest token ids, because models reserve these for padding and for the start and end of a sequence.
    ids = torch.randint(5, VOCABULARY, (2, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _pixels(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([1, 3])}


def _pairs(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(generator)["input_ids"], "pixel_values": _pixels(generator)["pixel_values"], "return_loss": True}


def _sound(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400, generator=generator), "labels": torch.tensor([1, 3])}


def _spectrum(generator: torch.Generator) -> dict[str, Tensor]:
    labels = _tokens(generator)["input_ids"]
    return {"input_features": torch.randn(2, 16, 40, generator=generator), "labels": labels}


def _decoder(**sizes) -> Architecture:
    return Architecture("decoder", "AutoModelForCausalLM", _DECODER | sizes, _tokens)


def _gpt(**sizes) -> Architecture:
    return Architecture("decoder", "AutoModelForCausalLM", _GPT | sizes, _tokens)


def _mixture(**sizes) -> Architecture:
    return Architecture("mixture of experts", "AutoModelForCausalLM", _DECODER | _MIXTURE | sizes, _tokens)


def _recurrent(**sizes) -> Architecture:
    return Architecture("state space", "AutoModelForCausalLM", sizes, _tokens)


def _encoder(**sizes) -> Architecture:
    return Architecture("encoder", "AutoModelForMaskedLM", _ENCODER | sizes, _tokens)


def _pair(**sizes) -> Architecture:
    return Architecture("encoder-decoder", "AutoModelForSeq2SeqLM", _PAIR | sizes, _tokens)


def _vision(**sizes) -> Architecture:
    return Architecture("vision", "AutoModelForImageClassification", sizes, _pixels)


def _audio(**sizes) -> Architecture:
    return Architecture("audio", "AutoModelForAudioClassification", _SOUND | sizes, _sound)


_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8}

# Architectures by their model type in transformers.
ARCHITECTURES = {
    "gpt2": _gpt(),
    "gptj": _gpt(rotary_dim=4),
    "gpt_neox": _decoder(),
    "bloom": Architecture(
        "decoder", "AutoModelForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}, _tokens
    ),
    "opt": _decoder(ffn_dim=48, word_embed_proj_dim=WIDTH),
    "falcon": Architecture("decoder", "AutoModelForCausalLM", _SIZES | {"multi_query": True, "ffn_hidden_size": 48}, _tokens),
    "llama": _decoder(),
    "mistral": _decoder(),
    "qwen2": _decoder(),
    "qwen3": _decoder(),
    "gemma": _decoder(),
    "gemma2": _decoder(),
    "gemma3_text": _decoder(),
    "phi": _decoder(),
    "phi3": _decoder(pad_token_id=0),
    "stablelm": _decoder(),
    "olmo2": _decoder(),
    "granite": _decoder(),
    "cohere": _decoder(),
    "starcoder2": _decoder(),
    "smollm3": _decoder(pad_token_id=0),
    "mixtral": _mixture(num_local_experts=4),
    "qwen2_moe": _mixture(shared_expert_intermediate_size=24),
    "qwen3_moe": _mixture(),
    "olmoe": _mixture(),
    "granitemoe": _mixture(num_local_experts=4),
    "gpt_oss": _mixture(num_local_experts=4),
    "deepseek_v3": Architecture("mixture of experts", "AutoModelForCausalLM", _DEEPSEEK, _tokens),
    "mamba": _recurrent(**_MAMBA),
    "mamba2": _recurrent(**_MAMBA, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "falcon_mamba": _recurrent(**_MAMBA),
    "recurrent_gemma": _recurrent(**_DECODER, lru_width=WIDTH, attention_window_size=32, block_types=["recurrent", "attention"]),
    "bert": _encoder(),
    "roberta": _encoder(),
    "distilbert": _encoder(dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=48),
    "albert": _encoder(embedding_size=16),
    "electra": _encoder(embedding_size=16),
    "deberta-v2": _encoder(),
    "modernbert": _encoder(pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "t5": Architecture(
        "encoder-decoder",
        "AutoModelForSeq2SeqLM",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        _tokens,
    ),
    "bart": _pair(),
    "marian": _pair(decoder_start_token_id=3, pad_token_id=3),
    "pegasus": _pair(),
    "mbart": _pair(decoder_start_token_id=2),
    "m2m_100": _pair(scale_embedding=False, tie_word_embeddings=False),
    "vit": _vision(**_VISION),
    "dinov2": _vision(**_VISION, mlp_ratio=1),
    "swin": _vision(**_PIXELS | {"patch_size": 4}, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
    "convnext": _vision(**_STAGES, num_stages=2),
    "resnet": _vision(**_STAGES, embedding_size=16),
    "clip": Architecture("text and image", "AutoModel", _TWO_TOWERS, _pairs),
    "siglip": Architecture("text and image", "AutoModel", _TWO_TOWERS, _pairs),
    "wav2vec2": _audio(),
    "hubert": _audio(),
    "wavlm": _audio(num_buckets=16, max_bucket_distance=32),
    "whisper": Architecture(
        "audio",
        "AutoModelForSpeechSeq2Seq",
        _PAIR
        | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "begin_suppress_tokens": None},
        _spectrum,
    ),
}
