"""How far do a framework's defaults change the losses?

The Hugging Face Trainer is configured for work equal to that of the plain loop. Then it trains with one of its own defaults at a
time, and finally with all of them.
"""

from pathlib import Path
from typing import Any

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.engines import Record, Work, unequal
from hyperion.engines.launch import use_one_device
from hyperion.experiments.frameworks.framework_parity import step_frame
from hyperion.experiments.frameworks.works import DATA, WorkOptions, loss_difference, prepare_work
from hyperion.processes import Job, process_group, report_progress, run_job

ALL, EQUAL = "all defaults", "equal work"
# Defaults of the Trainer, as changes to `hyperion.engines.hf_trainer.EQUAL`.
CHANGES: dict[str, dict[str, Any]] = {
    EQUAL: {},
    "betas of its own AdamW": {"optimizer": False},
    "rows are shuffled": {"in_order": False},
    "learning rate decays linearly": {"lr_scheduler_type": "linear"},
    ALL: {"optimizer": False, "in_order": False, "lr_scheduler_type": "linear"},
}


def forecast(context: Context) -> list[Forecast]:
    """Predict the loss difference with all defaults. The prediction counts only the shuffled rows.

    There is no formula for the effect of the falling learning rate, which is larger if the training is short.
    """
    options = WorkOptions.of(context)
    estimate = 0.3 / (options.batch_size * options.sequence_length) ** 0.5 * 10
    basis = "other rows: the loss of a token deviates by about 2 nats, and neighbouring tokens depend on each other"
    return [Forecast(ALL, "unequal_loss_difference", estimate, basis, options.dtype, options.params())]


def run(context: Context, report: Report) -> Result:
    """Train the plain loop, and the Trainer with each default, in one process."""
    options = WorkOptions.of(context)
    work, source = prepare_work(context, options)
    values = {"work": work.as_dict(), "folder": str(context.workspace / "trainer"), "seed": context.seed}
    answer = run_job(Job(train_with_defaults, values, timeout_s=options.timeout_s), lambda line: None, on_progress=report)
    records = {name: Record.of(record) for name, record in answer.items()}
    reference = records["plain loop"]
    rows = []
    for name in CHANGES:
        params = options.params()
        named = "; ".join(map(str, unequal(work, records[name], reference)))
        difference = loss_difference(records[name], reference)
        shared: dict[str, Any] = {"dtype": options.dtype, "data_source": source}
        rows.append(context.row(name, "unequal_loss_difference", difference, params=params, **shared))
        what = {"what": "differences that the judge names", "named": named}
        rows.append(context.row(name, "count", named.count("; ") + bool(named), params=what, **shared))
    return Result(rows, step_frame(records), source)


EXPERIMENT = Experiment(forecast, run, options=WorkOptions, data=DATA)


def train_with_defaults(work: dict, folder: str, seed: int) -> dict:
    """Train the plain loop, and the Trainer with each change, in this process. Return the records by name."""
    import torch

    from hyperion.engines import hf_trainer, plain
    from hyperion.engines.observer import Observer

    use_one_device()
    what, packages = Work.of(work), ("transformers", "accelerate")
    with process_group():
        records = {"plain loop": plain.train(what, Observer(what, "plain loop", packages, Path(folder)))}
        for done, (name, changed) in enumerate(CHANGES.items()):
            report_progress(done, len(CHANGES), name)
            torch.manual_seed(seed)  # for the shuffling
            records[name] = hf_trainer.train(what, Observer(what, name, packages, Path(folder)), changed)
    return records
