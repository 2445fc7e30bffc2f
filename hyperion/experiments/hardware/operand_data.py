"""Does the speed of a matrix product depend on the numbers that it multiplies, and if so, why?

The same matrix product is timed with five kinds of data, in two ways. First, calls with different data alternate, so that all
kinds run at the same clock; any difference then comes from the arithmetic. Second, each kind is timed alone, after the clock has
settled at the value that its power allows; any further difference then comes from the clock. Caches are warm in both cases,
because this experiment is about arithmetic units, not memory.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_product
from hyperion.chapter.rows import (
    absent_product,
    all_samples,
    out_of_memory_reason,
    product_row,
    sample_frame,
    timed_columns,
    timed_row,
)
from hyperion.measure import DISTRIBUTIONS, Gemm, Timing, energy_of, format_of, matmul_precision, time_function, time_interleaved
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, device_clock
from hyperion.measure.products.gemm import ACTIVATIONS
from hyperion.models import TransformerLM, named_config
from hyperion.results import Row, independent_ratio_estimate, ratio_estimate

DATA = (*DISTRIBUTIONS, ACTIVATIONS)
USUAL = "normal"
IN_TURN, ALONE = "in turn", "alone"
# Vocabulary size and number of sequences. The inputs of a layer do not depend on the size of the vocabulary, and a small
# vocabulary shortens the forward pass.
_VOCABULARY, _SEQUENCES = 512, 8
_CALLS_AT_ONCE = 8
# Metric for the ratio of two rates. Only rates timed in alternation give a speed-up. The ratio of rates timed one after the other
# may include clock drift.
_RATIO = {IN_TURN: "speedup", ALONE: "rate_ratio"}
_NO_LIMIT = {
    IN_TURN: "no limit: how far the usual data stay below their own limit is not bounded",
    ALONE: "no limit: each at the clock that its own power left it, one after the other, a drift between them included",
}

# {IN_TURN or ALONE: {kind of data: timing}}
Timings = dict[str, dict[str, Timing]]


class OperandDataOptions(Options):
    """Options for the `operand_data` experiment.

    Args:
        dtype: number format of the matrix product.
        size: size of the matrix product: M = N = K.
        model: name of the Transformer configuration whose MLP supplies activations and weights as data.
        time_limit_s: timing budget in seconds for the calls that alternate between all kinds of data.
        settle_s: seconds of calls before a kind of data is timed alone, so that the clock settles.
        alone_s: seconds for which each kind of data is timed alone.
    """

    dtype: str
    size: int
    model: str
    time_limit_s: float
    settle_s: float
    alone_s: float

    def params(self, timed: str) -> dict:
        """Return the params of the row with a rate. `timed` is IN_TURN or ALONE."""
        return {"m": self.size, "n": self.size, "k": self.size, "cache": "hot", "timed": timed}

    def ratio_params(self, timed: str) -> dict:
        """Return the params of the row with a ratio. `timed` is IN_TURN or ALONE."""
        return self.params(timed) | {"over": USUAL}


def forecast(context: Context) -> list[Forecast]:
    """Predict the same rate for all kinds of data, and ratios of 1.

    The prediction depends only on the FLOPs and the bytes, which are the same for all data.
    """
    options = OperandDataOptions.of(context)
    dtype, size = options.dtype, options.size
    if not context.device.supports(dtype)[0]:
        return []
    name = format_of(dtype, context.device).name
    expected = expected_product(context, dtype, size, size, size)
    same = "FLOPs and bytes are the same for all data"
    ratios = [
        Forecast(data, _RATIO[timed], 1.0, same, dtype=name, params=options.ratio_params(timed))
        for timed in (ALONE, IN_TURN)
        for data in DATA
        if data != USUAL
    ]
    rates = [expected.forecast(data, "gemm_tflops", name, options.params(timed)) for timed in (ALONE, IN_TURN) for data in DATA]
    return ratios + rates


def run(context: Context, report: Report) -> Result:
    """Time and verify the matrix product with each kind of data, in both ways.

    The rates are compared with the rate for normally distributed data.
    """
    options = OperandDataOptions.of(context)
    supported, how = context.device.supports(options.dtype)
    if not supported:
        return _absent(context, options, options.dtype, f"unsupported: {how}")
    name, steps = format_of(options.dtype, context.device).name, len(DATA) + 1
    timings: Timings = {IN_TURN: {}, ALONE: {}}
    try:
        report(0, steps, "operands")
        products = make_products(context)
        with matmul_precision(products[USUAL].format):
            report(0, steps, "all kinds of data, alternately")
            taken = time_interleaved(list(products.values()), context.device, cold=False, time_limit_s=options.time_limit_s)
            timings[IN_TURN] = dict(zip(products, taken, strict=True))
            for done, (data, product) in enumerate(products.items(), 1):
                report(done, steps, f"{data} alone")
                timings[ALONE][data] = _timed_alone(context, options, product, timings[IN_TURN][data].estimate.value)
    except torch.OutOfMemoryError as error:
        return _absent(context, options, name, out_of_memory_reason(error))
    report(steps, steps, "done")
    rows = [
        *_rate_rows(context, options, products, timings),
        *_ratio_rows(context, options, name, timings),
        *_energy_rows(context, options, products, timings[ALONE]),
    ]
    frames = [
        sample_frame(timing, data, name, options.params(timed))
        for timed, series in timings.items()
        for data, timing in series.items()
    ]
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=OperandDataOptions, forecast_reads=("gemm",))


def make_products(context: Context) -> dict[str, Gemm]:
    """Return a dict that maps the name of each kind of data to a matrix product with such data.

    Verifying a product also checks that its operands contain this kind of data.
    """
    options = OperandDataOptions.of(context)
    shape = options.size, options.size, options.size
    # All synthetic products share a seed and differ only in the distribution of their data.
    products = {data: Gemm(*shape, options.dtype, context.device, seed=context.seed, data=data) for data in DISTRIBUTIONS}
    return products | {ACTIVATIONS: Gemm.of(*layer_operands(context), options.dtype, context.device)}


@torch.no_grad()
def layer_operands(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two operands of the second linear layer of an MLP: its input and its transposed weight.

    The input comes from a forward pass of the untrained model on random tokens. Both operands are tiled or cut to the shape
    [size, size].
    """
    options, device = OperandDataOptions.of(context), context.device.torch_device
    config = replace(named_config(options.model), vocab_size=_VOCABULARY)
    torch.manual_seed(context.seed)
    with torch.device(device):
        model = TransformerLM(config)
        # Use as many sequences as `size` rows of activations need, but at most _SEQUENCES.
        sequences = min(_SEQUENCES, math.ceil(options.size / config.context))
        tokens_BT = torch.randint(_VOCABULARY, (sequences, config.context))
    layer = cast(nn.Linear, model.get_submodule(f"blocks.{config.layers // 2}.mlp.down"))
    inputs: list[torch.Tensor] = []
    # The hook sees the input of the layer, [B, T, 4 D], which becomes a matrix [B T, 4 D].
    layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].flatten(0, 1)))
    model(tokens_BT)
    return _squared(inputs[0], options.size), _squared(layer.weight.T, options.size)


def _squared(matrix: torch.Tensor, size: int) -> torch.Tensor:
    return matrix.repeat(*(math.ceil(size / length) for length in matrix.shape))[:size, :size]


def _timed_alone(context: Context, options: OperandDataOptions, product: Gemm, call_s: float) -> Timing:
    """Call one matrix product until the clock settles, then time it long enough for several power readings."""
    clock = device_clock(context.device)
    settled = clock.now() + options.settle_s
    # The clock needs seconds to settle at the value that the power of these calls allows.
    while clock.now() < settled:
        clock.in_a_row(product, _CALLS_AT_ONCE)
    # Request enough samples to fill `alone_s` seconds, so that the power is read several times.
    samples = max(MINIMUM_SAMPLES, math.ceil(options.alone_s / call_s))
    return time_function(product, context.device, cold=False, minimum_samples=samples, time_limit_s=options.alone_s)


def _rate_rows(context: Context, options: OperandDataOptions, products: dict[str, Gemm], timings: Timings) -> Iterable[Row]:
    verified = {data: product.verify() for data, product in products.items()}
    for timed, series in timings.items():
        for data, timing in series.items():
            product, flops = products[data], products[data].flops
            rate = timing.estimate.map(lambda seconds, flops=flops: flops / seconds / 1e12)
            yield product_row(
                context, data, product.format.name, options.params(timed), rate, timing, verified[data], product.backend
            )


def _ratio_rows(context: Context, options: OperandDataOptions, dtype: str, timings: Timings) -> Iterable[Row]:
    """Yield one row per kind of data: its rate divided by the rate with normally distributed data.

    If the timings alternated, their samples are compared in pairs, so that clock drift cancels.
    """
    for timed, series in timings.items():
        estimate = ratio_estimate if timed == IN_TURN else independent_ratio_estimate
        for data in (data for data in series if data != USUAL):
            ratio = estimate(series[data].samples_s, series[USUAL].samples_s)
            yield timed_row(
                context,
                data,
                _RATIO[timed],
                ratio,
                series[data],
                limit=(None, _NO_LIMIT[timed]),
                dtype=dtype,
                params=options.ratio_params(timed),
            )


def _energy_rows(
    context: Context, options: OperandDataOptions, products: dict[str, Gemm], alone: dict[str, Timing]
) -> Iterable[Row]:
    """Yield one row per kind of data: the energy in joules per 10^12 floating-point operations.

    Only the timings in `alone` are used. Alternating calls would mix the power of different data.
    """
    for data, timing in alone.items():
        energy, params = energy_of(timing), options.params(ALONE)
        estimate, columns = energy.j_per_tflop(products[data].flops), {}
        if estimate is not None:
            columns, params = timed_columns(estimate, timing), params | {"power_of": energy.scope}
        yield context.row(
            data,
            "energy_j_per_tflop",
            None if estimate is None else estimate.value,
            dtype=products[data].format.name,
            params=params,
            value_reason=energy.reason,
            **columns,
        )


def _absent(context: Context, options: OperandDataOptions, dtype: str, reason: str) -> Result:
    cells = [(timed, data) for timed in (IN_TURN, ALONE) for data in DATA]
    rows = [absent_product(context, data, dtype, options.params(timed), reason) for timed, data in cells]
    return Result(rows, all_samples([]))
