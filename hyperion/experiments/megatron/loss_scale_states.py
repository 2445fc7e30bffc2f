"""How does megatron-core's dynamic loss scale react to overflows and to clean steps?

The adaptation guide uses an initial scale of 4096, a minimum of 1, and a window of 1000 steps.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.variants import run_variant
from hyperion.parallel.megatron.release import adapted_copy, use_adapted, why_unavailable

INITIAL, MINIMUM, WINDOW = 4096.0, 1.0, 1000
# For each scenario: its events as (overflow, number of steps), and the final scale if every overflow halves the scale.
SCENARIOS: dict[str, tuple[tuple[tuple[bool, int], ...], float]] = {
    "no step": ((), 4096.0),
    "one overflow": (((True, 1),), 2048.0),
    "three overflows": (((True, 3),), 512.0),
    "999 clean steps": (((False, 999),), 4096.0),
    "1000 clean steps": (((False, 1000),), 8192.0),
    "999 clean steps, an overflow, 999 clean steps": (((False, 999), (True, 1), (False, 999)), 2048.0),
    "an overflow, 1000 clean steps, an overflow": (((True, 1), (False, 1000), (True, 1)), 2048.0),
    "100 overflows": (((True, 100),), 1.0),
}

_DEFAULT_HYSTERESIS = 2


class LossScaleOptions(Options):
    """Options of `loss_scale_states`.

    Args:
        hysteresis: values of megatron-core's option `hysteresis`, whose default is 2. With the value n, the n-th overflow is the
            first one that halves the scale.
    """

    hysteresis: tuple[int, ...]


def forecast(context: Context) -> list[Forecast]:
    """Predict that each overflow halves the scale, as the guide says.

    The reader is asked to guess the first prediction. It is that of one overflow with the default hysteresis of megatron-core.
    """
    options = LossScaleOptions.of(context)
    basis = "an overflow halves the scale, 1000 clean steps double it, and it is at least 1"
    forecasts = [
        Forecast(name, "loss_scale", scale, basis, params=_params(hysteresis))
        for hysteresis in options.hysteresis
        for name, (_, scale) in SCENARIOS.items()
    ]
    asked = "one overflow", _params(_DEFAULT_HYSTERESIS)
    return sorted(forecasts, key=lambda forecast: (forecast.variant, forecast.params) != asked)


def run(context: Context, report: Report) -> Result:
    """Run all scenarios in a separate process."""
    if reason := why_unavailable():
        rows = [
            context.absent_row(name, "loss_scale", reason, params=_params(hysteresis))
            for hysteresis in LossScaleOptions.of(context).hysteresis
            for name in SCENARIOS
        ]
        return Result(rows, pd.DataFrame())
    adapted_copy()
    return run_variant(context, report, drive_scaler)


EXPERIMENT = Experiment(forecast, run, options=LossScaleOptions)


def drive_scaler(context: Context, report: Report) -> Result:
    """Run all scenarios with megatron-core's scaler. The check compares the final scale with `expected_scale`."""
    use_adapted()
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler  # pyright: ignore[reportMissingImports]

    rows = []
    for hysteresis in LossScaleOptions.of(context).hysteresis:
        for name, (events, _) in SCENARIOS.items():
            scaler = DynamicGradScaler(INITIAL, MINIMUM, 2.0, 0.5, WINDOW, hysteresis)
            for overflow, steps in events:
                for _ in range(steps):
                    scaler.update(overflow)
                # A checkpoint between two events must change nothing.
                restored = DynamicGradScaler(INITIAL, MINIMUM, 2.0, 0.5, WINDOW, hysteresis)
                restored.load_state_dict(scaler.state_dict())
                scaler = restored
            found, expected = float(scaler.scale), expected_scale(events, hysteresis)
            check = {
                "check": "the rules of the scaler, written again",
                "check_error": abs(found - expected),
                "check_tolerance": 0.0,
            }
            rows.append(context.row(name, "loss_scale", found, params=_params(hysteresis), **check))
    return Result(rows, pd.DataFrame())


def expected_scale(events: tuple[tuple[bool, int], ...], hysteresis: int) -> float:
    """Return the loss scale after a sequence of events.

    The scaler tolerates `hysteresis` - 1 overflows. After that, each overflow halves the scale. `WINDOW` clean steps in a row
    double the scale and reset the count of tolerated overflows.

    Args:
        events: (overflow, number of steps), in order.
        hysteresis: number of overflows until the scale is halved.
    """
    scale, clean, tolerance = INITIAL, 0, hysteresis
    for overflow, steps in events:
        for _ in range(steps):
            if overflow:
                clean, tolerance = 0, tolerance - 1
                scale = max(MINIMUM, scale / 2) if tolerance <= 0 else scale
            elif (clean := clean + 1) == WINDOW:
                scale, clean, tolerance = 2 * scale, 0, hysteresis
    return scale


def _params(hysteresis: int) -> dict:
    return {"hysteresis": hysteresis, "initial": INITIAL, "minimum": MINIMUM, "window": WINDOW}
