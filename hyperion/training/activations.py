"""Bytes of activations that a forward pass saves for its backward pass, computed from shapes alone.

The formulas count what each layer saves. Scalars and the means and variances of norms are left out; the tests compare with
what autograd really saves and allow 2 %.
"""

from dataclasses import dataclass

from hyperion.models.resnet import IMAGE_SIZE, block_shapes
from hyperion.models.transformer import TransformerConfig

_FLOAT32, _SIXTEEN_BIT = 4, 2  # bytes


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one repeated block.

    Attributes:
        input: the block's input; all that activation checkpointing saves.
        saved: what the block saves in addition to its input.
        recomputed: what recomputing the block brings back.
        transient: largest sum of activation gradients that exist at once in its backward pass.
        gradients: gradients of its parameters.
    """

    input: int
    saved: int
    recomputed: int
    transient: int
    gradients: int


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of a whole model, for one batch.

    Attributes:
        stem, head: saved before and after the blocks.
        blocks: the repeated blocks in the order of the forward pass.
        head_transient: most that the head's backward pass allocates in addition to what is saved.
        head_gradients: gradients of the head's parameters.
        stem_transient: what the stem's backward pass allocates in addition to all gradients.
    """

    stem: int
    blocks: tuple[BlockBytes, ...]
    head: int
    head_transient: int
    head_gradients: int
    stem_transient: int

    def saved(self, checkpointed: bool = False) -> int:
        """Return the bytes saved by the forward pass; with every block checkpointed, blocks save only their inputs."""
        inside = 0 if checkpointed else sum(block.saved for block in self.blocks)
        return self.stem + sum(block.input for block in self.blocks) + inside + self.head

    def peak(self, checkpointed: bool = False) -> int:
        """Return the peak of the backward pass, including the parameter gradients computed up to that moment."""
        held, gradients = self.saved(checkpointed), self.head_gradients
        moments = [held + self.head_transient]  # the head's parameter gradients are allocated after these are freed
        held -= self.head
        for block in reversed(self.blocks):
            recomputed = block.recomputed if checkpointed else 0
            moments.append(held + recomputed + block.transient + gradients)
            gradients += block.gradients
            held -= block.input + (0 if checkpointed else block.saved)
        return max(*moments, self.stem + gradients + self.stem_transient)


def language_activations(config: TransformerConfig, batch: int, length: int, sixteen_bit: bool) -> ActivationBytes:
    """Return the activation bytes of a TransformerLM that is given targets, in float32 or under autocast to bfloat16.

    In units of one [B, T, D] tensor a block saves its input and the sum after attention (1 + 1), both norms' outputs
    (1 + 1), query, key and value (3), attention's output (1), and the MLP before and after GELU (4 + 4): 16. Autocast to
    bfloat16 halves them all, and saves a 16-bit copy of each weight matrix. (float16 saves more: its residual stream stays
    float32.) The loss is PyTorch's own; the Triton kernel of `token_loss` would save 16-bit logits.

    Args:
        batch, length: B and T.
        sixteen_bit: autocast to bfloat16.
    """
    B, T, D, V = batch, length, config.width, config.vocab_size
    each = _SIXTEEN_BIT if sixteen_bit else _FLOAT32
    unit, logits = each * B * T * D, _FLOAT32 * B * T * V  # logits are float32 in every precision
    parameters, matrices = 12 * D * D + 13 * D, 12 * D * D
    log_sum_exp = _FLOAT32 * B * T * config.heads  # of attention
    saved = 15 * unit + log_sum_exp + (_SIXTEEN_BIT * matrices if sixteen_bit else 0)
    block = BlockBytes(input=unit, saved=saved, recomputed=saved, transient=5 * unit, gradients=_FLOAT32 * parameters)
    head = 2 * unit + logits + (_SIXTEEN_BIT * V * D if sixteen_bit else 0)
    return ActivationBytes(
        stem=0,
        blocks=(block,) * config.layers,
        head=head,
        head_transient=2 * logits,  # the gradients of log-probabilities and of logits
        head_gradients=_FLOAT32 * V * D,
        stem_transient=_FLOAT32 * V * D,  # the embedding's part of the gradient that it shares with the head
    )


def image_activations(width: int, batch: int, sixteen_bit: bool, image_size: int = IMAGE_SIZE) -> ActivationBytes:
    """Return the activation bytes of a ResNet-18, in float32 or under autocast to a 16-bit format.

    A norm saves the output of its convolution; a ReLU saves its result, which the next convolution saves too. So a block
    saves its input, three tensors of its output's size, and a fourth if the shortcut has a projection.
    """
    each = _SIXTEEN_BIT if sixteen_bit else _FLOAT32
    side, blocks = image_size, []
    for channels_in, channels_out, stride in block_shapes(width):
        before = each * batch * channels_in * side**2
        side = -(-side // stride)
        out = each * batch * channels_out * side**2
        projection = channels_in * channels_out if channels_in != channels_out else 0
        weights = 9 * channels_out * (channels_in + channels_out) + projection
        copies = _SIXTEEN_BIT * weights if sixteen_bit else 0
        saved = (4 if projection else 3) * out + copies
        blocks.append(BlockBytes(before, saved, saved + out, 3 * out, _FLOAT32 * weights))
    stem = each * batch * width * image_size**2
    images = _SIXTEEN_BIT * batch * 3 * image_size**2 if sixteen_bit else 0  # the float32 batch exists in any case
    return ActivationBytes(stem + images, tuple(blocks), head=0, head_transient=0, head_gradients=0, stem_transient=0)
