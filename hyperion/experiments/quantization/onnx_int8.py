"""Quantise a model to int8 with ONNX Runtime's tools.

Weights are unsigned 8-bit integers around 128, with one scale for each output or output channel. Unsigned weights give exact
integer products on every CPU. With signed weights, sums of products saturate at 16 bits on CPUs without VNNI instructions.

There are three kinds of quantisation:

- dynamic: the inputs of a product are quantised at run time. Their range is that of the current values.
- static: the ranges of inputs and outputs are determined in advance: from the smallest to the largest value in calibration data.
- static, divergence: the ranges are smaller, and values outside them are clipped. They are chosen so that the Kullback-Leibler
  divergence between the calibration data and their quantised values is smallest. A few large values then no longer reduce the
  resolution of all others. If most values are 0, as after a ReLU, too many of the other values may be clipped. This increases
  the error of a layer.
"""

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.workloads.onnx_sessions import CPU_PROVIDER

DYNAMIC, STATIC, DIVERGENCE = "int8 dynamic", "int8 static", "int8 static, divergence"
KINDS = (DYNAMIC, STATIC, DIVERGENCE)
# Operators of ONNX Runtime that multiply integers. Its optimizer creates the fused ones from standard ONNX operators.
INTEGER_PRODUCTS = (
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
    "QLinearMatMul",
    "ConvInteger",
    "QLinearConv",
    "QGemm",
)
_PRODUCTS = ("MatMul", "Gemm", "Conv")
_STEPS = 255  # steps between the smallest and the largest of 256 values
# The histogram has 1024 bins. The search for the smallest divergence considers every symmetric range of 128 bins or more. With
# the default histogram of 128 bins, the whole range would be the only choice.
_HISTOGRAM = {"num_bins": 1024, "num_quantized_bins": 128, "symmetric": True}


def export(model: nn.Module, example: Tensor, path: Path) -> Path:
    """Export a model with one input and one output to ONNX, and prepare the ONNX model for quantisation.

    The exported model accepts inputs with the shape of the example only. The preparation folds batch norms into convolutions, so
    that a convolution and its norm are quantised as one operation.

    Returns:
        Path of the prepared ONNX file, which is `path`.
    """
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    plain = path.with_suffix(".plain.onnx")
    with torch.no_grad(), _quiet():
        torch.onnx.export(
            model.eval(), (example,), str(plain), dynamo=True, input_names=["x"], output_names=["y"], external_data=False
        )
        # Symbolic shapes are not needed, because all shapes are fixed.
        quant_pre_process(str(plain), str(path), skip_symbolic_shape=True)
    plain.unlink()
    prepared = onnx.load(str(path))
    # Remove the stored shapes. The quantiser transposes the weights of a Gemm and infers all shapes again, and it raises an error
    # if a stored shape differs.
    del prepared.graph.value_info[:]
    onnx.save(prepared, str(path))
    return path


def quantise(kind: str, source: Path, target: Path, calibration: Sequence[Tensor] = (), skip_width: int = 0) -> Path:
    """Quantise all products of an activation and a constant weight in an exported model.

    Args:
        kind: one of `KINDS`.
        source: path of the exported model.
        target: path of the quantised model.
        calibration: inputs of the model from which the ranges are determined. `STATIC` and `DIVERGENCE` require them.
        skip_width: number of outputs of the products that stay in float32, for example of the head of a language model.

    Returns:
        The path `target`.

    Raises:
        HyperionError: `kind` is `STATIC` or `DIVERGENCE`, and there is no calibration data.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

    shared: dict[str, Any] = {
        "per_channel": True,
        "weight_type": QuantType.QUInt8,
        "op_types_to_quantize": list(_PRODUCTS),
        "nodes_to_exclude": _float_products(source, skip_width),
        "extra_options": {"WeightSymmetric": True},
    }
    if kind == DYNAMIC:
        with _quiet():
            quantize_dynamic(str(source), str(target), **shared)
        return target
    if not calibration:
        raise HyperionError(
            "static quantisation without calibration data", where="quantise", next_step="pass inputs of the training split"
        )

    with _quiet():
        if kind == DIVERGENCE:
            ranges = _ranges_of_least_divergence(source, target.with_suffix(".calibration.onnx"), calibration)
            shared["extra_options"]["TensorQuantOverrides"] = {
                name: [{"rmin": low, "rmax": high}] for name, (low, high) in ranges.items()
            }
        quantize_static(
            str(source),
            str(target),
            _reader(calibration),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            calibration_providers=[CPU_PROVIDER],
            **shared,
        )
    return target


def _reader(inputs: Sequence[Tensor]) -> Any:
    """Return a data reader that feeds inputs to a calibrator of ONNX Runtime."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.inputs = iter(inputs)

        def get_next(self) -> dict | None:
            found = next(self.inputs, None)
            return None if found is None else {"x": found.numpy()}

    return Reader()


def _ranges_of_least_divergence(source: Path, augmented: Path, calibration: Sequence[Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return a dict that maps the name of each input and output of a product to its range, a pair of NumPy scalars.

    Args:
        source: path of the exported model.
        augmented: path of a temporary file for a copy of the model that returns all these inputs and outputs.
        calibration: inputs of the model.
    """
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    calibrator = create_calibrator(
        str(source),
        list(_PRODUCTS),
        str(augmented),
        CalibrationMethod.Entropy,
        providers=[CPU_PROVIDER],
        extra_options=_HISTOGRAM,
    )
    # Collect all inputs in one call. If a later call had larger values, the calibrator would add bins to its histograms, and the
    # search would take much longer.
    calibrator.collect_data(_reader(calibration))
    found = calibrator.compute_data()
    augmented.unlink()
    return {name: data.range_value for name, data in found.items()}


@dataclass(frozen=True)
class Ranges:
    """Quantisation steps and ranges of a layer with a single product.

    Args:
        input_step: distance between neighbouring values of the input.
        input_low, input_high: range of the input. Values outside it are clipped.
        output_step, output_low, output_high: the same for the output. The step is 0 if the output is not quantised.
    """

    input_step: float
    input_low: float
    input_high: float
    output_step: float
    output_low: float
    output_high: float

    def input_error(self, x: Tensor) -> Tensor:
        """Return a bound on the error of each input: one step. For values outside the range, add the distance to the range."""
        return self.input_step + _outside(x.double(), self.input_low, self.input_high)

    def output_error(self, y: Tensor) -> Tensor:
        """Return a bound on the error that quantising the output adds to each value."""
        return self.output_step + _outside(y.double(), self.output_low, self.output_high)


def dynamic_ranges(x: Tensor) -> Ranges:
    """Return the ranges of a dynamically quantised layer, computed from its input."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    return Ranges((high - low) / _STEPS, low, high, 0.0, 0.0, 0.0)


def static_ranges(path: Path) -> Ranges:
    """Return the ranges stored in a statically quantised model with a single product."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    values = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    found = []
    for node in (node for node in graph.node if node.op_type == "QuantizeLinear"):
        step, zero = float(values[node.input[1]]), int(values[node.input[2]])
        found.append((step, -zero * step, (_STEPS - zero) * step))
    (first, *_), last = found, found[-1]
    return Ranges(*first, *(last if len(found) > 1 else (0.0, 0.0, 0.0)))


def _by_output(kind: str, dimensions: int) -> bool:
    """Return True if each output has its own scale. The convolution of the dynamic kind has a single scale for all outputs."""
    return kind != DYNAMIC or dimensions == 2


def weight_error(kind: str, weight: Tensor) -> Tensor:
    """Return a bound on the error of each weight.

    The bound is one quantisation step instead of half a step, because the centre of the range (the zero point) is rounded, too.
    """
    rows = weight.double().flatten(1) if _by_output(kind, weight.dim()) else weight.double().view(1, -1)
    step = 2 * rows.abs().amax(1) / _STEPS
    return step.view(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)


def weight_bytes(kind: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the bytes of 8-bit weights of these shapes, including a float32 scale and an 8-bit zero point for each scale."""
    return sum(math.prod(shape) + 5 * (shape[0] if _by_output(kind, len(shape)) else 1) for shape in shapes)


def stored_weight_bytes(path: Path) -> int:
    """Return the bytes of the 8-bit weights in an ONNX file, including their scales and zero points."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    sizes = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    total = 0
    for name, array in sizes.items():
        if array.ndim >= 2 and array.dtype.name in ("int8", "uint8"):  # excludes the boolean masks of the graph
            stem = name.removesuffix("_quantized")
            total += array.nbytes + sum(sizes[f"{stem}{end}"].nbytes for end in ("_scale", "_zero_point"))
    return total


def _outside(values: Tensor, low: float, high: float) -> Tensor:
    return (values - high).clamp_min(0) + (low - values).clamp_min(0)


def _float_products(path: Path, width: int) -> list[str]:
    """Return the names of the products that stay in float32: products of two activations, and products with `width` outputs."""
    import onnx

    graph = onnx.load(str(path)).graph
    dimensions = {one.name: one.dims for one in graph.initializer}
    names = []
    for node in (node for node in graph.node if node.op_type in _PRODUCTS):
        weights = [dimensions[name] for name in node.input if len(dimensions.get(name, ())) >= 2]
        if not weights or any(len(one) == 2 and width in one for one in weights):
            names.append(node.name)
    return names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that hides the progress and the advice that the exporter and the quantiser print."""
    level, logging.root.manager.disable = logging.root.manager.disable, logging.WARNING
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(nowhere):
                yield
    finally:
        logging.root.manager.disable = level
