"""Attention and its gradients in float64, computed a few queries at a time, so that long sequences fit into memory.

Shape suffixes: G heads of queries that share one head of keys and values, T positions, D features, R queries of a chunk.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SCORES = 1 << 26  # largest number of scores of a chunk


@dataclass(frozen=True)
class ExactAttention:
    """The output of attention in float64, and the gradients of queries, keys and values."""

    output: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor


def exact_attention(q_GTD: Tensor, k_TD: Tensor, v_TD: Tensor, grad_GTD: Tensor, causal: bool = True) -> ExactAttention:
    """Return attention of G heads of queries to one head of keys and values, with all gradients.

    Args:
        q_GTD, k_TD, v_TD: queries, keys and values in any dtype.
        grad_GTD: gradient of the output.
    """
    q_GTD, k_TD, v_TD, grad_GTD = (tensor.double() for tensor in (q_GTD, k_TD, v_TD, grad_GTD))
    G, T, D = q_GTD.shape
    scale = 1 / math.sqrt(D)
    result = ExactAttention(*(torch.zeros_like(tensor) for tensor in (q_GTD, q_GTD, k_TD, v_TD)))
    position_T = torch.arange(T, device=q_GTD.device)
    rows = max(1, _SCORES // (G * T))
    for first in range(0, T, rows):
        here = slice(first, min(first + rows, T))
        q_GRD, grad_GRD = q_GTD[:, here], grad_GTD[:, here]
        scores_GRT = q_GRD @ k_TD.T * scale
        if causal:
            scores_GRT.masked_fill_(position_T[None, :] > position_T[here, None], -math.inf)
        p_GRT = scores_GRT.softmax(-1)
        result.output[:, here] = p_GRT @ v_TD
        result.grad_v.add_((p_GRT.mT @ grad_GRD).sum(0))
        of_p_GRT = grad_GRD @ v_TD.T
        of_scores_GRT = p_GRT * (of_p_GRT - (p_GRT * of_p_GRT).sum(-1, keepdim=True)) * scale
        result.grad_q[:, here] = of_scores_GRT @ k_TD
        result.grad_k.add_((of_scores_GRT.mT @ q_GRD).sum(0))
    return result


def attention_tolerance(dtype: torch.dtype, backward: bool) -> float:
    """Return the largest allowed relative Frobenius error of attention against float64, for the same rounded inputs.

    In 16 bits, it is three times the root mean square of rounding to the dtype, times the root of the number of independent
    roundings: two in the forward pass (probabilities, output), and four in the backward pass (output, probabilities, gradients of
    the scores, result). In float32, sums over the positions dominate, and the tolerance is the one of a matrix product.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return 1e-5 if dtype == torch.float32 else 1e-13
    return 3 * math.sqrt((4 if backward else 2) / 3) * torch.finfo(dtype).eps / 2
