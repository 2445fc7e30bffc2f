"""Work that the trials of `hyperion.doctor.comparison` relaunch: two functions of many small operations.

The number of operations comes from a file in the folder of each side. One more operation in a hundred is a planted slowdown of
1 %. This is a file of its own because `relaunch` starts it in a new process.
"""

from collections.abc import Callable

import torch


def work() -> dict[str, Callable[[], object]]:
    """Return the functions to time: matrix products, and sums over 64 KB.

    Both take the same time in every launch. Functions whose time depends on the addresses of their arrays do not: for those a
    slowdown of a tenth is not always detected, which `compare` reports as low power.
    """
    from planted import OPERATIONS  # pyright: ignore[reportMissingImports]  # a trial writes this module into the folder of each side

    torch.set_num_threads(1)  # such small operations gain nothing from threads
    a, out = torch.randn(64, 64), torch.empty(64, 64)
    x, total = torch.randn(1 << 14), torch.empty(())

    def product() -> None:
        for _ in range(OPERATIONS["product"]):
            torch.mm(a, a, out=out)

    def add_up() -> None:
        for _ in range(OPERATIONS["sum"]):
            torch.sum(x, dim=0, out=total)

    return {"product": product, "sum": add_up}
