"""Attention and its gradients in float64, computed a few queries at a time, so that long sequences fit into memory.

Shape suffixes: G query heads that share one key-value head, T positions, D features, R queries in a chunk.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hyperion.measure import error_of_rows, largest_error

_SCORES = 1 << 26  # largest number of scores in a chunk


@dataclass(frozen=True)
class ExactAttention:
    """The output of attention in float64, and its gradients with respect to queries, keys and values.

    Args:
        output, grad_q, grad_k, grad_v: the output and the gradients.
        size_q, size_k: for each row of grad_q and grad_k, the norm that the errors of this row are divided by. It is the expected
            norm of the row if the terms of its sum had random signs, because rounding errors are proportional to this norm. The
            norm of the row itself can be much smaller. For example, the gradient of the first causal query is 0.
    """

    output: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor
    size_q: Tensor
    size_k: Tensor

    def output_error(self, output_GTD: Tensor, tolerance: float) -> float:
        """Return the error of `output_GTD` relative to the float64 output; see `error_of_rows`."""
        return error_of_rows(output_GTD, self.output, tolerance)

    def gradient_error(self, of_q_GTD: Tensor, of_k_TD: Tensor, of_v_TD: Tensor, tolerance: float) -> float:
        """Return the largest error of the gradients of queries, keys and values; see `error_of_rows`."""
        errors = [
            error_of_rows(of_q_GTD, self.grad_q, tolerance, self.size_q),
            error_of_rows(of_k_TD, self.grad_k, tolerance, self.size_k),
            error_of_rows(of_v_TD, self.grad_v, tolerance),
        ]
        return largest_error(errors)


def exact_attention(q_GTD: Tensor, k_TD: Tensor, v_TD: Tensor, grad_GTD: Tensor, causal: bool = True) -> ExactAttention:
    """Return attention of G query heads over one key-value head, and all gradients.

    Args:
        q_GTD, k_TD, v_TD: queries, keys and values in any dtype.
        grad_GTD: gradient of the output.
    """
    q_GTD, k_TD, v_TD, grad_GTD = (tensor.double() for tensor in (q_GTD, k_TD, v_TD, grad_GTD))
    G, T, D = q_GTD.shape
    scale = 1 / math.sqrt(D)
    # Tensors with the shapes of the fields of ExactAttention, in the same order.
    like = q_GTD, q_GTD, k_TD, v_TD, q_GTD[..., 0], k_TD[:, 0]
    result = ExactAttention(*(torch.zeros_like(tensor) for tensor in like))
    position_T = torch.arange(T, device=q_GTD.device)
    # 2^26 scores in float64 are 512 MiB for each tensor [G, R, T].
    rows = max(1, _SCORES // (G * T))
    for first in range(0, T, rows):
        here = slice(first, min(first + rows, T))
        q_GRD, grad_GRD = q_GTD[:, here], grad_GTD[:, here]
        scores_GRT = q_GRD @ k_TD.T * scale
        if causal:
            scores_GRT.masked_fill_(position_T[None, :] > position_T[here, None], -math.inf)
        p_GRT = scores_GRT.softmax(-1)
        result.output[:, here] = p_GRT @ v_TD
        # All G heads share the keys and values, so the gradients of keys and values are summed over the heads.
        result.grad_v.add_((p_GRT.mT @ grad_GRD).sum(0))
        of_p_GRT = grad_GRD @ v_TD.T
        # Backward pass of softmax: dS = P ∘ (dP - δ), where δ is the sum of P ∘ dP over the keys of a query.
        delta_GR1 = (p_GRT * of_p_GRT).sum(-1, keepdim=True)
        of_scores_GRT = p_GRT * (of_p_GRT - delta_GR1) * scale
        result.grad_q[:, here] = of_scores_GRT @ k_TD
        result.grad_k.add_((of_scores_GRT.mT @ q_GRD).sum(0))
        # Expected square of each element of dS if the terms of dO·Vᵀ have random signs: squares add up without cancellation.
        squares_GRT = (p_GRT * scale).square() * (grad_GRD.square() @ v_TD.square().T + delta_GR1.square())
        result.size_q[:, here] = (squares_GRT @ k_TD.square().sum(1)).sqrt()
        result.size_k.add_((squares_GRT * q_GRD.square().sum(-1, keepdim=True)).sum((0, 1)))
    result.size_k.sqrt_()
    return result


def attention_tolerance(dtype: torch.dtype, backward: bool) -> float:
    """Return the largest allowed relative Frobenius error of attention, compared with a float64 result.

    The float64 result is computed from the same rounded inputs.

    For 16-bit dtypes, the tolerance is three times the RMS rounding error of the dtype, times the square root of the number of
    independent roundings. There are two roundings in the forward pass (probabilities, output), and four in the backward pass
    (output, probabilities, gradients of the scores, result). In float32, the error of the sums over the positions dominates, so
    the tolerance is that of a matrix product.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return 1e-5 if dtype == torch.float32 else 1e-13
    return 3 * math.sqrt((4 if backward else 2) / 3) * torch.finfo(dtype).eps / 2
