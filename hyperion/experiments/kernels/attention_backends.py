"""Which backends of scaled_dot_product_attention accept a call, and why do the others refuse it?

PyTorch chooses a backend silently. If the fast backends refuse, the call still works, but it is slower and needs more memory. The
experiment forces each backend in calls that differ from a plain call in one property, and records PyTorch's reasons.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.experiments.kernels.attention_implementations import BACKENDS, RefusedError, attend, make_inputs, what_ran
from hyperion.results import Row

WHAT = "accepted calls"


class AttentionBackendsOptions(Options):
    """Options for the `attention_backends` experiment.

    Args:
        length: sequence length.
    """

    length: int


@dataclass(frozen=True)
class _Case:
    """A call that differs from a plain call in one property.

    Args:
        dtype: dtype of the tensors.
        heads: number of query heads and number of key-value heads.
        features: number of features of a head.
        causal: if True, the call requests a causal mask.
        options: function of the length and the device that returns further arguments of scaled_dot_product_attention.
    """

    dtype: torch.dtype = torch.bfloat16
    heads: tuple[int, int] = (4, 4)
    features: int = 64
    causal: bool = True
    options: Callable[[int, torch.device], dict] = field(default=lambda length, device: {})


CASES = {
    "plain: bf16, 64 features, causal": _Case(),
    "float32": _Case(dtype=torch.float32),
    "float64": _Case(dtype=torch.float64),
    "80 features": _Case(features=80),
    "65 features": _Case(features=65),
    "320 features": _Case(features=320),
    "grouped heads": _Case(heads=(4, 2)),
    "a mask as a tensor": _Case(
        causal=False,
        options=lambda length, device: {"attn_mask": torch.ones(length, length, dtype=torch.bool, device=device).tril()},
    ),
    "dropout": _Case(options=lambda length, device: {"dropout_p": 0.1}),
}


def forecast(context: Context) -> list[Forecast]:
    """Predict that the "math" backend accepts every call."""
    basis = "the backend math consists of ordinary operators"
    return [Forecast("math", "count", 1.0, basis, params={"what": WHAT, "case": case}) for case in CASES]


def run(context: Context, report: Report) -> Result:
    """Force each backend in each case. The value of a row is 1 if the backend accepted the call and ran, and 0 otherwise."""
    options = AttentionBackendsOptions.of(context)
    rows = []
    for done, (name, case) in enumerate(CASES.items()):
        report(done, len(CASES), name)
        rows += [_row(context, options, backend, name, case) for backend in BACKENDS]
    report(len(CASES), len(CASES), "done")
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=AttentionBackendsOptions)


def _row(context: Context, options: AttentionBackendsOptions, backend: str, name: str, case: _Case) -> Row:
    device = context.device
    sizes = (1, *case.heads, options.length, case.features)
    q, k, v, _ = make_inputs(device, case.dtype, sizes, context.seed)
    extra = case.options(options.length, q.device)
    params = {"what": WHAT, "case": name}
    try:
        ran, kernel = what_ran(lambda: attend(backend, q, k, v, case.causal, **extra), device)
    except RefusedError as error:
        return context.row(backend, "count", 0, params=params | {"reason": str(error)})
    # The backend that ran must be the forced one.
    check = checked("another backend ran", int(ran != backend), 0)
    return context.row(backend, "count", 1, params=params | {"ran": ran, "kernel": kernel}, **check)
