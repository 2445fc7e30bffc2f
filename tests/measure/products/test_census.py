"""Operations, FLOPs and bytes of a call, held against numbers worked out by hand and against the models' own counts."""

import pytest
import torch

from hyperion.measure.products.dispatch import count_operations
from hyperion.models import TransformerConfig, TransformerLM, flops_per_image, flops_per_token, resnet18


def test_a_linear_layer_and_an_activation_by_hand():
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    census = count_operations(lambda: torch.relu(layer(x)))
    assert census.operations == 2  # addmm and relu; the transposed weight is a view
    assert census.flops == {"fp32": 2 * 4 * 8 * 16} and census.weight_flops == census.total_flops
    assert census.product_bytes == 4 * (4 * 8 + 8 * 16 + 16 + 4 * 16)
    assert census.other_bytes == 4 * 2 * 4 * 16


def test_an_embedding_reads_its_rows_and_not_its_table():
    table, ids = torch.randn(1000, 8), torch.tensor([1, 2, 3])
    census = count_operations(lambda: torch.nn.functional.embedding(ids, table))
    assert census.other_bytes == 4 * 2 * 3 * 8 and census.total_flops == 0 and census.share_in("fp32") == 0


def test_the_residual_net_has_the_flops_it_says_without_a_device():
    with torch.device("meta"):
        net, images = resnet18(width=8).eval(), torch.empty(2, 3, 32, 32)
    assert count_operations(lambda: net(images)).total_flops == 2 * flops_per_image(width=8).forward


def test_products_with_weights_are_what_a_causal_mask_cannot_spare():
    config = TransformerConfig(vocab_size=64, context=16, width=32, heads=2, layers=2)
    with torch.device("meta"):
        model, tokens = TransformerLM(config).eval(), torch.zeros(3, 16, dtype=torch.int64)
    census = count_operations(lambda: model(tokens))
    longer, shorter = (flops_per_token(config, length).forward for length in (16, 8))
    assert census.total_flops == 3 * 16 * longer
    assert census.weight_flops == 3 * 16 * (2 * shorter - longer)  # attention grows with the length, nothing else does


@pytest.mark.parametrize("autocast, dtype", [(False, "fp32"), (True, "bf16")])
def test_the_dtype_is_that_in_which_products_were_done(autocast, dtype):
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        census = count_operations(lambda: layer(x))
    assert census.share_in(dtype) == 1.0


def test_an_autocast_region_that_misses_the_call_is_found():
    """The published mistake: bf16 was declared, and the timed call ran outside of the region."""
    layer, x = torch.nn.Linear(8, 16), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert count_operations(lambda: layer(x)).share_in("bf16") == 0.0
