"""Bytes that a forward pass keeps for its backward pass, from shapes alone: no model is built, nothing is run.

Counted by what each layer saves. Scalars and the means and variances of norms are left out; against a count of what
autograd really keeps the tests allow 2 %.
"""

from dataclasses import dataclass

from hyperion.models.resnet import IMAGE_SIZE, block_shapes
from hyperion.models.transformer import TransformerConfig

_FLOAT32, _SIXTEEN_BIT = 4, 2  # bytes


@dataclass(frozen=True)
class BlockBytes:
    """One repeated block.

    Attributes:
        input: what the block before it handed over; all that checkpointing keeps.
        saved: what it keeps beside its input.
        recomputed: what running it again brings back.
        transient: gradients of activations that its backward pass holds at once.
        gradients: of its parameters.
    """

    input: int
    saved: int
    recomputed: int
    transient: int
    gradients: int


@dataclass(frozen=True)
class ActivationBytes:
    """A whole model, for one batch.

    Attributes:
        stem, head: what is kept before and after the blocks.
        blocks: the repeated blocks in the order of the forward pass.
        head_transient: the most that the head's backward pass holds beside what is kept.
        head_gradients: of the head's parameters.
        stem_transient: what the stem's backward pass holds beside all gradients.
    """

    stem: int
    blocks: tuple[BlockBytes, ...]
    head: int
    head_transient: int
    head_gradients: int
    stem_transient: int

    def kept(self, checkpointed: bool = False) -> int:
        """After the forward pass: all activations, or with every block checkpointed their inputs alone."""
        inside = 0 if checkpointed else sum(block.saved for block in self.blocks)
        return self.stem + sum(block.input for block in self.blocks) + inside + self.head

    def peak(self, checkpointed: bool = False) -> int:
        """The most at any moment of the backward pass, the parameters' gradients so far included."""
        held, gradients = self.kept(checkpointed), self.head_gradients
        moments = [held + self.head_transient]  # the head's own gradients come after these are gone
        held -= self.head
        for block in reversed(self.blocks):
            again = block.recomputed if checkpointed else 0
            moments.append(held + again + block.transient + gradients)
            gradients += block.gradients
            held -= block.input + (0 if checkpointed else block.saved)
        return max(*moments, self.stem + gradients + self.stem_transient)


def language_activations(config: TransformerConfig, batch: int, length: int, sixteen_bit: bool) -> ActivationBytes:
    """Of a TransformerLM that is given targets, in float32 or under autocast to bfloat16.

    In units of one [B, T, D] tensor a block keeps its input and the sum after attention (1 + 1), both norms' outputs
    (1 + 1), query, key and value (3), attention's output (1), and the MLP before and after GELU (4 + 4): 16. Autocast to
    bfloat16 halves them all, and keeps a 16-bit copy of each matrix of weights. (float16 keeps more: sums stay float32.)
    The loss is PyTorch's own: the kernels of `token_loss` keep logits in 16 bits.

    Args:
        batch, length: B and T.
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
    """Of a ResNet-18, in float32 or under autocast to a 16-bit format.

    A norm keeps the output of its convolution; a ReLU keeps its result, which the next convolution needs as well. So a
    block keeps three tensors of its output's size beside its input, and a fourth where the shortcut is projected.
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
    images = _SIXTEEN_BIT * batch * 3 * image_size**2 if sixteen_bit else 0  # the batch itself is there anyway
    return ActivationBytes(stem + images, tuple(blocks), head=0, head_transient=0, head_gradients=0, stem_transient=0)
