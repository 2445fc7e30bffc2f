"""Does it matter for the speed of a product which numbers it multiplies, and if so, by what?

The same product with five kinds of data, timed twice. In turn, call by call, all of them meet the same clock: what differs
then is the arithmetic. Alone, each has the device for itself until its own power has settled the clock: what differs only
then is what the clock was allowed to be. Caches are warm both times: units that work, not memory, are the subject.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.product_rows import absent_product, product_row, roofline_tflops
from hyperion.chapter.rows import out_of_memory_reason, sample_frame, timed_columns
from hyperion.measure import DISTRIBUTIONS, Gemm, Timing, energy_of, format_of, matmul_precision, time_function, time_interleaved
from hyperion.measure.clock.timing import MINIMUM_SAMPLES, device_clock
from hyperion.measure.products.operands import ACTIVATIONS
from hyperion.models import TransformerLM, named_config
from hyperion.results import Row, independent_ratio_estimate, ratio_estimate

DATA = (*DISTRIBUTIONS, ACTIVATIONS)
USUAL = "normal"
IN_TURN, ALONE = "in turn", "alone"
# The head and its vocabulary do nothing to what a layer before them is fed.
_VOCABULARY, _SEQUENCES = 512, 8
_CALLS_AT_ONCE = 8
# Only what took turns is a speed-up; two rates taken one after the other have a ratio, and a drift in it.
_RATIO = {IN_TURN: "speedup", ALONE: "rate_ratio"}
_NO_LIMIT = {
    IN_TURN: "no limit: how far the usual data stay below their own limit is not bounded",
    ALONE: "no limit: each at the clock that its own power left it, one after the other, a drift between them included",
}


def forecast(context: Context) -> list[Forecast]:
    """A roofline knows FLOPs and bytes, not numbers: the same rate for all data, and ratios of 1."""
    dtype, size = context.sizes["dtype"], context.sizes["size"]
    if not context.device.supports(dtype)[0]:
        return []
    name = format_of(dtype, context.device).name
    estimate, basis = roofline_tflops(context.device, dtype, size, size, size)
    same = "roofline: as many FLOPs and bytes, whatever the numbers are"
    ratios = [
        Forecast(variant=data, metric=_RATIO[timed], estimate=1.0, basis=same, dtype=name, params=_ratio_params(context, timed))
        for timed in (ALONE, IN_TURN)
        for data in DATA
        if data != USUAL
    ]
    rates = [
        Forecast(variant=data, metric="gemm_tflops", estimate=estimate, basis=basis, dtype=name, params=_params(context, timed))
        for timed in (ALONE, IN_TURN)
        for data in DATA
    ]
    return ratios + rates


def run(context: Context, report) -> Result:
    """Make the five products, time them in turn and each alone, verify them, and compare each with normal data."""
    dtype = context.sizes["dtype"]
    supported, how = context.device.supports(dtype)
    if not supported:
        return Result(_absent(context, dtype, f"unsupported: {how}"), pd.DataFrame())
    name, limit_s = format_of(dtype, context.device).name, context.sizes["time_limit_s"]
    timings: dict[str, dict[str, Timing]] = {}
    try:
        report(0, len(DATA) + 1, "operands")
        products = make_products(context)
        with matmul_precision(products[USUAL].format):
            report(0, len(DATA) + 1, "all in turn")
            taken = time_interleaved(list(products.values()), context.device, cold=False, time_limit_s=limit_s)
            timings[IN_TURN] = dict(zip(products, taken, strict=True))
            timings[ALONE] = {}
            for done, (data, product) in enumerate(products.items(), 1):
                report(done, len(DATA) + 1, f"{data} alone")
                timings[ALONE][data] = _timed_alone(context, product, timings[IN_TURN][data].estimate.value)
    except torch.OutOfMemoryError as error:
        return Result(_absent(context, name, out_of_memory_reason(error)), pd.DataFrame())
    report(len(DATA) + 1, len(DATA) + 1, "done")
    rows = [*_rate_rows(context, products, timings), *_ratio_rows(context, name, timings)]
    rows += _energy_rows(context, products, timings)
    frames = [
        sample_frame(timing, data, name, _params(context, timed))
        for timed, series in timings.items()
        for data, timing in series.items()
    ]
    return Result(rows, pd.concat(frames, ignore_index=True))


EXPERIMENT = Experiment(forecast, run)


def make_products(context: Context) -> dict[str, Gemm]:
    """One product for each kind of data, by its name; it declares what it holds, and its verification looks whether it does."""
    dtype, size = context.sizes["dtype"], context.sizes["size"]
    made = {data: Gemm(size, size, size, dtype, context.device, seed=context.seed, data=data) for data in DISTRIBUTIONS}
    return made | {ACTIVATIONS: Gemm.of(*layer_operands(context), dtype, context.device)}


@torch.no_grad()
def layer_operands(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """What the second layer of an MLP multiplies in a forward pass over random tokens: its input and its transposed weight.

    The model is untrained: its weights are those of its initialisation. Both are repeated or cut to squares of the product.
    """
    size, device = context.sizes["size"], context.device.torch_device
    config = replace(named_config(context.sizes["model"]), vocab_size=_VOCABULARY)
    torch.manual_seed(context.seed)
    with torch.device(device):
        model = TransformerLM(config)
        sequences = min(_SEQUENCES, math.ceil(size / config.context))
        tokens_BT = torch.randint(_VOCABULARY, (sequences, config.context))
    layer, inputs = model.blocks[config.layers // 2].mlp.down, []
    layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].flatten(0, 1)))
    model(tokens_BT)
    return _squared(inputs[0], size), _squared(layer.weight.T, size)


def _squared(matrix: torch.Tensor, size: int) -> torch.Tensor:
    return matrix.repeat(*(math.ceil(size / length) for length in matrix.shape))[:size, :size]


def _timed_alone(context: Context, product: Gemm, call_s: float) -> Timing:
    """Calls of one product for as long as power needs to settle, then timed for as long as it needs to be read."""
    clock, sizes = device_clock(context.device), context.sizes
    settled = clock.now() + sizes["settle_s"]
    while clock.now() < settled:
        clock.in_a_row(product, _CALLS_AT_ONCE)
    samples = max(MINIMUM_SAMPLES, math.ceil(sizes["alone_s"] / call_s))
    return time_function(product, context.device, cold=False, minimum_samples=samples, time_limit_s=sizes["alone_s"])


def _params(context: Context, timed: str) -> dict:
    size = context.sizes["size"]
    return {"m": size, "n": size, "k": size, "cache": "hot", "timed": timed}


def _ratio_params(context: Context, timed: str) -> dict:
    return _params(context, timed) | {"over": USUAL}


def _rate_rows(context: Context, products: dict[str, Gemm], timings: dict[str, dict[str, Timing]]) -> Iterable[Row]:
    verified = {data: product.verify() for data, product in products.items()}
    for timed, series in timings.items():
        for data, timing in series.items():
            product, flops = products[data], products[data].flops
            rate = timing.estimate.map(lambda seconds, flops=flops: flops / seconds / 1e12)
            yield product_row(
                context, data, product.format.name, _params(context, timed), rate, timing, verified[data], product.backend
            )


def _ratio_rows(context: Context, name: str, timings: dict[str, dict[str, Timing]]) -> Iterable[Row]:
    """Speed over that with normal data; in turn sample by sample, so that a drift cancels."""
    for timed, series in timings.items():
        estimate = ratio_estimate if timed == IN_TURN else independent_ratio_estimate
        for data in (data for data in series if data != USUAL):
            ratio = estimate(series[data].samples_s, series[USUAL].samples_s)
            yield context.row(
                data,
                _RATIO[timed],
                ratio.value,
                dtype=name,
                params=_ratio_params(context, timed),
                limit_source=_NO_LIMIT[timed],
                **timed_columns(ratio, series[data]),
            )


def _energy_rows(context: Context, products: dict[str, Gemm], timings: dict[str, dict[str, Timing]]) -> Iterable[Row]:
    """Energy of 10¹² operations with the device for themselves: in turn, one power stands for all of them."""
    for data, timing in timings[ALONE].items():
        energy, params = energy_of(timing), _params(context, ALONE)
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


def _absent(context: Context, dtype: str, reason: str) -> list[Row]:
    return [absent_product(context, data, dtype, _params(context, timed), reason) for timed in (IN_TURN, ALONE) for data in DATA]
