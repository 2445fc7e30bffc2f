"""Vector addition, softmax, layer norm, matrix product and attention, each with a Triton kernel and a reference in PyTorch.

If the tensors are on a GPU and Triton is installed, each function runs its Triton kernel. Otherwise, it runs the reference.
`implementation` returns which of the two runs. If a kernel cannot process its arguments, the function raises an error. It does
not silently run the reference instead.

Shape suffixes: M rows, D columns; M, N, K sizes of a matrix product; B sequences, H query heads, K key-value heads, T positions,
D features of a head.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hyperion.errors import HyperionError
from hyperion.kernels.token_loss import HAS_TRITON

TRITON, REFERENCE = "triton", "reference"
HEAD_DIMS = (64, 128)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Number of programs that the backward pass of layer norm starts for each multiprocessor.
_PROGRAMS_EACH = 2
# Largest second dimension of a grid on NVIDIA GPUs.
_MOST_HEADS = 65535


def implementation(x: Tensor) -> str:
    """Return "triton" if the kernels of this module run for this tensor, otherwise "reference"."""
    return TRITON if x.is_cuda and HAS_TRITON else REFERENCE


def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y.

    Args:
        x, y: tensors with the same shape and dtype.
    """
    _require(x.shape == y.shape and x.dtype == y.dtype, f"x is {_form(x)}, y is {_form(y)}", "pass the same shape and dtype")
    if implementation(x) == REFERENCE:
        return x + y
    from hyperion.kernels.rows_triton import run_add

    _require_kernel(x, y, gradients=False)
    return run_add(x.contiguous(), y.contiguous())


def softmax(x_MD: Tensor) -> Tensor:
    """Return the softmax of each row."""
    _require_matrix(x_MD)
    if implementation(x_MD) == REFERENCE:
        return torch.softmax(x_MD, 1)
    from hyperion.kernels.rows_triton import WIDEST, run_softmax

    _require_kernel(x_MD, gradients=False)
    _require_width(x_MD, WIDEST)
    return run_softmax(x_MD.contiguous())


def layer_norm(x_MD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the layer norm of each row, (x - mean) / sqrt(variance + eps) · weight + bias. The result is differentiable."""
    _require_matrix(x_MD)
    shape = (x_MD.shape[1],)
    _require(weight_D.shape == bias_D.shape == shape, f"x is {_form(x_MD)}, weight {_form(weight_D)}", f"pass weights {shape}")
    if implementation(x_MD) == REFERENCE:
        return F.layer_norm(x_MD, shape, weight_D, bias_D, eps)
    from hyperion.kernels.rows_triton import WIDEST, WIDEST_GRADIENT

    _require_kernel(x_MD, weight_D, bias_D)
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_MD, weight_D, bias_D))
    _require_width(x_MD, WIDEST_GRADIENT if wanted else WIDEST)
    return _LayerNorm.apply(x_MD, weight_D, bias_D, eps)


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return the matrix product A·B in the dtype of A. Sums are accumulated in float32."""
    _require_matrix(a_MK)
    fits = b_KN.dim() == 2 and a_MK.shape[1] == b_KN.shape[0] and a_MK.dtype == b_KN.dtype
    _require(fits, f"A is {_form(a_MK)}, B is {_form(b_KN)}", "pass A [M, K] and B [K, N] of the same dtype")
    if implementation(a_MK) == REFERENCE:
        return a_MK @ b_KN
    from hyperion.kernels.matmul_triton import run_matmul, tiles_for

    _require_kernel(a_MK, b_KN, gradients=False)
    return run_matmul(a_MK.contiguous(), b_KN.contiguous(), tiles_for(*architecture_of(a_MK.device)))[0]


def attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool = True) -> Tensor:
    """Return softmax(Q·Kᵀ / √D)·V for each head.

    The result is differentiable. The memory that the kernel needs is proportional to T and not to T².

    Args:
        q_BHTD: queries.
        k_BKTD, v_BKTD: keys and values. If K is smaller than H, each group of H / K query heads shares one key-value head.
        causal: if True, position t attends to the positions up to t.
    """
    (B, H, T, D), (B2, K, T2, D2) = _shape(q_BHTD), _shape(k_BKTD)
    fits = (B, T, D) == (B2, T2, D2) and k_BKTD.shape == v_BKTD.shape and K > 0 and H % K == 0
    shapes = f"queries {_form(q_BHTD)}, keys {_form(k_BKTD)}, values {_form(v_BKTD)}"
    _require(fits, shapes, "pass [B, H, T, D] and [B, K, T, D], where K divides H")
    _require(q_BHTD.dtype == k_BKTD.dtype == v_BKTD.dtype, shapes, "pass tensors of one dtype")
    if implementation(q_BHTD) == REFERENCE:
        return attention_reference(q_BHTD, k_BKTD, v_BKTD, causal)
    from hyperion.kernels.attention_triton import Attention, tiles_for

    _require(D in HEAD_DIMS, f"the heads have {D} features", f"use heads of {' or '.join(map(str, HEAD_DIMS))} features")
    _require_kernel(q_BHTD, k_BKTD, v_BKTD)
    _require(B * H <= _MOST_HEADS, shapes, f"pass at most {_MOST_HEADS} heads of all sequences together")
    _require(q_BHTD.dtype in _DTYPES[1:], shapes, "pass float16 or bfloat16; the tiles do not fit into registers in float32")
    return Attention.apply(q_BHTD, k_BKTD, v_BKTD, causal, tiles_for(*architecture_of(q_BHTD.device), D))


def attention_reference(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool = True) -> Tensor:
    """Return the same result as `attention`, computed with the whole matrix of scores in the dtype of the inputs."""
    (*_, H, T, D), K = q_BHTD.shape, k_BKTD.shape[1]
    k_BHTD, v_BHTD = (tensor.repeat_interleave(H // K, 1) for tensor in (k_BKTD, v_BKTD))
    scores_BHTT = q_BHTD @ k_BHTD.mT / math.sqrt(D)
    if causal:
        later_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
        scores_BHTT = scores_BHTT.masked_fill(later_TT, -math.inf)
    return scores_BHTT.softmax(-1) @ v_BHTD


def attention_flops(B: int, H: int, T: int, D: int, causal: bool) -> dict[str, float]:
    """Return the FLOPs of the forward and the backward pass of attention.

    For causal attention, only half of the score matrix is counted.
    """
    # Forward: Q·Kᵀ and P·V, 2·T·T·D FLOPs each per head. Backward: five such products (scores again, dP, dV, dQ, dK), 2.5 times.
    forward = 4 * B * H * T * T * D * (0.5 if causal else 1)
    return {"forward": forward, "backward": 2.5 * forward}


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        from hyperion.kernels.rows_triton import run_layer_norm

        x_MD, weight_D, bias_D = x_MD.contiguous(), weight_D.contiguous(), bias_D.contiguous()
        y_MD, means_M, inverses_M = run_layer_norm(x_MD, weight_D, bias_D, eps)
        ctx.save_for_backward(x_MD, weight_D, means_M, inverses_M)
        ctx.bias_dtype = bias_D.dtype
        return y_MD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from hyperion.kernels.rows_triton import run_layer_norm_gradient

        x_MD, weight_D, means_M, inverses_M = ctx.saved_tensors
        programs = _PROGRAMS_EACH * torch.cuda.get_device_properties(x_MD.device).multi_processor_count
        of_x, of_weight, of_bias = run_layer_norm_gradient(grads[0].contiguous(), x_MD, weight_D, means_M, inverses_M, programs)
        return of_x, of_weight.to(weight_D.dtype), of_bias.to(ctx.bias_dtype), None


def architecture_of(device: torch.device) -> tuple[str, int | str]:
    """Return ("cuda", compute capability) or ("hip", name of the architecture) of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        # gcnArchName also contains feature flags, as in "gfx90a:sramecc+:xnack-".
        return "hip", properties.gcnArchName.partition(":")[0]
    return "cuda", 10 * properties.major + properties.minor


def _form(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _shape(x: Tensor) -> tuple[int, ...]:
    _require(x.dim() == 4, f"a tensor is {_form(x)}", "pass tensors of four dimensions: sequences, heads, positions, features")
    return tuple(x.shape)


def _require_matrix(x: Tensor) -> None:
    fits = x.dim() == 2 and x.numel() > 0 and x.dtype in (*_DTYPES, torch.float64)
    _require(fits, f"the input is {_form(x)}", "pass a matrix that is not empty, of a floating-point dtype")


def _require_kernel(*tensors: Tensor, gradients: bool = True) -> None:
    """Raise an error if a kernel would return wrong numbers for these tensors, or a result that lacks required gradients.

    Args:
        tensors: all inputs of the kernel.
        gradients: True if the kernel has a backward pass.
    """
    for x in tensors:
        fits = x.dtype in _DTYPES and x.numel() > 0
        _require(fits, f"an input on a GPU is {_form(x)}", "pass float32, float16 or bfloat16, and at least one element")
        # Triton launches on the current device, whichever device its arguments are on.
        here = x.device.index == torch.cuda.current_device()
        _require(here, f"an input is on {x.device}", "pass tensors on the current device, see torch.cuda.set_device")
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    _require(gradients or not wanted, "an input requires a gradient, which this kernel does not have", "call it under no_grad")


def _require_width(x: Tensor, widest: int) -> None:
    _require(x.shape[1] <= widest, f"a row has {x.shape[1]} elements", f"use rows of at most {widest} elements")


def _require(condition: bool, what: str, next_step: str) -> None:
    if not condition:
        raise HyperionError(what, where="hyperion.kernels.operations", next_step=next_step)
