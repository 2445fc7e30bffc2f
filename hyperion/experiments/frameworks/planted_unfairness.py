"""Does the judge detect unequal work? Each run of the plain loop contains one deliberate difference, a planted unfairness.

The losses alone do not reveal all planted differences. For example, a run may use the gradient of the sum of the losses instead
of their mean. This changes no loss, because clipping and AdamW both divide by the scale of the gradient.
"""

import math
from pathlib import Path
from typing import Any

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked
from hyperion.engines import Record, Work, unequal
from hyperion.engines.planted import PLANTED
from hyperion.experiments.frameworks.works import DATA, WorkOptions, loss_difference, prepare_work
from hyperion.processes import Job, process_group, report_progress, run_job

NAMED, UNSEEN, CLEAN = "differences that the judge names", "unfairnesses that the losses do not show", "clean twin"
# Loss difference that rounding can cause over about 20 steps in fp32. The bounds of `framework_parity` are of this size.
VISIBLE_NATS = 1e-5
# Predicted not to change the losses: clipping and AdamW divide by the gradient scale, and counting changes no weight.
_PREDICTED_UNSEEN = (
    "gradient of a sum",
    "micro-batches not averaged",
    "tokens counted per rank",
    "one step less",
    "one step more",
)


def forecast(context: Context) -> list[Forecast]:
    """Predict how many unfairnesses the losses do not reveal."""
    options = WorkOptions.of(context)
    basis = f"losses do not depend on these: {', '.join(_PREDICTED_UNSEEN)}"
    return [Forecast(UNSEEN, "count", len(_PREDICTED_UNSEEN), basis, options.dtype, options.params())]


def run(context: Context, report: Report) -> Result:
    """Train with each planted unfairness in one process, and let the judge compare the records with that of the plain loop.

    The plain loop is also trained a second time without changes (the clean twin). The judge must find no difference there.
    """
    options = WorkOptions.of(context)
    work, source = prepare_work(context, options, micro_batches=2)
    values = {"work": work.as_dict(), "folder": str(context.workspace / "planted")}
    answer = run_job(Job(train_planted, values, timeout_s=options.timeout_s), lambda line: None, on_progress=report)
    records = {name: Record.of(record) for name, record in answer["records"].items()}
    shifted = {int(shift): loss for shift, loss in answer["first"].items()}
    reference = records.pop("")
    shared: dict[str, Any] = {"dtype": options.dtype, "data_source": source}
    rows, lines = [], []
    for name, record in records.items():
        found = unequal(work, record, reference, shifted)
        names = [difference.name for difference in found]
        expected = PLANTED.get(name, "")
        missed = float(expected not in names) if expected else float(len(names))
        params = {"what": NAMED, "expected": expected, "named": "; ".join(map(str, found))}
        check = checked(f"the judge names {expected!r}" if expected else "the judge names nothing", missed, 0)
        difference = loss_difference(record, reference)
        rows.append(context.row(name, "count", len(found), params=params, **shared, **check))
        metric, columns = "unequal_loss_difference", {"params": options.params(), **shared}
        if math.isfinite(difference):
            rows.append(context.row(name, metric, difference, **columns))
        else:
            rows.append(context.absent_row(name, metric, "the loss is no finite number", **columns))
        lines.append({"variant": name, "named": ", ".join(names), "loss_difference": difference})
    unseen = [line["variant"] for line in lines if line["loss_difference"] < VISIBLE_NATS and line["variant"] != CLEAN]
    rows.append(context.row(UNSEEN, "count", len(unseen), params=options.params(), **shared))
    return Result(rows, pd.DataFrame(lines), source)


EXPERIMENT = Experiment(forecast, run, options=WorkOptions, data=DATA)


def train_planted(work: dict, folder: str) -> dict:
    """Train the plain loop with each unfairness in this process.

    Return the records by unfairness, where "" is the reference, and the mean loss of the first step for each label shift.
    """
    from hyperion.engines import plain, planted
    from hyperion.engines.observer import Observer

    what, records = Work.of(work), {}
    names = ["", CLEAN, *PLANTED]
    with process_group():
        for done, name in enumerate(names):
            report_progress(done, len(names), name or "plain loop")
            observer = Observer(what, name, (), Path(folder))
            records[name] = planted.train(what, observer, "" if name == CLEAN else name)
        return {"records": records, "first": plain.first_losses(what, observer.device)}
