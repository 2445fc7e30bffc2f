"""Bytes from shapes against bytes saved by autograd, and against the counted peak."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hyperion.hardware import detect_cpu
from hyperion.measure import SavedForBackward, TensorMemory
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.training import image_activations, language_activations

CPU = detect_cpu()
DEEP = TransformerConfig(vocab_size=256, context=32, width=64, heads=4, layers=6)
WORDY = TransformerConfig(vocab_size=5000, context=32, width=32, heads=2, layers=2)


pytestmark = pytest.mark.usefixtures("one_thread")


def counted(model, loss_of, batch, sixteen_bit, checkpointed) -> tuple[int, int]:
    """(bytes saved by the forward pass, peak of forward and backward), without what existed before."""
    for block in model.blocks if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    known = [*model.parameters(), *model.buffers(), *batch]
    with TensorMemory(CPU, known) as memory:
        start = memory.now_bytes
        with SavedForBackward(known), torch.autocast("cpu", torch.bfloat16, enabled=sixteen_bit):
            loss = loss_of(model)
        kept = memory.now_bytes - start
        loss.backward()
    return kept, memory.peak_bytes - start


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sixteen_bit", [False, True])
@pytest.mark.parametrize("config", [DEEP, WORDY], ids=["deep", "wordy"])
def test_a_language_model_keeps_what_its_shapes_say(config, sixteen_bit, checkpointed):
    tokens = torch.randint(config.vocab_size, (2, 8, config.context))
    kept, peak = counted(TransformerLM(config), lambda model: model.loss(*tokens), tokens, sixteen_bit, checkpointed)
    predicted = language_activations(config, 8, config.context, sixteen_bit)
    assert predicted.saved(checkpointed) == pytest.approx(kept, rel=0.02)
    assert predicted.peak(checkpointed) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("sixteen_bit", [False, True])
def test_an_image_model_keeps_what_its_shapes_say(sixteen_bit, checkpointed):
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    model = resnet18(width=8).to(memory_format=torch.channels_last)
    kept, peak = counted(model, lambda m: F.cross_entropy(m(images).float(), labels), [images, labels], sixteen_bit, checkpointed)
    predicted = image_activations(8, 16, sixteen_bit)
    assert predicted.saved(checkpointed) == pytest.approx(kept, rel=0.02)
    assert predicted.peak(checkpointed) == pytest.approx(peak, rel=0.12)


def test_checkpointing_trades_layers_for_one_layer():
    shallow, deep = (
        language_activations(TransformerConfig(256, 32, 64, 4, layers), 8, 32, sixteen_bit=False) for layers in (4, 8)
    )
    inputs = 4 * 8 * 32 * 64
    assert deep.saved(True) - shallow.saved(True) == 4 * inputs
    assert deep.saved() - shallow.saved() > 4 * 15 * inputs
