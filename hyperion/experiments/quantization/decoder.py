"""Greedy decoder for one sequence with a static cache. Each step launches the same kernels on the same memory.

The decoder uses the layers of transformers' Llama. These layers may be quantised. The decoder replaces their attention and their
cache. Its attention processes one new token, whose query reads the cache. Its cache consists of tensors of fixed length. A step
writes to the position that another tensor contains. Therefore a step can be captured as a graph and replayed, and all blocks
share the compiled functions.

Shape suffixes: D width, F width of the feed-forward part, K key-value heads, G query heads per key-value head, S positions of the
cache, H width of a head.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.hardware import Device

EAGER, CAPTURED, COMPILED = "eager", "captured graph", "compiled, captured graph"
MODES = (EAGER, CAPTURED, COMPILED)
# Number of calls before a graph is captured. During the first calls, kernels are compiled, selected and loaded.
_WARM_UP = 3


class DecodeBlock(nn.Module):
    """One decoder layer of a Llama for a single new token, with its cache.

    Args:
        layer: the layer of transformers' model.
        heads, key_heads: number of query heads, and of key-value heads.
        positions: number of positions in the cache.
        like: a tensor with the dtype and the device of the cache.
    """

    keys_KSH: Tensor
    values_KSH: Tensor

    def __init__(self, layer: Any, heads: int, key_heads: int, positions: int, like: Tensor):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.q, self.k, self.v, self.o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.norm1, self.norm2 = layer.input_layernorm, layer.post_attention_layernorm
        self.groups, self.key_heads = heads // key_heads, key_heads
        shape = key_heads, positions, attention.head_dim
        self.register_buffer("keys_KSH", like.new_zeros(shape))
        self.register_buffer("values_KSH", like.new_zeros(shape))

    def attend(
        self, x_1D: Tensor, cosine_1H: Tensor, sine_1H: Tensor, position_1: Tensor, hidden_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Process the token at `position_1` up to the last projection, and write its keys and values to the cache.

        Args:
            x_1D: output of the previous layer.
            cosine_1H, sine_1H: rotary embedding of this position.
            position_1: position of the token.
            hidden_S: True for the positions after it, which are masked.

        Returns:
            (sum of the input and the attention, gated values of the feed-forward part of shape [1, F]).
        """
        h_1D = self.norm1(x_1D)
        q_KGH = _rotated(self.q(h_1D).view(self.key_heads, self.groups, -1), cosine_1H, sine_1H)
        k_K1H = _rotated(self.k(h_1D).view(self.key_heads, 1, -1), cosine_1H, sine_1H)
        self.keys_KSH.index_copy_(1, position_1, k_K1H)
        self.values_KSH.index_copy_(1, position_1, self.v(h_1D).view(self.key_heads, 1, -1))
        # Use element-wise products and sums instead of matrix products. A compiler can fuse them, and because there is only one
        # query, they also read the cache only once.
        scores_KGS = (q_KGH[:, :, None].float() * self.keys_KSH[:, None].float()).sum(-1) / math.sqrt(q_KGH.shape[-1])
        weights_KGS = scores_KGS.masked_fill(hidden_S, -math.inf).softmax(-1)
        mixed_KGH = (weights_KGS[..., None] * self.values_KSH[:, None].float()).sum(-2)
        x_1D = x_1D + self.o(mixed_KGH.to(x_1D.dtype).view(1, -1))
        h_1D = self.norm2(x_1D)
        return x_1D, nn.functional.silu(self.gate(h_1D)) * self.up(h_1D)

    def project(self, x_1D: Tensor, gated_1F: Tensor) -> Tensor:
        """Return the output of the layer from the two results of `attend`.

        This is a separate function because a compiler fuses the operations that produce the input of a product into the product.
        Here, it would compute the gated values again for each of the D outputs. At the end of `attend`, it computes them once, in
        the kernel of the products with `gate` and `up`.
        """
        return x_1D + self.down(gated_1F)


def _rotated(x: Tensor, cosine_1H: Tensor, sine_1H: Tensor) -> Tensor:
    """Apply the rotary embedding to x. As in transformers, element i of a head is rotated together with element i + H / 2."""
    first, second = x.chunk(2, -1)
    return x * cosine_1H + torch.cat([-second, first], -1) * sine_1H


def _enter(model: Any, tokens_S: Tensor, places_S: Tensor, position_1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the first block: (embedding of the token at a position, cosine, sine, True for later positions)."""
    x_1D = model.embed_tokens(tokens_S[position_1])
    cosine_11H, sine_11H = model.rotary_emb(x_1D[None], position_1[None])
    return x_1D, cosine_11H[0], sine_11H[0], places_S > position_1


def _leave(lm: Any, x_1D: Tensor, logits_1V: Tensor) -> Tensor:
    """Write the logits for the output of the last block to `logits_1V`. Return the most probable next token, of shape [1]."""
    logits_1V.copy_(lm.lm_head(lm.model.norm(x_1D)))
    return logits_1V.argmax(-1)


class StaticDecoder:
    """Greedy decoder for one sequence with a static cache.

    Args:
        lm: transformers' LlamaForCausalLM, on its device.
        positions: largest number of tokens in a sequence, including the prompt.
        device: device of the model.
        mode: one of `MODES`. The two modes that capture a graph need a GPU.

    Attributes:
        blocks: the decoder blocks, which hold the cache.
        tokens_S: token ids of the last sequence.
        logits_1V: the logits of the last step.
    """

    def __init__(self, lm: Any, positions: int, device: Device, mode: str):
        config, embedding = lm.config, lm.get_input_embeddings()
        self.lm, self.mode, self.device = lm, mode, device
        self.blocks = [
            DecodeBlock(layer, config.num_attention_heads, config.num_key_value_heads, positions, embedding.weight)
            for layer in lm.model.layers
        ]
        # All blocks share the compiled functions, because they differ only in their tensors. With coordinate descent tuning,
        # Inductor turns a matrix-vector product into a reduction and fuses the surrounding operations into it.
        parts: list[Any] = [_enter, DecodeBlock.attend, DecodeBlock.project, _leave]
        if mode == COMPILED:
            options: dict[str, Any] = {"coordinate_descent_tuning": True}
            parts = [torch.compile(part, fullgraph=True, dynamic=False, options=options) for part in parts]
        self._enter, self._attend, self._project, self._leave = parts
        where = {"device": device.torch_device, "dtype": torch.int64}
        self.tokens_S = torch.zeros(positions, **where)
        self.logits_1V = embedding.weight.new_zeros(1, config.vocab_size)
        self._position = torch.zeros(1, **where)
        self._places = torch.arange(positions, **where)
        self._replay = self._capture() if mode != EAGER else self._step

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], new_tokens: int) -> None:
        """Decode `new_tokens` tokens after a prompt. The tokens of the prompt are processed one by one, like new tokens."""
        self.tokens_S[: len(prompt)] = torch.tensor(list(prompt), device=self.tokens_S.device)
        self._position.zero_()
        self.prompt_length = len(prompt)
        for _ in range(len(prompt) - 1):
            # The step writes its prediction after the token that it reads. Restore the prompt's token at this position.
            kept = self.tokens_S[self._position + 1]
            self._replay()
            self.tokens_S.index_copy_(0, self._position, kept)
        self.continue_(new_tokens)

    @torch.inference_mode()
    def continue_(self, new_tokens: int) -> None:
        """Decode `new_tokens` more tokens."""
        for _ in range(new_tokens):
            self._replay()

    @torch.inference_mode()
    def rewind(self, length: int) -> None:
        """Go back to the first `length` tokens of the sequence. The next step processes the last of them."""
        self._position.fill_(length - 1)

    def _step(self) -> None:
        """Process the token at the current position, write the most probable next token after it, and advance the position."""
        position = self._position
        x_1D, cosine_1H, sine_1H, hidden_S = self._enter(self.lm.model, self.tokens_S, self._places, position)
        for block in self.blocks:
            x_1D = self._project(block, *self._attend(block, x_1D, cosine_1H, sine_1H, position, hidden_S))
        next_1 = self._leave(self.lm, x_1D, self.logits_1V)
        position.add_(1)
        self.tokens_S.index_copy_(0, position, next_1)

    @torch.inference_mode()
    def _capture(self) -> Callable[[], None]:
        """Return a function that replays the step as a graph."""
        stream = torch.cuda.Stream(self.device.torch_device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._position.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._position.zero_()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay


def tokens_of_plain_forward(lm: Any, tokens_T: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Run the model on a whole sequence without a cache.

    Args:
        lm: transformers' LlamaForCausalLM.
        tokens_T: token ids of the sequence.
        first: number of tokens in the prompt.

    Returns:
        (most probable token after each prefix, starting with the prompt; float32 logits at these positions). Both have one entry
        for each token after the prompt.
    """
    with torch.inference_mode():
        logits_TV = lm(input_ids=tokens_T[None, :-1], use_cache=False).logits[0, first - 1 :]
    return logits_TV.argmax(-1), logits_TV.float()
