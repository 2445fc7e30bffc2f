"""Sentences about what a step on several devices spends its time on. All numbers in the sentences come from measured rows."""

from collections.abc import Iterable

from hyperion.errors import not_none
from hyperion.experiments.scaling.figures import LEAST_EXPOSED, busy_shares, exposed_rows, host_bound_steps
from hyperion.figures.material import measured, percent, select
from hyperion.results import Row


def parts_of_the_step(rows: Iterable[Row], efficiency: Row) -> list[str]:
    """Return sentences on the idle time and the communication of the step to which an efficiency belongs.

    Args:
        rows: rows of the experiment `scaling`.
        efficiency: row with the efficiency of a training workload in one scaling mode on a number of devices.
    """
    step = {name: efficiency.params[name] for name in ("mode", "ranks")}
    own = [row for row in select(measured(rows), variant=efficiency.variant) if step.items() <= row.params.items()]
    sentences = []
    bound = host_bound_steps(own)
    for step_key, share in busy_shares(own).items():
        who = "the host limits the speed" if step_key in bound else "they rarely wait for the host"
        sentences.append(f"Without exposed communication, the GPUs are busy during {percent(share)} % of the step: {who}.")
    for row in exposed_rows(own):
        if row.params.get("of") == LEAST_EXPOSED:
            least = f"The rank with the least has {percent(row.value)} %"
            sentences.append(f"{least}: the exchange itself costs at most this, the rest is waiting.")
        else:
            sentences.append(f"In the profiled steps, {percent(row.value)} % of the time is exposed communication.")
    # In runs of earlier versions, the difference has the name of a share.
    differences = select(own, metric="alone_difference") or select(own, metric="communication_share")
    for row in differences:
        kind = "a share" if not_none(row.ci_low) > 0 else "no share, because the interval is not above zero"
        ends = f"{percent(row.ci_low)} to {percent(row.ci_high)} %"
        sentences.append(f"The difference from the same step alone is {percent(row.value)} % ({ends}): {kind}.")
    return sentences
