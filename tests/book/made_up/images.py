"""Rows and curves of both models' training speed that no machine measured: test data, valid by every rule of a row."""

import math

import numpy as np
import pandas as pd

from hyperion.results import Row
from tests.book.made_up.learning import CORE, step_samples

_STEPS_S = {"hyperion": 0.110, "plain": 0.126}
_CAPTURED_S = 0.124
# Step time and reason of each rung of the language model's ladder.
LADDER = {
    "plain": (0.126, ""),
    "plain, captured": (0.124, ""),
    "plain, bf16 stream": (None, "in fp32 the residual stream is not bfloat16"),
    "plain, loss kernel": (0.116, ""),
    "hyperion": (0.110, ""),
}
_ROOF = {"products_s": 0.078, "optimizer_s": 0.001, "logits_s": 0.003, "activations_s": 0.0092, "roof_s": 0.0912}
_OWN_ROOF = {"products_s": 0.092, "roof_s": 0.1052} | {name: _ROOF[name] for name in ("optimizer_s", "logits_s", "activations_s")}
_RATES = {
    (512, "hyperion"): 8.8e4,
    (512, "plain"): 4.1e4,
    (512, "plain, captured"): 8.6e4,
    (128, "hyperion"): 5.0e4,
    (128, "plain"): 1.1e4,
    (128, "plain, captured"): 4.9e4,
}


def speed_chapters(limited):
    """(notebook, experiment, rows, samples) of both training paths of both models in turn; without ceilings no roof."""
    yield CORE, "image_training_speed", _rows(), _losses((512, 128))
    yield CORE, "language_training_speed", language_speed_rows(limited), _losses((65536,))


def classifier_samples(random, epochs=10):
    """The loss of every step, and two seeds' held-out accuracy by epoch with the seconds of training."""
    curves = [
        {
            "kind": "evaluation",
            "seed": seed,
            "step": 90 * epoch,
            "time_s": 0.6 * epoch,
            "accuracy": 0.94 - 0.6 * math.exp(-epoch / (2 + seed)),
        }
        for seed in range(2)
        for epoch in range(1, epochs + 1)
    ]
    return pd.concat([step_samples(random, 0.1, 900).assign(seed=0), pd.DataFrame(curves)], ignore_index=True)


def time_to_accuracy_row(source):
    """When the first of those seeds came to 93 %."""
    return Row(
        notebook=CORE,
        experiment="image_classifier",
        variant="resnet18",
        dtype="bf16",
        metric="time_to_accuracy_s",
        value=5.4,
        params={"target": 0.93, "split": "held-out train"},
        limit_source="no limit",
        data_source=source,
    )


def _rows():
    common = {"notebook": CORE, "experiment": "image_training_speed", "variant": "resnet18", "dtype": "bf16"}
    rows = [
        Row(
            **common,
            metric="images_per_s",
            value=rate,
            n=30,
            ci_low=0.99 * rate,
            ci_high=1.01 * rate,
            limit=3.2e5,
            limit_source="model FLOPs at the limit",
            params={"batch": batch, "loop": loop, "loader": "included"},
        )
        for (batch, loop), rate in _RATES.items()
    ]
    for batch, over in [(batch, over) for batch in (512, 128) for over in ("plain", "plain, captured")]:
        ratio = _RATES[batch, "hyperion"] / _RATES[batch, over]
        params = {"batch": batch, "loop": "hyperion", "over": over, "compiled": True, "replayed": True}
        rows.append(
            Row(
                **common,
                metric="speedup",
                value=ratio,
                n=30,
                ci_low=0.98 * ratio,
                ci_high=1.02 * ratio,
                params=params,
                limit_source="no limit: a ratio",
            )
        )
    for batch in (512, 128):
        alone = {"what": "of its products alone", "convolutions_s": batch / 1.4e5, "classifier_s": 1e-5}
        for loop in ("hyperion", "plain"):
            share = (batch / 1.4e5 + 1e-5) * _RATES[batch, loop] / batch
            rows.append(Row(**common, metric="share", value=share, params={"batch": batch, "loop": loop} | alone))
    return rows


def language_speed_rows(limited):
    """A step's time in both paths, their ratio, and with ceilings how much of it a roof is."""
    common = {"notebook": CORE, "experiment": "language_training_speed", "variant": "gpt2_124m", "dtype": "bf16", "n": 50}
    base = {"batch": 65536, "loader": "included", "compiled": limited}
    rows, roofs = (
        [],
        [
            _ROOF | {"gemm_tflops": 670.0, "bandwidth_gb_s": 4400.0, "what": "of the step's roof"},
            _OWN_ROOF | {"bandwidth_gb_s": 4400.0, "what": "of the roof of its own products"},
        ],
    )
    steps = _STEPS_S | ({"plain, captured": _CAPTURED_S} if limited else {})
    for loop, seconds in steps.items():
        spread = {"ci_low": 0.99 * seconds, "ci_high": 1.01 * seconds, "limit_source": "no limit: toy"}
        rows.append(Row(**common, metric="step_time_s", value=seconds, params=base | {"loop": loop}, **spread))
        for roof in roofs if limited and loop in _STEPS_S else []:
            share = roof["roof_s"] / seconds
            rows.append(Row(**common, metric="share", value=share, params=base | {"loop": loop} | roof))
    for over in (loop for loop in steps if loop != "hyperion"):
        rows.append(_ratio_row(common, steps[over] / steps["hyperion"], base | {"loop": "hyperion", "over": over}))
    return rows + ladder_rows(common, base)


def ladder_rows(common, base):
    """Each rung's step time or the reason why it has none, and its ratio to the last rung before it that has one."""
    rows, before = [], None
    for rung, (seconds, reason) in LADDER.items():
        params = base | {"rung": rung, "adds": f"what {rung} adds"}
        spread = {"ci_low": 0.99 * seconds, "ci_high": 1.01 * seconds} if seconds else {"n": None}
        columns = common | {"limit_source": "no limit: toy"} | spread
        rows.append(Row(**columns, metric="step_time_s", value=seconds, value_reason=reason, params=params))
        if seconds and before:
            rows.append(_ratio_row(common, LADDER[before][0] / seconds, params | {"over": before}))
        before = rung if seconds else before
    return rows


def _ratio_row(common, ratio, params):
    spread = {"ci_low": 0.99 * ratio, "ci_high": 1.01 * ratio, "limit_source": "no limit: a ratio"}
    return Row(**common, metric="speedup", value=ratio, params=params, **spread)


def _losses(batches):
    step = np.arange(1, 201)
    frames = [
        pd.DataFrame({"kind": "parity", "loop": loop, "batch": batch, "step": step, "loss": 1 + np.exp(-step / 60) + shift})
        for batch in batches
        for loop, shift in (("hyperion", 0.004), ("plain", 0.0))
    ]
    return pd.concat(frames, ignore_index=True)
