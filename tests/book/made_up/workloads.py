"""Rows of kernels in double precision, and of memory that host and device share, that no machine measured: test data."""

import pandas as pd

from tests.book.made_up.hardware import time_samples, timed

KERNELS = "05_scientific_kernels"
CHECK = {"check": "numpy and Parseval", "check_error": 1e-16, "check_tolerance": 1e-15}


def workload_chapters(random, limited: bool):
    """(notebook, experiment, rows, samples) of both. A CPU has no shared memory; here it has, so that there is a picture."""
    limit = 4800.0 if limited else None
    kernels = []
    for variant, length, rate in (("fft 1d", 1024, 3200.0), ("fft 2d", 4096, 900.0), ("7-point stencil", 512, 380.0)):
        columns = {"dtype": "fp64", "params": {"length": length, "count": 8, "cache": "cold"}, **CHECK}
        kernels.append(timed(random, KERNELS, "fp64_kernels", variant, "bandwidth_gb_s", rate, limit, **columns))
        if variant != "7-point stencil":
            kernels.append(timed(random, KERNELS, "fp64_kernels", variant, "fft_tflops", rate / 600, None, **columns))
    shared = []
    for memory, access, rate in (("mapped", "read", 52.0), ("mapped", "write", 49.0), ("managed", "read", 2100.0)):
        columns = {"dtype": "int32", "params": {"access": access, "bytes": 2**28, "cache": "cold"}, **CHECK}
        bound = limit and limit / 2 if memory == "managed" else None
        shared.append(timed(random, KERNELS, "mapped_memory", memory, "bandwidth_gb_s", rate, bound, **columns))
    experiments = {"fp64_kernels": kernels, "mapped_memory": shared}
    return [(KERNELS, name, rows, pd.DataFrame(time_samples(rows))) for name, rows in experiments.items()]
