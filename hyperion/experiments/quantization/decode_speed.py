"""How fast can one sequence be decoded, and how close is this to reading all weights once per token?

To decode one token of one sequence, the device reads every weight and uses it for a single multiply-add. So the minimum time per
token is the size of the weights and the cache, divided by the memory bandwidth. Fewer bytes per weight reduce this time.
"""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import (
    all_samples,
    bandwidth_limit,
    checked,
    out_of_memory_reason,
    sample_frame,
    speedup_row,
    stream_ceiling,
    timed_row,
)
from hyperion.experiments.quantization.decoder import CAPTURED, COMPILED, EAGER, MODES, StaticDecoder, tokens_of_plain_forward
from hyperion.experiments.quantization.layer_checks import stored_tensors
from hyperion.experiments.quantization.quantized_linears import SCHEMES, Scheme, replace_linears
from hyperion.hardware import Device
from hyperion.measure import FORMATS, Timing, Verification, bytes_of, largest_error, matmul_precision, time_interleaved
from hyperion.models import LlamaShape, random_llama_shape
from hyperion.models.llama import build_random_llama, layer_shapes
from hyperion.results import Row
from hyperion.training import seed_everything
from hyperion.workloads.datasets import TEXT
from hyperion.workloads.fine_tuning import shape_of
from hyperion.workloads.trained_models import LANGUAGE_MODELS, trained_language_model

ORIGINAL = "original"
_COPY = "copy"
VOCABULARY = 32000  # of the random Llama, as in Llama 2
# Number of roundings in a layer that change its output, the residual stream.
_ROUNDINGS = 8
_DEVIATIONS = 4


class DecodeSpeedOptions(Options):
    """Options for the `decode_speed` experiment.

    Args:
        trained_model: name of a trained language model, see `hyperion.workloads.trained_models`.
        random_model: name of a Llama with random weights. It is as fast as a trained Llama of the same shape. None omits it.
        dtype: number format of the original weights, the cache and the arithmetic.
        schemes: names of the quantisation schemes.
        prompt_tokens: number of tokens in the prompt.
        new_tokens: number of tokens that a timed decode generates.
        positions: number of positions in the cache. All of them are read for each token.
        time_limit_s: seconds of timing for each variant.
    """

    trained_model: str
    random_model: str | None = None
    dtype: str
    schemes: tuple[str, ...]
    prompt_tokens: int
    new_tokens: int
    positions: int
    time_limit_s: float

    def variants(self) -> list["_Variant"]:
        """Return all variants of all models. The original weights come first."""
        shapes = {self.trained_model: LANGUAGE_MODELS[self.trained_model].shape}
        if self.random_model:
            shapes[self.random_model] = random_llama_shape(self.random_model, VOCABULARY)
        schemes = (None, *(scheme for scheme in SCHEMES if scheme.name in self.schemes))
        return [_Variant(self, model, shape, scheme) for model, shape in shapes.items() for scheme in schemes]


@dataclass(frozen=True)
class _Variant:
    """A model with its original weights or with quantised weights.

    Args:
        options: options of the experiment.
        model: name of the model.
        shape: shape of the model according to its name.
        scheme: quantisation scheme, or None for the original weights.
    """

    options: DecodeSpeedOptions
    model: str
    shape: LlamaShape
    scheme: Scheme | None

    @property
    def name(self) -> str:
        """Name of the variant in rows."""
        return self.scheme.name if self.scheme else ORIGINAL

    def columns(self, mode: str) -> dict:
        """Return the columns that the rows of a mode share."""
        options = self.options
        params = {"model": self.model, "mode": mode, "positions": options.positions, "new_tokens": options.new_tokens}
        params["cache"] = "hot"
        return {"dtype": self.scheme.dtype if self.scheme else self.options.dtype, "params": params}

    def modes(self, device: Device) -> tuple[str, ...]:
        """Return the modes in which the variant is timed.

        On a CPU, only eager mode is timed: a CPU has no graphs, and in the profile `smoke` compilation takes longer than all
        decodes. The kernels of bitsandbytes need no compilation. The quantised layers of this library do, because only a compiler
        fuses the conversion of the weights with the product.
        """
        if device.kind == "cpu":
            return (EAGER,)
        if self.scheme is None:
            return MODES
        return (CAPTURED,) if self.scheme.dtype == "nf4" else (COMPILED,)

    def step_bytes(self, shape: LlamaShape) -> int:
        """Return the bytes that a decoding step must read from a model of this shape.

        These are the weights of all layers, norms and the head, and the whole cache. A step also reads one row of the embedding,
        but this row is not counted.
        """
        size = FORMATS[self.options.dtype].bytes
        L, D = shape.num_hidden_layers, shape.hidden_size
        layers = layer_shapes(shape).values()
        linear = sum(self.scheme.weight_bytes(n, k) if self.scheme else n * k * size for k, n in layers)
        head = D // shape.num_attention_heads
        cache = 2 * L * self.options.positions * shape.num_key_value_heads * head * size
        return L * linear + size * (shape.vocab_size * D + (2 * L + 1) * D) + cache


def forecast(context: Context) -> list[Forecast]:
    """Predict the time per token: the bytes of weights and cache, divided by the measured bandwidth of a copy."""
    options, copy_gb_s = DecodeSpeedOptions.of(context), _copy_gb_s(context)
    forecasts = []
    for variant in options.variants():
        bytes_read = variant.step_bytes(variant.shape)
        if copy_gb_s:
            estimate = bytes_read / (copy_gb_s * 1e9)
            basis = f"{bytes_read / 1e6:,.1f} MB of weights and cache at the measured {copy_gb_s:.4g} GB/s of a copy"
        else:
            estimate, basis = None, "no estimate: this run has no measured copy bandwidth (chapter 1.1)"
        columns = variant.columns(variant.modes(context.device)[-1])
        forecasts.append(Forecast(variant.name, "decode_time_s", estimate, basis, **columns))
    return forecasts[::-1] if options.random_model else forecasts


def run(context: Context, report: Report) -> Result:
    """Time decoding with the original weights and with quantised weights.

    The decoded tokens are verified with a forward pass over the whole sequence, without a cache.
    """
    options = DecodeSpeedOptions.of(context)
    variants = options.variants()
    rows, frames, source = [], [], ""
    for done, variant in enumerate(variants):
        report(done, len(variants), f"{variant.model}, {variant.name}")
        reason = variant.scheme.why_absent(context.device) if variant.scheme else ""
        if not reason:
            try:
                with matmul_precision(FORMATS[options.dtype]):
                    lm, prompt, source = _model(context, options, variant.model)
                    if variant.scheme:
                        replace_linears(lm, variant.scheme, context.device)
                    new_rows, new_frames = _measure(context, variant, lm, prompt)
                rows += new_rows
                frames += new_frames
            except torch.OutOfMemoryError as error:
                reason = out_of_memory_reason(error)
        if reason:
            rows.append(context.absent_row(variant.name, "decode_time_s", reason, **variant.columns(MODES[0])))
    report(len(variants), len(variants), "done")
    return Result(rows, all_samples(frames), source)


EXPERIMENT = Experiment(forecast, run, options=DecodeSpeedOptions, reads=("bandwidth",), data=TEXT)


def bytes_of_step(decoder: StaticDecoder) -> int:
    """Return the bytes that a decoding step reads, added up over the actual tensors of the model and the decoder."""
    total = bytes_of([decoder.lm.lm_head.weight, decoder.lm.model.norm.weight])
    for block in decoder.blocks:
        leaves = [module for module in block.modules() if module is not block and not list(module.children())]
        # Count the tensors of each layer separately, because layers may share the lookup table of a number format.
        total += sum(bytes_of(stored_tensors(leaf)) for leaf in leaves) + bytes_of([block.keys_KSH, block.values_KSH])
    return total


def _measure(context: Context, variant: _Variant, lm: Any, prompt: list[int]) -> tuple[list[Row], list[pd.DataFrame]]:
    """Time a model in all modes in alternation, and verify the tokens of each mode."""
    options = variant.options
    decoders = {mode: StaticDecoder(lm, options.positions, context.device, mode) for mode in variant.modes(context.device)}

    def decode(decoder: StaticDecoder) -> None:
        decoder.rewind(len(prompt))
        decoder.continue_(options.new_tokens)

    for decoder in decoders.values():
        decoder.decode(prompt, 0)
    calls = [lambda one=one: decode(one) for one in decoders.values()]
    found = time_interleaved(calls, context.device, cold=False, time_limit_s=options.time_limit_s * len(calls))
    timings = {mode: timing.per_call(options.new_tokens) for mode, timing in zip(decoders, found, strict=True)}
    bytes_read, rows, frames = variant.step_bytes(shape_of(lm)), [], []
    for mode, timing in timings.items():
        check = _verified(decoders[mode], options, len(prompt))
        columns = variant.columns(mode)
        rows += _time_rows(context, variant.name, timing, check, bytes_read, columns)
        if mode != EAGER and EAGER in timings:
            why = "no limit: the same arithmetic, launched in another way"
            rows.append(speedup_row(context, f"{variant.name}, {mode}", timing, timings[EAGER], why, check, **columns))
        frames.append(sample_frame(timing, variant.name, **columns))
    counted = bytes_of_step(next(iter(decoders.values())))
    check = checked("bytes computed from shapes and format", abs(counted - bytes_read), 0)
    columns = variant.columns("any")
    columns["params"] |= {"what": "weights and cache that a step reads"}
    return [*rows, context.row(variant.name, "weight_bytes", counted, **columns, **check)], frames


def _time_rows(context: Context, variant: str, timing: Timing, check: Verification, bytes_read: int, columns: dict) -> list[Row]:
    """Return the rows with the time per token, and with the decoder's bandwidth as a share of the copy bandwidth."""
    ceiling, source = bandwidth_limit(context.device, bytes_read)
    least_s = None if ceiling is None else bytes_read / (ceiling * 1e9)
    rows = [timed_row(context, variant, "decode_time_s", timing.estimate, timing, check, (least_s, source), **columns)]
    copy_gb_s = _copy_gb_s(context)
    if not copy_gb_s:
        reason = "no share: this run has no measured copy bandwidth (chapter 1.1)"
        return [*rows, context.absent_row(variant, "decode_bandwidth_share", reason, **columns)]
    share = timing.estimate.map(lambda seconds: bytes_read / seconds / (copy_gb_s * 1e9))
    limit = (None, source) if ceiling is None else (ceiling / copy_gb_s, f"{source}, over the measured copy")
    return [*rows, timed_row(context, variant, "decode_bandwidth_share", share, timing, None, limit, **columns)]


def _verified(decoder: StaticDecoder, options: DecodeSpeedOptions, prompt_length: int) -> Verification:
    """Compare the tokens and the last logits of the last timed decode with a forward pass without a cache.

    In fp32, every token must be the most probable one in the forward pass. In a 16-bit format, the logit of a token may be below
    the largest logit by as much as rounding can explain. In both cases, the last logits must also be equal up to rounding. A
    comparison of tokens alone would not detect a wrong cache if the model repeats one token.
    """
    end = prompt_length + options.new_tokens
    best, logits = tokens_of_plain_forward(decoder.lm, decoder.tokens_S[:end], prompt_length)
    tokens = decoder.tokens_S[prompt_length:end]
    below = (logits.amax(-1) - logits.gather(-1, tokens[:, None])[:, 0]).max().item()
    if options.dtype == "fp32" and not torch.equal(best, tokens):
        below = float((best != tokens).sum().item())  # at least 1, which is far above the tolerance
    of_logits = (decoder.logits_1V[0].float() - logits[-1]).abs().max().item()
    return Verification(
        "tokens and last logits of a plain forward pass", largest_error([below, of_logits]), _logit_rounding(decoder, logits)
    )


def _logit_rounding(decoder: StaticDecoder, logits: Tensor) -> float:
    """Return how much the difference of two logits can change if the same arithmetic is done in another order.

    A layer rounds the residual stream `_ROUNDINGS` times. The relative error of a rounding is uniformly distributed from -u to u,
    where u is the unit roundoff. Its standard deviation is u / sqrt(3). The errors of both passes and of both logits add up like
    a random walk. In 16-bit formats, sums are accumulated in float32. In float32, each term of a sum adds one more rounding. The
    result is four standard deviations plus the spacing of the number format at the largest logit.
    """
    weight = decoder.lm.lm_head.weight
    half_unit = torch.finfo(weight.dtype).eps / 2
    terms = decoder.lm.config.intermediate_size if weight.dtype == torch.float32 else 1
    roundings = _ROUNDINGS * len(decoder.blocks) * terms
    walk = half_unit / math.sqrt(3) * math.sqrt(roundings * 2 * 2) * logits.std().item()
    return _DEVIATIONS * walk + 2 * half_unit * logits.abs().max().item()


def _model(context: Context, options: DecodeSpeedOptions, name: str) -> tuple[Any, list[int], str]:
    """Return (the transformers model, the prompt, the data source)."""
    device, storage = context.device, FORMATS[options.dtype].storage
    if name == options.trained_model:
        trained = trained_language_model(context, name)
        prompt = trained.held_out(device)[0][0, : options.prompt_tokens].tolist()
        return trained.load(device, storage).get_submodule("lm"), prompt, trained.source
    seed_everything(context.seed)
    lm = build_random_llama(name, VOCABULARY, storage, device.torch_device)
    prompt = torch.randint(VOCABULARY, (options.prompt_tokens,)).tolist()
    return lm.eval().requires_grad_(False), prompt, ""


def _copy_gb_s(context: Context) -> float | None:
    """Return the bandwidth of the fastest copy of the largest arrays, as measured in this run, or None if there is none."""
    copy = stream_ceiling(row for row in context.upstream if row.variant == _COPY)
    return copy.value if copy else None
