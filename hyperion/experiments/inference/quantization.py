"""How do 8-bit and 4-bit weights change the size, the quality and the speed of a model?

A trained language model and a trained classifier are quantised with each scheme that can run here. For each scheme, the rows
contain:

- the error of each quantised layer against float64, with a bound computed from the spacing of the format's values;
- perplexity or accuracy relative to the original model on the same tokens or images;
- the bytes of the stored weights, which must equal the bytes computed from the format, and the size of the file;
- the time of a batch, in alternation with the original model in the same runtime;
- the modules, operators and kernels that ran.
"""

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, checked, sample_frame, speedup_row, timed_row
from hyperion.data import IGNORE_INDEX
from hyperion.experiments.inference import metrics, onnx_int8
from hyperion.experiments.inference.onnx_sessions import Session, why_no_onnx
from hyperion.experiments.inference.quality import accuracy_difference, perplexity, perplexity_ratio
from hyperion.experiments.inference.quantized_linears import (
    SCHEMES,
    Scheme,
    layer_error,
    output_bound,
    replace_linears,
    stored_error,
    weight_bytes_of,
    what_ran,
)
from hyperion.hardware import Device, detect_cpu
from hyperion.measure import FORMATS, matmul_precision, time_interleaved
from hyperion.models.llama import layer_shapes
from hyperion.results import Row, proportion_estimate
from hyperion.workloads.datasets import IMAGES, TEXT
from hyperion.workloads.trained_models import LANGUAGE_MODELS, Scores, TrainedModel, trained_classifier, trained_language_model

ORIGINAL = "original"
EAGER, ORT = "PyTorch", "ONNX Runtime"
METRICS = metrics.METRICS
_WITHIN = "largest error over its bound"
# Calibration by divergence collects a histogram of each activation. A language model has thousands of tokens in a window, so its
# calibration would take most of the chapter's time.
_KINDS_FOR_LANGUAGE = (onnx_int8.DYNAMIC, onnx_int8.STATIC)
_NO_TIME_LIMIT = "no limit: the work of a batch depends on the format"


class QuantizationOptions(Options):
    """Options for the `quantization` experiment.

    Args:
        language_model, classifier: names of trained models, see `hyperion.workloads.trained_models`.
        dtype: number format of the original language model in PyTorch, and of the inputs to its quantised layers.
        batch_size: number of windows or images in a timed batch.
        time_limit_s: seconds of timing for each variant.
        host_batch_size: batch size for ONNX Runtime on a machine with a GPU. ONNX Runtime uses the CPU of this machine.
        host_windows, host_images: largest number of windows and of images that ONNX Runtime scores on such a machine.
    """

    language_model: str
    classifier: str
    dtype: str
    batch_size: int
    time_limit_s: float
    host_batch_size: int = 1
    host_windows: int = 32
    host_images: int = 1000


def forecast(context: Context) -> list[Forecast]:
    """Predict the bytes of each scheme's weights from the dimensions of the model and the format alone."""
    options = QuantizationOptions.of(context)
    shape = LANGUAGE_MODELS[options.language_model].shape
    shapes = shape.num_hidden_layers * [(n, k) for k, n in layer_shapes(shape).values()]
    weights = sum(math.prod(shape) for shape in shapes)
    forecasts = [
        Forecast(
            scheme.name,
            "weight_bytes",
            sum(scheme.weight_bytes(*shape) for shape in shapes),
            f"{weights:,} weights: bits of the format and bytes of its scales",
            dtype=scheme.dtype,
            params={"model": options.language_model, "runtime": EAGER},
        )
        for scheme in SCHEMES
    ]
    return forecasts + [
        Forecast(
            kind,
            "weight_bytes",
            onnx_int8.weight_bytes(kind, shapes),
            f"{weights:,} weights of one byte, and a scale and a zero point for each output",
            dtype="int8",
            params={"model": options.language_model, "runtime": ORT},
        )
        for kind in _KINDS_FOR_LANGUAGE
    ]


def run(context: Context, report: Report) -> Result:
    """Quantise both models with every scheme and measure them. If a scheme cannot run here, its rows contain the reason."""
    options = QuantizationOptions.of(context)
    report(0, len(SCHEMES) + 2, "trained models")
    language = trained_language_model(context, options.language_model)
    classifier = trained_classifier(context, options.classifier)
    rows, frames = [], []
    with matmul_precision(FORMATS[options.dtype]):
        found = _language_in_torch(context, options, language, report)
    for one in (found, _in_onnx(context, options, language), _in_onnx(context, options, classifier)):
        rows += one[0]
        frames += one[1]
    # Delete the files, because those of all variants of a large model take 700 MB.
    shutil.rmtree(context.workspace, ignore_errors=True)
    report(len(SCHEMES) + 2, len(SCHEMES) + 2, "done")
    return Result(rows, all_samples(frames), language.source)


EXPERIMENT = Experiment(forecast, run, options=QuantizationOptions, data=(*TEXT, *IMAGES))

Found = tuple[list[Row], list[pd.DataFrame]]


@dataclass(frozen=True)
class _Material:
    """A trained model in a runtime. The methods score and time its variants (original and quantised) and return the rows.

    Args:
        context: context of the experiment.
        options: options of the experiment.
        trained: the trained model.
        runtime: `EAGER` or `ORT`.
        device: device of the runtime.
        dtype: number format of the original model.
    """

    context: Context
    options: QuantizationOptions
    trained: TrainedModel
    runtime: str
    device: Device
    dtype: str

    @property
    def shared(self) -> dict:
        """Columns that all rows share."""
        params = {"model": self.trained.name, "runtime": self.runtime}
        return {"dtype": self.dtype, "params": params, "data_source": self.trained.source}

    def columns(self, dtype: str = "", **params) -> dict:
        """Return `shared` with another number format and additional params."""
        return self.shared | {"dtype": dtype or self.dtype, "params": self.shared["params"] | params}

    @property
    def batch_size(self) -> int:
        """Number of windows or images in a batch."""
        return self.options.host_batch_size if self._on_host else self.options.batch_size

    @property
    def records(self) -> int | None:
        """Number of windows or images that are scored, or None for all."""
        if not self._on_host:
            return None
        return self.options.host_windows if self.trained.kind == "language" else self.options.host_images

    @property
    def _on_host(self) -> bool:
        """True if the machine has a GPU and the runtime uses the CPU. The same work takes much longer there."""
        return self.device.kind != self.context.device.kind

    def batch(self) -> Tensor:
        """Return the inputs of the timed batch."""
        return self.trained.held_out(self.device)[0][: self.batch_size]

    def score(self, call: Callable[[Tensor], Tensor]) -> Scores:
        """Score a variant on the held-out data."""
        return self.trained.score(call, self.device, self.batch_size, self.records)

    def quality_rows(self, name: str, dtype: str, scores: Scores, original: Scores) -> list[Row]:
        """Return the row with perplexity or accuracy. For a quantised model, it is relative to the original."""
        windows, columns = self._windows(), self.columns(dtype)
        no_limit = {"limit": None, "limit_source": "no limit: real data have an unknown best value"}
        if self.trained.kind == "language":
            row = (
                self.context.row(name, "perplexity_token", perplexity(scores.losses, windows), **columns, **no_limit)
                if name == ORIGINAL
                else self.context.row(
                    name, "perplexity_ratio", perplexity_ratio(scores.losses, original.losses, windows), **columns
                )
            )
        elif name == ORIGINAL:
            share = proportion_estimate(int(scores.correct.sum()), len(scores.correct))
            row = self.context.row(name, "accuracy", share, **columns, **no_limit)
        else:
            row = self.context.row(name, "accuracy_difference", accuracy_difference(scores.correct, original.correct), **columns)
        return [row]

    def _windows(self) -> np.ndarray:
        """Return the window number of each scored token. For a classifier, return the number of each image."""
        targets = self.trained.held_out(self.device)[1][: self.records]
        if targets.dim() == 1:
            return np.arange(len(targets))
        scored = (targets != IGNORE_INDEX).cpu()
        return scored.nonzero()[:, 0].numpy()

    def time_rows(self, calls: Mapping[str, tuple[str, Callable[[], object]]]) -> Found:
        """Time variants in alternation. Return their times and their speed-ups over the original.

        Args:
            calls: a dict that maps the name of each variant to (number format, function). It contains the original.
        """
        functions = [call for _, call in calls.values()]
        limit_s = self.options.time_limit_s * len(calls)
        timings = dict(zip(calls, time_interleaved(functions, self.device, cold=False, time_limit_s=limit_s), strict=True))
        threads = {"idle_threads": "sleep"} if self.runtime == ORT else {}
        rows, frames = [], []
        for name, timing in timings.items():
            columns = self.columns(calls[name][0], batch=len(self.batch()), cache="hot", **threads)
            limit = (None, _NO_TIME_LIMIT)
            rows.append(timed_row(self.context, name, "inference_time_s", timing.estimate, timing, limit=limit, **columns))
            if name != ORIGINAL:
                rows.append(speedup_row(self.context, name, timing, timings[ORIGINAL], _NO_TIME_LIMIT, **columns))
            frames.append(sample_frame(timing, name, columns["dtype"], columns["params"]))
        return rows, frames

    def byte_rows(self, name: str, dtype: str, stored: int, computed: int, path: Path) -> list[Row]:
        """Return the rows with the bytes of the quantised weights, and with the size of the whole model on disk."""
        check = checked("bytes computed from the format", abs(stored - computed), 0)
        return [
            self.context.row(name, "weight_bytes", stored, **self.columns(dtype), **check),
            self.context.row(name, "stored_gb", path.stat().st_size / 1e9, **self.columns(dtype, what="whole model on disk")),
        ]


def _language_in_torch(context: Context, options: QuantizationOptions, trained: TrainedModel, report: Report) -> Found:
    storage = FORMATS[options.dtype].storage
    material = _Material(context, options, trained, EAGER, context.device, options.dtype)
    folder = _folder(context)
    original = trained.load(context.device, storage)
    scores = material.score(original)
    batch = material.batch()
    rows = material.quality_rows(ORIGINAL, options.dtype, scores, scores)
    linears = [one.weight for name, one in original.named_modules() if isinstance(one, nn.Linear) and ".layers." in name]
    weights = sum(weight.numel() for weight in linears)
    path = _save(original, folder / "original.safetensors")
    rows += material.byte_rows(ORIGINAL, options.dtype, sum(w.nbytes for w in linears), weights * storage.itemsize, path)
    calls = {ORIGINAL: (options.dtype, lambda: original(batch))}
    for done, scheme in enumerate(SCHEMES):
        report(done, len(SCHEMES) + 2, scheme.name)
        if reason := scheme.why_absent(context.device):
            rows.append(context.absent_row(scheme.name, "weight_bytes", reason, **material.columns(scheme.dtype)))
            continue
        try:
            model = trained.load(context.device, storage)
            originals = replace_linears(model, scheme, context.device)
            new_rows = _scheme_rows(material, scheme, model, originals, scores, folder)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # the device or its library does not support the format or the shape
            reason = f"refused: {str(error).splitlines()[0]}"
            rows.append(context.absent_row(scheme.name, "weight_bytes", reason, **material.columns(scheme.dtype)))
            continue
        rows += new_rows
        calls[scheme.name] = (scheme.dtype, lambda model=model: model(batch))
    with torch.inference_mode():
        timed, frames = material.time_rows(calls)
    return rows + timed, frames


def _scheme_rows(
    material: _Material, scheme: Scheme, model: nn.Module, originals: dict[str, Tensor], original: Scores, folder: Path
) -> list[Row]:
    """Return the rows of a quantised language model, except those with its time."""
    layers = {name: model.get_submodule(name) for name in originals}
    # Save the model before its first call, because bitsandbytes moves tensors in this call.
    path = _save(model, folder / "quantised.safetensors")
    computed = sum(scheme.weight_bytes(*weight.shape) for weight in originals.values())
    rows = material.byte_rows(scheme.name, scheme.dtype, weight_bytes_of(layers.values()), computed, path)
    rows += _error_rows(material, scheme, model, layers, originals)
    rows += material.quality_rows(scheme.name, scheme.dtype, material.score(model), original)
    first, x = next(iter(layers.items()))
    inputs = torch.ones(material.batch_size, originals[first].shape[1], dtype=FORMATS[material.dtype].storage)
    kernel = what_ran(lambda: x(inputs.to(material.device.torch_device)), material.device)
    kinds = {type(layer).__name__ for layer in layers.values()}
    columns = material.columns(scheme.dtype, what="quantised layers", module="+".join(sorted(kinds)), kernel=kernel)
    plain = sum(isinstance(one, nn.Linear) and type(one) is nn.Linear for one in layers.values())
    check = checked("layers that are still nn.Linear", plain, 0)
    return [*rows, material.context.row(scheme.name, "count", len(layers), **columns, **check)]


def _error_rows(
    material: _Material, scheme: Scheme, model: nn.Module, layers: dict[str, nn.Module], originals: dict[str, Tensor]
) -> list[Row]:
    """Return rows that compare each quantised layer with its float64 original, for the inputs that it receives in the model."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen[name] = inputs[0].detach().clone(), output.detach().clone()

        return hook

    handles = [layer.register_forward_hook(remember(name)) for name, layer in layers.items()]
    with torch.inference_mode():
        model(material.batch()[:2])
    for handle in handles:
        handle.remove()
    of_output, of_weight = [], []
    for name, layer in layers.items():
        error, weight_ratio, output_ratio = layer_error(scheme, originals[name], layer, *seen[name])
        of_weight.append((stored_error(scheme, originals[name], layer)[0], weight_ratio))
        of_output.append((error, output_ratio))
    return [
        material.context.row(
            scheme.name,
            "relative_difference",
            max(error for error, _ in pairs),
            **material.columns(scheme.dtype, what=what, layers=len(layers)),
            **checked(f"float64, {_WITHIN}", float(np.max([ratio for _, ratio in pairs])), 1.0),
        )
        for what, pairs in (("stored weights", of_weight), ("output of a layer", of_output))
    ]


def _in_onnx(context: Context, options: QuantizationOptions, trained: TrainedModel) -> Found:
    """Measure a model with ONNX Runtime's CPU provider: the original and each kind of int8 quantisation."""
    material = _Material(context, options, trained, ORT, detect_cpu(), "fp32")
    language = trained.kind == "language"
    kinds = _KINDS_FOR_LANGUAGE if language else onnx_int8.KINDS
    if reason := why_no_onnx():
        columns = material.columns("int8")
        return [context.absent_row(kind, "weight_bytes", reason, **columns) for kind in kinds], []
    folder, batch = _folder(context), material.batch()
    model = trained.load(material.device)
    calibration = list(trained.calibration(material.device).split(len(batch)))
    # The head of the language model shares its weights with the embedding, so it stays in float32, as in PyTorch.
    embedding: Any = model.get_submodule("lm.lm_head") if language else None
    head = embedding.weight.shape[0] if language else 0
    source = onnx_int8.export(model, batch, folder / f"{trained.kind}.onnx")
    sessions = {ORIGINAL: Session(source)}
    scores = material.score(sessions[ORIGINAL])
    rows = material.quality_rows(ORIGINAL, "fp32", scores, scores)
    shapes = [tuple(weight.shape) for weight in _products(model)]
    for kind in kinds:
        target = folder / f"{trained.kind}-{kind.replace(', ', '-').replace(' ', '-')}.onnx"
        usable = [one for one in calibration if len(one) == len(batch)]
        onnx_int8.quantise(kind, source, target, usable, head)
        session = sessions[kind] = Session(target)
        nodes = session.executed(batch)
        operators, providers = Counter(operator for operator, _ in nodes), {provider for _, provider in nodes}
        products = sum(operators[name] for name in onnx_int8.INTEGER_PRODUCTS)
        ran = {name: operators[name] for name in onnx_int8.INTEGER_PRODUCTS if operators[name]}
        check = checked("products that did not run on integers", abs(products - len(shapes)), 0)
        columns = material.columns("int8", what="quantised layers", provider="+".join(sorted(providers)), operators=ran)
        rows.append(context.row(kind, "count", products, **columns, **check))
        rows += material.quality_rows(kind, "int8", material.score(session), scores)
        stored, computed = onnx_int8.stored_weight_bytes(target), onnx_int8.weight_bytes(kind, shapes)
        rows += material.byte_rows(kind, "int8", stored, computed, target)
    rows += _onnx_error_rows(material, model, folder, kinds)
    calls = {name: ("fp32" if name == ORIGINAL else "int8", lambda one=one: one(batch)) for name, one in sessions.items()}
    timed, frames = material.time_rows(calls)
    return rows + timed, frames


def _onnx_error_rows(material: _Material, model: nn.Module, folder: Path, kinds: tuple[str, ...]) -> list[Row]:
    """Return rows that compare a single layer with its float64 original, for inputs that it receives in the model.

    The layer is exported and quantised without the rest of the model.
    """
    layer = _probed_layer(model)
    captured: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0].detach().clone()))
    with torch.no_grad():
        model(material.trained.calibration(material.device)[: material.batch_size])
        model(material.batch())
    handle.remove()
    calibration, x = captured
    weight = layer.weight.detach()
    product = _product_of(layer)
    exact = product(x.double(), weight.double())
    source = onnx_int8.export(layer, x, folder / "layer.onnx")
    rows = []
    for kind in kinds:
        target = onnx_int8.quantise(kind, source, folder / "layer-int8.onnx", [calibration])
        ranges = onnx_int8.dynamic_ranges(x) if kind == onnx_int8.DYNAMIC else onnx_int8.static_ranges(target)
        roundoff = weight[0].numel() * torch.finfo(torch.float32).eps
        dw = onnx_int8.weight_error(kind, weight)
        bound = output_bound(product, x, weight, ranges.input_error(x), dw, roundoff) + ranges.output_error(exact)
        error = (Session(target)(x).double() - exact).abs()
        rows.append(
            material.context.row(
                kind,
                "relative_difference",
                (error.norm() / exact.norm()).item(),
                **material.columns("int8", what="output of a layer", layers=1),
                **checked(f"float64, {_WITHIN}", (error / bound).max().item(), 1.0),
            )
        )
    return rows


def _probed_layer(model: nn.Module) -> Any:
    """Return the layer for `_onnx_error_rows`: the last linear layer of the last block, or the last 3x3 convolution."""
    linears = [one for name, one in model.named_modules() if isinstance(one, nn.Linear) and ".layers." in name]
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d) and one.kernel_size == (3, 3)]
    return linears[-1] if linears else convolutions[-1]


def _product_of(layer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(layer, nn.Conv2d):
        return lambda x, weight: F.conv2d(x, weight, stride=layer.stride, padding=layer.padding)  # pyright: ignore
    return F.linear


def _products(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights of the layers that are quantised: all except the head of a language model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and not name.endswith("lm_head"):
            yield module.weight


def _save(model: nn.Module, path: Path) -> Path:
    """Write all tensors of a model to a file, and return the path of the file. A tensor with two names is written only once."""
    tensors: dict[tuple, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensors.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else (name,), (name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in tensors.values()}, path)
    return path


def _folder(context: Context) -> Path:
    context.workspace.mkdir(parents=True, exist_ok=True)
    return context.workspace
