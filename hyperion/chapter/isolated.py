"""An experiment in a process of its own, through the Job contract."""

from collections.abc import Callable

from hyperion.chapter.context import Context, Result
from hyperion.chapter.registry import experiment_named
from hyperion.chapter.variants import run_variant


def run_isolated(context: Context, report: Callable[[int, int, str], object]) -> Result:
    """Run the context's experiment in a worker process; its timeout is the profile's `timeout_s`, an hour unless named."""
    return run_variant(context, report, run_experiment)


def run_experiment(context: Context, report: Callable[[int, int, str], object]) -> Result:
    """The worker's side: whatever the experiment does."""
    return experiment_named(context.experiment).run(context, report)
