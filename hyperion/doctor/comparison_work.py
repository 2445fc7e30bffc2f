"""The code that the trials of `hyperion.doctor.comparison` measure: two functions with many small operations.

Each version has its own folder with the file planted.py, which contains the number of operations. A version with 101 instead of
100 operations has a planted slowdown of 1 %. This code has its own file, because `relaunch` runs the file in new processes.
"""

from collections.abc import Callable

import torch


def work() -> dict[str, Callable[[], object]]:
    """Return the two functions to time: matrix products of size 64, and sums over 64 KiB.

    The time of each function is about the same in every launch. This is not true of functions whose time depends on the addresses
    of their arrays. For such functions, a slowdown of 10 % is not always detected, and `compare` reports a low power.
    """
    from planted import OPERATIONS  # pyright: ignore[reportMissingImports]  # a trial writes this module for each version

    torch.set_num_threads(1)  # several threads do not make such small operations faster
    a, out = torch.randn(64, 64), torch.empty(64, 64)
    x, total = torch.randn(1 << 14), torch.empty(())

    def product() -> None:
        for _ in range(OPERATIONS["product"]):
            torch.mm(a, a, out=out)

    def add_up() -> None:
        for _ in range(OPERATIONS["sum"]):
            torch.sum(x, dim=0, out=total)

    return {"product": product, "sum": add_up}
