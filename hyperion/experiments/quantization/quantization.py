"""How do 8-bit and 4-bit weights change the size, the quality and the speed of a model?

A trained language model and a trained classifier are quantised with each scheme that can run here. For each scheme, the rows
contain:

- the error of each quantised layer against float64, with a bound computed from the spacing of the format's values;
- perplexity or accuracy relative to the original model on the same tokens or images;
- the bytes of the stored weights, which must equal the bytes computed from the format, and the size of the file;
- the time of a batch, in alternation with the original model in the same runtime; percentiles of the latency of one example; and
  the rate for several batch sizes;
- the modules, operators and kernels that ran.
"""

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import all_samples, checked, sample_frame, speedup_row, timed_row
from hyperion.experiments.quantization import onnx_int8
from hyperion.experiments.quantization.layer_checks import output_bound, output_error, stored_error, weight_bytes_of, what_ran
from hyperion.experiments.quantization.quantized_linears import SCHEMES, Scheme, block_linears, replace_linears
from hyperion.hardware import Device, detect_cpu
from hyperion.measure import FORMATS, largest_error, matmul_precision, time_interleaved
from hyperion.models.llama import layer_shapes
from hyperion.results import Row, proportion_estimate
from hyperion.results.rows import UNEXPECTED
from hyperion.workloads.batch_times import BatchTimes, batch_of
from hyperion.workloads.datasets import IMAGES, TEXT
from hyperion.workloads.onnx_sessions import Session, why_no_onnx
from hyperion.workloads.quality import change_of_quality, perplexity, windows_of_tokens
from hyperion.workloads.trained_models import (
    LANGUAGE,
    LANGUAGE_MODELS,
    Scores,
    TrainedModel,
    trained_classifier,
    trained_language_model,
)

ORIGINAL = "original"
EAGER, ORT = "PyTorch", "ONNX Runtime"
# Calibration by divergence collects a histogram of each activation. A language model has thousands of tokens in a window, so its
# calibration would take most of the chapter's time.
_KINDS_FOR_LANGUAGE = (onnx_int8.DYNAMIC, onnx_int8.STATIC)
_NO_TIME_LIMIT = "no limit: the work of a batch depends on the format"


class QuantizationOptions(Options):
    """Options for the `quantization` experiment.

    Args:
        language_model, classifier: names of trained models, see `hyperion.workloads.trained_models`.
        dtype: number format of the original language model in PyTorch, and of the inputs to its quantised layers.
        batch_size: number of windows or images in the batch with which all variants are timed in alternation.
        batches: batch sizes that the search for the best one tries.
        latency_samples: number of calls for the latency percentiles. The 99th percentile needs at least 368.
        latency_limit_s: time limit in seconds for these calls. A slow variant makes fewer calls. A percentile that needs more
            calls then has no value.
        time_limit_s: seconds of timing for each variant.
        host_batch_size: batch size for ONNX Runtime on a machine with a GPU. ONNX Runtime uses the CPU of this machine. Its
            search tries no larger batch.
        host_windows, host_images: largest number of windows and of images that ONNX Runtime scores on such a machine.
    """

    language_model: str
    classifier: str
    dtype: str
    batch_size: int
    batches: tuple[int, ...]
    latency_samples: int
    latency_limit_s: float
    time_limit_s: float
    host_batch_size: int = 1
    host_windows: int = 32
    host_images: int = 1000


def forecast(context: Context) -> list[Forecast]:
    """Predict the bytes of each scheme's weights from the dimensions of the model and the format alone."""
    options = QuantizationOptions.of(context)
    shape = LANGUAGE_MODELS[options.language_model].shape
    shapes = shape.num_hidden_layers * [(n, k) for k, n in layer_shapes(shape).values()]
    weights = sum(n * k for n, k in shapes)
    forecasts = [
        Forecast(
            scheme.name,
            "weight_bytes",
            sum(scheme.weight_bytes(n, k) for n, k in shapes),
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
    context.workspace.mkdir(parents=True, exist_ok=True)
    language = trained_language_model(context, options.language_model)
    classifier = trained_classifier(context, options.classifier)
    rows, frames = [], []
    with matmul_precision(FORMATS[options.dtype]):
        in_torch = _language_in_torch(context, options, language, report)
    for new_rows, new_frames in (in_torch, _in_onnx(context, options, language), _in_onnx(context, options, classifier)):
        rows += new_rows
        frames += new_frames
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

    def columns(self, dtype: str = "", **params: Any) -> dict:
        """Return the columns that all rows of a variant share.

        Args:
            dtype: number format of the variant. If empty, that of the original model.
            params: additional params of the row.
        """
        params = {"model": self.trained.name, "runtime": self.runtime} | params
        return {"dtype": dtype or self.dtype, "params": params, "data_source": self.trained.source}

    @property
    def batch_size(self) -> int:
        """Number of windows or images in a batch."""
        return self.options.host_batch_size if self._on_host else self.options.batch_size

    @property
    def records(self) -> int | None:
        """Number of windows or images that are scored, or None for all."""
        if not self._on_host:
            return None
        return self.options.host_windows if self.trained.kind == LANGUAGE else self.options.host_images

    @property
    def _on_host(self) -> bool:
        """True if the machine has a GPU and the runtime uses the CPU. The same work takes much longer there."""
        return self.device.kind != self.context.device.kind

    def batch(self, size: int | None = None) -> Tensor:
        """Return the inputs of a batch. Without a size, it is the batch with which all variants are timed."""
        return batch_of(self.trained.held_out(self.device)[0], size or self.batch_size)

    def score(self, call: Callable[[Tensor], Tensor]) -> Scores:
        """Score a variant on the held-out data."""
        return self.trained.score(call, self.device, self.batch_size, self.records)

    def quality_row(self, name: str, dtype: str, scores: Scores, original: Scores) -> Row:
        """Return the row with perplexity or accuracy. For a quantised model, it is relative to the original."""
        if name != ORIGINAL:
            metric, value = change_of_quality(self.trained, scores, original, self.records)
            return self.context.row(name, metric, value, **self.columns(dtype))
        if self.trained.kind == LANGUAGE:
            metric, value = "perplexity_token", perplexity(scores.losses, windows_of_tokens(self.trained, self.records))
        else:
            metric, value = "accuracy", proportion_estimate(int(scores.correct.sum()), len(scores.correct))
        no_limit = {"limit": None, "limit_source": "no limit: real data have an unknown best value"}
        return self.context.row(name, metric, value, **self.columns(dtype), **no_limit)

    def error_row(self, name: str, dtype: str, error: float, ratio: float, **params: Any) -> Row:
        """Return the row with a relative error. The check is on the largest ratio of an element's error to its bound."""
        check = checked("float64, largest error over its bound", ratio, 1.0)
        return self.context.row(name, "relative_difference", error, **self.columns(dtype, **params), **check)

    def time_rows(self, variants: Mapping[str, tuple[str, Callable[[Tensor], object]]]) -> Found:
        """Time variants: in alternation, with one example, and with several batch sizes.

        Args:
            variants: a dict that maps the name of each variant to (number format, model). It contains the original.

        Returns:
            Rows with the times of all variants and their speed-ups over the original for one batch size, with the percentiles of
            their latency for one example, and with their rates for each batch size; and the samples.
        """
        rows, frames = self._in_alternation({name: (dtype, self._on_batch(call)) for name, (dtype, call) in variants.items()})
        options = self.options
        batches = [size for size in options.batches if not self._on_host or size <= options.host_batch_size]
        limits = (options.latency_samples, options.latency_limit_s, options.time_limit_s)
        for name, (dtype, call) in variants.items():
            times = BatchTimes(self.context, name, self.device, functools.partial(self.columns, dtype), *limits)
            latencies, frame, _ = times.latency(self._on_batch(call, 1))
            rates, searched, _ = times.search(functools.partial(self._on_batch, call), batches, (None, _NO_TIME_LIMIT))
            rows += latencies + rates
            frames += [frame, *searched]
        return rows, frames

    def _on_batch(self, call: Callable[[Tensor], object], size: int | None = None) -> Callable[[], object]:
        batch = self.batch(size)
        return lambda: call(batch)

    def _in_alternation(self, calls: Mapping[str, tuple[str, Callable[[], object]]]) -> Found:
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
    """Measure the language model in PyTorch: the original and each scheme."""
    storage = FORMATS[options.dtype].storage
    material = _Material(context, options, trained, EAGER, context.device, options.dtype)
    original = trained.load(context.device, storage)
    scores = material.score(original)
    weights = [linear.weight for linear in block_linears(original).values()]
    stored, computed = sum(weight.nbytes for weight in weights), sum(weight.numel() for weight in weights) * storage.itemsize
    path = _save(original, context.workspace / "original.safetensors")
    rows = [material.quality_row(ORIGINAL, options.dtype, scores, scores)]
    rows += material.byte_rows(ORIGINAL, options.dtype, stored, computed, path)
    variants: dict[str, tuple[str, Callable[[Tensor], object]]] = {ORIGINAL: (options.dtype, original)}
    for done, scheme in enumerate(SCHEMES):
        report(done, len(SCHEMES) + 2, scheme.name)
        reason = scheme.why_absent(context.device)
        if not reason:
            try:
                model = trained.load(context.device, storage)
                originals = replace_linears(model, scheme, context.device)
                rows += _scheme_rows(material, scheme, model, originals, scores)
                variants[scheme.name] = (scheme.dtype, model)
            except (torch.AcceleratorError, torch.OutOfMemoryError):
                raise
            except RuntimeError as error:
                # `why_absent` found nothing missing, so this is a fault, which the chapter reports. The other schemes still run.
                reason = f"{UNEXPECTED}{(str(error).splitlines() or ['no message'])[0]}"
        if reason:
            rows.append(context.absent_row(scheme.name, "weight_bytes", reason, **material.columns(scheme.dtype)))
    with torch.inference_mode():
        timed, frames = material.time_rows(variants)
    return rows + timed, frames


def _scheme_rows(
    material: _Material, scheme: Scheme, model: nn.Module, originals: dict[str, Tensor], original: Scores
) -> list[Row]:
    """Return the rows of a quantised language model, except those with its time.

    Args:
        model: the quantised model.
        originals: the original weights, by the names of their layers.
        original: scores of the original model.
    """
    layers = {name: model.get_submodule(name) for name in originals}
    # Save the model before its first call, because bitsandbytes moves tensors in this call.
    path = _save(model, material.context.workspace / "quantised.safetensors")
    computed = sum(scheme.weight_bytes(*weight.shape) for weight in originals.values())
    rows = material.byte_rows(scheme.name, scheme.dtype, weight_bytes_of(layers.values()), computed, path)
    rows += _error_rows(material, scheme, model, layers, originals)
    rows.append(material.quality_row(scheme.name, scheme.dtype, material.score(model), original))
    layer, weight = next(iter(layers.values())), next(iter(originals.values()))
    inputs = weight.new_ones(material.batch_size, weight.shape[1], dtype=FORMATS[material.dtype].storage)
    kernel = what_ran(lambda: layer(inputs), material.device)
    kinds = {type(layer).__name__ for layer in layers.values()}
    columns = material.columns(scheme.dtype, what="quantised layers", module="+".join(sorted(kinds)), kernel=kernel)
    check = checked("layers that are still nn.Linear", sum(type(one) is nn.Linear for one in layers.values()), 0)
    return [*rows, material.context.row(scheme.name, "count", len(layers), **columns, **check)]


def _error_rows(
    material: _Material, scheme: Scheme, model: nn.Module, layers: dict[str, nn.Module], originals: dict[str, Tensor]
) -> list[Row]:
    """Return rows that compare each quantised layer with its float64 original, for the inputs that it receives in the model."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def remember(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[layer] = inputs[0].detach().clone(), output.detach().clone()

    handles = [layer.register_forward_hook(remember) for layer in layers.values()]
    with torch.inference_mode():
        model(material.batch()[:2])
    for handle in handles:
        handle.remove()
    of_weight = [stored_error(scheme, originals[name], layer) for name, layer in layers.items()]
    of_output = [output_error(scheme, originals[name], *seen[layer]) for name, layer in layers.items()]
    rows = []
    for what, found in (("stored weights", of_weight), ("output of a layer", of_output)):
        error, ratio = max(error for error, _ in found), largest_error(ratio for _, ratio in found)
        rows.append(material.error_row(scheme.name, scheme.dtype, error, ratio, what=what, layers=len(layers)))
    return rows


def _in_onnx(context: Context, options: QuantizationOptions, trained: TrainedModel) -> Found:
    """Measure a model with ONNX Runtime's CPU provider: the original and each kind of int8 quantisation."""
    material = _Material(context, options, trained, ORT, detect_cpu(), "fp32")
    language = trained.kind == LANGUAGE
    kinds = _KINDS_FOR_LANGUAGE if language else onnx_int8.KINDS
    if reason := why_no_onnx():
        columns = material.columns("int8")
        return [context.absent_row(kind, "weight_bytes", reason, **columns) for kind in kinds], []
    folder, batch = context.workspace, material.batch()
    model: Any = trained.load(material.device)
    calibration = [one for one in trained.calibration(material.device).split(len(batch)) if len(one) == len(batch)]
    # The head of the language model shares its weights with the embedding, so it stays in float32, as in PyTorch.
    head = model.lm.lm_head.out_features if language else 0
    products = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear | nn.Conv2d)}
    shapes = [tuple(one.weight.shape) for name, one in products.items() if not name.endswith("lm_head")]
    source = onnx_int8.export(model, batch, folder / f"{trained.kind}.onnx")
    sessions = {ORIGINAL: Session(source)}
    scores = material.score(sessions[ORIGINAL])
    rows = [material.quality_row(ORIGINAL, "fp32", scores, scores)]
    for number, kind in enumerate(kinds):
        target = onnx_int8.quantise(kind, source, folder / f"{trained.kind}-{number}.onnx", calibration, head)
        session = sessions[kind] = Session(target)
        nodes = session.executed(batch)
        calls_of = Counter(operator for operator, _ in nodes)
        ran = {operator: calls_of[operator] for operator in onnx_int8.INTEGER_PRODUCTS if calls_of[operator]}
        provider = "+".join(sorted({provider for _, provider in nodes}))
        columns = material.columns("int8", what="quantised layers", provider=provider, operators=ran)
        check = checked("products that did not run on integers", abs(sum(ran.values()) - len(shapes)), 0)
        rows.append(context.row(kind, "count", sum(ran.values()), **columns, **check))
        rows.append(material.quality_row(kind, "int8", material.score(session), scores))
        stored, computed = onnx_int8.stored_weight_bytes(target), onnx_int8.weight_bytes(kind, shapes)
        rows += material.byte_rows(kind, "int8", stored, computed, target)
    rows += _onnx_error_rows(material, model, kinds)
    timed, frames = material.time_rows({name: ("fp32" if name == ORIGINAL else "int8", one) for name, one in sessions.items()})
    return rows + timed, frames


def _onnx_error_rows(material: _Material, model: nn.Module, kinds: tuple[str, ...]) -> list[Row]:
    """Return rows that compare a single layer with its float64 original, for inputs that it receives in the model.

    The layer is the last linear layer of the last block, or the last 3x3 convolution. It is exported and quantised without the
    rest of the model.
    """
    linears = list(block_linears(model).values())
    convolutions = [one for one in model.modules() if isinstance(one, nn.Conv2d) and one.kernel_size == (3, 3)]
    layer = linears[-1] if linears else convolutions[-1]

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    captured: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0].detach().clone()))
    with torch.no_grad():
        model(material.trained.calibration(material.device)[: material.batch_size])
        model(material.batch())
    handle.remove()
    calibration, x = captured
    weight = layer.weight.detach()
    exact = product(x.double(), weight.double())
    source = onnx_int8.export(layer, x, material.context.workspace / "layer.onnx")
    rows = []
    for kind in kinds:
        target = onnx_int8.quantise(kind, source, source.with_name("layer-int8.onnx"), [calibration])
        ranges = onnx_int8.dynamic_ranges(x) if kind == onnx_int8.DYNAMIC else onnx_int8.static_ranges(target)
        roundoff = weight[0].numel() * torch.finfo(torch.float32).eps
        dw = onnx_int8.weight_error(kind, weight)
        bound = output_bound(product, x, weight, ranges.input_error(x), dw, roundoff) + ranges.output_error(exact)
        error = (Session(target)(x).double() - exact).abs()
        relative, ratio = (error.norm() / exact.norm()).item(), (error / bound).max().item()
        rows.append(material.error_row(kind, "int8", relative, ratio, what="output of a layer", layers=1))
    return rows


def _save(model: nn.Module, path: Path) -> Path:
    """Write all tensors of a model to a file, and return the path of the file. A tensor with two names is written only once."""
    tensors: dict[tuple, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            tensors.setdefault((tensor.data_ptr(), tensor.shape) if tensor.numel() else (name,), (name, tensor))
    save_file({name: tensor.contiguous() for name, tensor in tensors.values()}, path)
    return path
