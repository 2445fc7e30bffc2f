"""Implementations of attention: the Triton kernels, and each backend of PyTorch's scaled_dot_product_attention.

PyTorch chooses a backend by rules that depend on its version. Here each backend is forced: if it refuses a call, PyTorch raises
an error with its reasons, and no other backend takes its place. The profiler then shows which implementation ran.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from hyperion.errors import HyperionError
from hyperion.hardware import Device
from hyperion.kernels import operations
from hyperion.kernels.availability import why_no_kernels

TRITON = "triton"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
IMPLEMENTATIONS = (TRITON, *BACKENDS)
GPU_ONLY = ("cudnn", "efficient")  # backends of PyTorch that have no CPU kernel
# Patterns for the operators that PyTorch calls when it uses a backend.
_OPERATORS = {
    "cudnn": r"_scaled_dot_product_cudnn_attention",
    "flash": r"_scaled_dot_product_flash_attention",
    "efficient": r"_scaled_dot_product_efficient_attention",
    # The backward pass of this backend consists of ordinary operators. The others do not call the softmax gradient.
    "math": r"_scaled_dot_product_attention_math|_softmax_backward_data",
}
# Names of the Triton kernels that run in a forward pass, and in a backward pass.
_KERNELS = ({"attention_forward"}, {"attention_key_gradient", "attention_query_gradient"})
_PLACE = re.compile(r"\s*\(Triggered internally at [^)]*\)")


class RefusedError(Exception):
    """Raised if an implementation cannot compute attention for these tensors. The message is one line with all reasons."""


def attend(name: str, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, causal: bool = True, **options: Any) -> Tensor:
    """Return attention, computed by one implementation.

    Args:
        name: a name in `IMPLEMENTATIONS`.
        q_BHTD, k_BKTD, v_BKTD, causal: as in `hyperion.kernels.operations.attention`.
        options: further arguments of scaled_dot_product_attention, such as `attn_mask` or `dropout_p`.

    Raises:
        RefusedError: the implementation refuses these arguments.
    """
    if name == TRITON:
        try:
            return operations.attention(q_BHTD, k_BKTD, v_BKTD, causal)
        except HyperionError as error:  # for example float32, for which there are no tiles
            raise RefusedError(error.what) from error
    # Grouped-query attention has fewer key-value heads than query heads.
    grouped = q_BHTD.shape[1] != k_BKTD.shape[1]
    with warnings.catch_warnings(record=True) as caught, sdpa_kernel(BACKENDS[name]):
        # PyTorch gives its reasons as warnings, and by default Python shows identical warnings only once.
        warnings.simplefilter("always")
        try:
            return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=causal, enable_gqa=grouped, **options)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            raise RefusedError(_reasons(error, [str(one.message) for one in caught])) from error


def _reasons(error: Exception, messages: list[str]) -> str:
    """Return PyTorch's reasons in one line: the warnings about the forced backend, or the error if there are none."""
    plain = [_PLACE.sub("", message).strip() for message in messages]
    # Skip lines that only announce reasons, and lines about the backends that are switched off.
    telling = [text for text in plain if text and not text.endswith("not used because:") and "been runtime disabled" not in text]
    lines = list(dict.fromkeys(telling)) or [str(error).splitlines()[0]]
    return " ".join(" ".join(lines).split())


def what_ran(call: Callable[[], object], device: Device) -> tuple[str, str]:
    """Call a function once under the profiler, and return the attention implementation that ran and the longest kernel.

    The implementation is "" if none of them ran. On a CPU, the second value is the name of the operator.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.kind != "cpu" else [])
    with profile(activities=activities) as watch:
        call()
        # The profiler records only kernels that have finished before it stops.
        if device.kind != "cpu":
            torch.cuda.synchronize(device.torch_device)
    events = watch.key_averages()
    names = [event.key for event in events]
    ran = [name for name, pattern in _OPERATORS.items() if any(re.search(pattern, one) for one in names)]
    # All kernels of the pass must have run.
    if any(kernels <= set(names) for kernels in _KERNELS):
        ran.append(TRITON)
    kernels = [event for event in events if event.device_type.name != "CPU" and not getattr(event, "is_user_annotation", False)]
    if kernels:
        return "+".join(ran), max(kernels, key=lambda event: event.self_device_time_total).key
    operators = [one for name in ran if name in _OPERATORS for one in names if re.search(_OPERATORS[name], one)]
    return "+".join(ran), operators[0] if operators else ""


def make_inputs(
    device: Device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random queries, keys, values and output gradients.

    Args:
        sizes: numbers of sequences, query heads, key-value heads, positions, and features of a head.
    """
    B, H, K, T, D = sizes
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    q, k, v, grad = (
        torch.randn(B, heads, T, D, device=device.torch_device, generator=generator).to(dtype) for heads in (H, K, K, H)
    )
    return q, k, v, grad


def why_absent(name: str, device: Device) -> str:
    """Return why an implementation cannot run on this kind of device, or "" if it can."""
    return why_no_kernels(device) if name == TRITON else ""
