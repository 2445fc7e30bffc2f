"""Check operators with the sample inputs of PyTorch's own tests, which are in its OpInfo database.

The database imports PyTorch's test package. This import freezes the backend settings of the process, so the checks run in a
separate process.
"""

import functools
import importlib.util
import itertools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hyperion.experiments.coverage.layers import LAYERS, layer_case
from hyperion.experiments.coverage.rounding import Case, errors_over_tolerance, forward_backward, gradient_error
from hyperion.measure import FORMATS
from hyperion.measure.clock.verify import matmul_precision
from hyperion.processes import report_progress, world

# Operators by kind. The models of the book and of `architectures` use them in training or inference. Operators with random
# results are excluded, because the float64 reference would draw other random numbers. The names are those of the OpInfo database.
OPERATORS = {
    "element-wise": (
        *("add", "sub", "mul", "div", "neg", "abs", "exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "square"),
        *("sin", "cos", "tanh", "sigmoid", "erf", "clamp", "where", "maximum", "minimum", "addcmul", "addcdiv", "lerp"),
        *("masked_fill", "float_power", "exp2", "expm1"),
    ),
    "activations": (
        *("nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "nn.functional.mish", "nn.functional.softplus"),
        *("nn.functional.elu", "nn.functional.leaky_relu", "nn.functional.glu", "nn.functional.hardswish", "nn.functional.relu6"),
        *("nn.functional.logsigmoid", "softmax", "log_softmax", "nn.functional.softmin", "nn.functional.prelu"),
    ),
    "reductions": (
        *("sum", "mean", "var", "std", "amax", "amin", "prod", "cumsum", "cumprod", "logsumexp", "logcumsumexp", "linalg.norm"),
        *(
            "linalg.vector_norm",
            "norm",
            "argmax",
            "max",
            "topk",
            "sort",
            "nn.functional.normalize",
            "nn.functional.cosine_similarity",
        ),
    ),
    "products": (
        *("mm", "bmm", "matmul", "addmm", "baddbmm", "mv", "dot", "outer", "einsum", "tensordot", "nn.functional.linear"),
        *("nn.functional.bilinear", "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
    ),
    "convolutions": (
        *("nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose1d"),
        *("nn.functional.conv_transpose2d", "nn.functional.unfold"),
    ),
    "normalisation and pooling": (
        *("nn.functional.layer_norm", "nn.functional.rms_norm", "nn.functional.batch_norm", "nn.functional.group_norm"),
        *("nn.functional.instance_norm", "nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.avg_pool1d"),
        *("nn.functional.adaptive_avg_pool2d", "nn.functional.adaptive_avg_pool1d"),
    ),
    "losses": (
        *("nn.functional.cross_entropy", "nn.functional.nll_loss", "nn.functional.mse_loss", "nn.functional.l1_loss"),
        *("nn.functional.smooth_l1_loss", "nn.functional.kl_div", "nn.functional.binary_cross_entropy_with_logits"),
        *("nn.functional.huber_loss", "nn.functional.ctc_loss"),
    ),
    "indexing and shapes": (
        *("gather", "scatter", "scatter_add", "index_select", "index_add", "index_put", "take_along_dim", "__getitem__"),
        *("nn.functional.embedding", "cat", "stack", "split", "chunk", "unbind", "reshape", "view"),
        *("permute", "transpose", "expand", "repeat", "repeat_interleave", "roll", "flip", "tril", "triu", "narrow", "squeeze"),
        *("unsqueeze", "flatten", "nn.functional.pad", "nn.functional.pixel_shuffle", "clone", "contiguous", "masked_select"),
    ),
    "resampling": ("nn.functional.interpolate", "nn.functional.grid_sample"),
    "spectra": ("fft.rfft", "fft.irfft"),
}


@dataclass(frozen=True)
class KnownGap:
    """A known inaccuracy of PyTorch itself. Its errors are reported, but do not count as failures up to a ceiling.

    Args:
        ceilings: largest ratio of an error to its tolerance, by number format. It is about twice the largest ratio found on a CPU
            with three seeds and all sample inputs, and on an H100. It is infinite if results are not finite.
        cause: cause of the inaccuracy.
    """

    ceilings: dict[str, float]
    cause: str


# Known gaps by (operator, pass).
KNOWN_GAPS = {
    ("logcumsumexp", "backward"): KnownGap(
        {"fp32": 200, "bf16": 45, "fp16": 350},
        "the gradient is computed as exp(log|g| - y + x), which loses the digits of g where |y| is large",
    ),
    ("linalg.vector_norm", "backward"): KnownGap(
        {"fp16": 100}, "the powers |x|^(p - 1) of small numbers are below the smallest fp16 number"
    ),
    ("nn.functional.normalize", "backward"): KnownGap(
        {"fp16": math.inf},
        "the powers of small numbers and of small norms are below the smallest fp16 number, so the gradient is not finite",
    ),
    ("nn.functional.grid_sample", "backward"): KnownGap(
        {"bf16": 15, "fp16": 55},
        "the position in pixels is rounded to the format, so it can be in another pixel, where the gradient is another one",
    ),
}
# In 16-bit formats, a gradient of zeros can be below the ceiling of a gap. Its relative error is 1 for every sample input, and a
# gap affects some of them. So the median error must be below this number. The largest one is 0.90: logcumsumexp, one sample.
LARGEST_MEDIAN_ERROR = 0.95
# Excluded entries of the database. They are step functions of a quotient. If the exact quotient is just below an integer, it is
# rounded to this integer, and the result differs by 1.
_STEPS = ("div (trunc_rounding)", "div (floor_rounding)")
# Arguments that disable dropout, by operator. With dropout, the reference on the CPU would use other random numbers than a GPU.
_NO_DROPOUT = {
    "nn.functional.scaled_dot_product_attention": {"dropout_p": 0.0},
    "nn.functional.multi_head_attention_forward": {"training": False},
}
# Operators that return values and their indices. The number is the position of `dim` among the arguments after the input.
_INDEX_DIM = {"sort": 0, "topk": 1}
# Kinds of operators whose GPU kernels accumulate sums in memory, and thus in the dtype of the tensor.
_IN_STORAGE = ("indexing and shapes", "resampling")
KIND_OF = {name: kind for kind, names in OPERATORS.items() for name in names}
# The number of sample inputs generated for an operator is at most this many times the number of tested sample inputs.
_GENERATED = 8


def why_no_database() -> str:
    """Return the reason why PyTorch's operator database cannot be used here, or an empty string if it can."""
    if importlib.util.find_spec("expecttest") is None:
        return (
            "unavailable: PyTorch's operator database imports the package expecttest, which is not installed; "
            "next step: pip install expecttest"
        )
    return ""


def check_operators(
    names: list[str], formats: list[str], samples: int, probes: int, compiled: list[str], seed: int, file: str, threads: int
) -> dict:
    """Check operators and layers, and append the outcomes of each one to a file. A `Job` runs this function in its own process.

    Args:
        names: operators and layers to check, in this order.
        formats: names of number formats.
        samples: number of sample inputs for each operator and format, or 0 for all of them.
        probes: number of references with changed inputs; see `errors_over_tolerance`.
        compiled: operators whose first sample input is also checked with torch.compile.
        seed: seed of the sample inputs.
        file: path of the file. Each line is a JSON list [name, outcomes]. An outcome is a dict with the keys entry, dtype, pass,
            mode, status, ratio, samples, reason and error: for known gaps, the median relative error of the gradient.
        threads: largest number of threads for the float64 references on the CPU.

    Returns:
        {"unavailable": the reason why there is no database, or an empty string if there is one}.
    """
    torch.set_num_threads(min(threads, torch.get_num_threads()))
    checker = _Checker(formats, samples, probes, seed)
    for done, name in enumerate(names):
        report_progress(done, len(names), name)
        outcomes = checker.check(name, name in compiled)
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps([name, outcomes]) + "\n")
    return {"unavailable": checker.unavailable}


class _Checker:
    def __init__(self, formats: list[str], samples: int, probes: int, seed: int):
        self.device = torch.device(world().device.torch_device)
        self.formats, self.samples, self.probes, self.seed = formats, samples, probes, seed
        self.unavailable, self._entries = why_no_database(), {}
        # The import below freezes these settings, so set them first. They need no reset, because the process does nothing else.
        # Keep a reference to the context manager. Otherwise the garbage collector would close it, which resets the settings.
        self._precision = matmul_precision(FORMATS["fp32"])
        self._precision.__enter__()
        # By default, PyTorch uses TF32 units for recurrent layers.
        rnn: Any = torch.backends.cudnn.rnn  # pyright: ignore[reportAttributeAccessIssue]  # torch adds it at run time
        rnn.fp32_precision = "ieee"
        if not self.unavailable:
            try:
                self._entries = _database()
            except Exception as error:
                self.unavailable = f"unavailable: PyTorch's operator database cannot be imported: {_text(error)}"

    def check(self, name: str, compiled: bool) -> list[dict]:
        """Return the outcomes of all entries of an operator, for each format, pass and mode."""
        if name in LAYERS:
            outcomes = []
            for dtype in self.formats:
                cases = functools.partial(self._layer_cases, name, dtype)
                outcomes += self._outcomes(name, dtype, "eager", cases)
            return outcomes
        outcomes = []
        for entry, operator in self._entries.get(name, {}).items():
            for dtype in self.formats:
                cases = functools.partial(self._cases, operator, dtype)
                is_known = (name, "backward") in KNOWN_GAPS and dtype in KNOWN_GAPS[name, "backward"].ceilings
                outcomes += self._outcomes(entry, dtype, "eager", cases, is_known)
                if compiled:
                    outcomes += self._outcomes(entry, dtype, "compiled", lambda cases=cases: cases()[:1], is_known)
        return outcomes

    def _layer_cases(self, name: str, dtype: str) -> list[Case]:
        return [layer_case(name, self.device, FORMATS[dtype].storage, self.seed)]

    def _cases(self, operator, dtype: str) -> list[Case]:
        torch.manual_seed(self.seed)
        found = operator.sample_inputs(self.device, FORMATS[dtype].storage, requires_grad=operator.supports_autograd)
        taken = list(itertools.islice(found, self.samples * _GENERATED or None))
        chosen = taken[:: max(1, len(taken) // self.samples)][: self.samples] if self.samples else taken
        in_storage = KIND_OF[operator.name] in _IN_STORAGE and self.device.type != "cpu"
        function = operator.op
        if operator.name in _INDEX_DIM:
            function = functools.partial(_with_values_at_indices, operator.op, _INDEX_DIM[operator.name])
        fixed = _NO_DROPOUT.get(operator.name, {})
        return [Case(function, (one.input, *one.args), one.kwargs | fixed, in_storage) for one in chosen]

    def _outcomes(
        self, entry: str, dtype: str, mode: str, make_cases: Callable[[], list[Case]], is_known: bool = False
    ) -> list[dict]:
        compute = forward_backward
        if mode == "compiled":
            torch._dynamo.reset()
            compute = _compiled
        ratios: dict[str, list[float]] = {}
        of_gradient: list[float] = []
        errors: dict[str, Exception] = {}
        try:
            cases = make_cases()
        except Exception as error:
            cases, errors = [], {"forward": error}
        for case in cases:
            try:
                found = errors_over_tolerance(case, FORMATS[dtype].storage, self.seed, self.probes, compute)
            except Exception as error:
                found = self._forward_alone(case, dtype, compute)
                errors.setdefault("backward" if found else "forward", error)
            for which, ratio in found.items():
                ratios.setdefault(which, []).append(ratio)
            if is_known and "backward" in found:
                of_gradient.append(gradient_error(case, self.seed, compute))
        common = {"entry": entry, "dtype": dtype, "mode": mode}
        outcomes = []
        for which, found in ratios.items():
            status = "passed" if max(found) <= 1 else "failed"
            outcome = common | {"pass": which, "status": status, "ratio": max(found), "samples": len(found)}
            outcomes.append(outcome | ({"error": statistics.median(of_gradient)} if is_known and which == "backward" else {}))
        for which, error in errors.items():
            status = "unsupported" if _is_unsupported(error) else "failed"
            outcomes.append(common | {"pass": which, "status": status, "reason": _text(error)})
        return outcomes

    def _forward_alone(self, case: Case, dtype: str, compute: Callable) -> dict[str, float]:
        """Run only the forward pass, after a call with a backward pass raised an error.

        Return the ratio of the error to the tolerance, or {} if the forward pass raises an error, too.
        """
        if self.device.type != "cpu":
            # An error inside a kernel makes the whole process unusable. In this case, `synchronize` raises the error again, and
            # the process ends.
            torch.cuda.synchronize()
        try:
            args, kwargs = tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, (case.args, case.kwargs))
            alone = replace(case, args=args, kwargs=kwargs)
            return errors_over_tolerance(alone, FORMATS[dtype].storage, self.seed, self.probes, compute)
        except Exception:
            return {}


def _with_values_at_indices(operator: Callable, dim_place: int, given: Tensor, *args, **kwargs) -> tuple[Tensor, ...]:
    """Call an operator that returns values and indices. Return the elements of its input at the indices instead of the indices.

    The indices themselves cannot be compared, because equal elements may be returned in any order. If there are as many indices
    as input elements, the sorted indices are also returned, to check that each index occurs once. A stable sort must return the
    same indices as the reference, so its indices are returned unchanged.
    """
    values, indices = operator(given, *args, **kwargs)
    if kwargs.get("stable"):
        return values, indices
    dim = kwargs.get("dim", args[dim_place] if len(args) > dim_place else -1)
    outputs = values, given.gather(dim, indices)
    return (*outputs, indices.sort(dim).values) if indices.shape == given.shape else outputs


def _compiled(function: Callable, *rest):
    return forward_backward(torch.compile(function, dynamic=False), *rest)


def _database() -> dict[str, dict]:
    """Return the entries of the database, as {operator name: {entry name: OpInfo}}."""
    from torch.testing._internal.common_methods_invocations import op_db

    entries: dict[str, dict] = {}
    for one in op_db:
        label = f"{one.name} ({one.variant_test_name})" if one.variant_test_name else one.name
        if label not in _STEPS:
            entries.setdefault(one.name, {})[label] = one
    return entries


def _is_unsupported(error: Exception) -> bool:
    """Return True if an error means that there is no kernel for this format or device."""
    words = ("not implemented for", "not supported", "unsupported", "only supports", "expected scalar type")
    return isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in words)


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
