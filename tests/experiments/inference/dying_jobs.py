"""Functions that worker processes call instead of those of `runtimes`: a package that is built, and one that ends its process."""

import os
import signal

import pandas as pd

from hyperion.chapter.context import Result

AOTI = "AOTInductor"  # as in backends.py, which imports torch


def build(context, report, **params):
    """Pretend to build a package."""
    return Result([context.row(AOTI, "export_time_s", 1.0, params={"model": "toy"})], pd.DataFrame())


def end_process(context, report, **params):
    """End the process with SIGSEGV, as some versions of PyTorch do when they load a package."""
    os.kill(os.getpid(), signal.SIGSEGV)
