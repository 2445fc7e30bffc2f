"""What the trials of the comparison time: two functions of many small operations, their number told by the side's folder.

So a slowdown can be planted: one more operation in a hundred is a slowdown of 1 %.
"""

from collections.abc import Callable

import torch


def work() -> dict[str, Callable[[], object]]:
    """A product, and a sum over 64 KB.

    Both do the same in every launch. Some functions do not (a stream through arrays that come to lie elsewhere each time): of
    those a tenth is not always caught, and `compare` says so in its power.
    """
    from planted import OPERATIONS  # pyright: ignore[reportMissingImports]  # the trial writes it into each side's folder

    torch.set_num_threads(1)  # operations so small gain nothing from threads
    a, out = torch.randn(64, 64), torch.empty(64, 64)
    x, total = torch.randn(1 << 14), torch.empty(())

    def product() -> None:
        for _ in range(OPERATIONS["product"]):
            torch.mm(a, a, out=out)

    def total_of() -> None:
        for _ in range(OPERATIONS["sum"]):
            torch.sum(x, dim=0, out=total)

    return {"product": product, "sum": total_of}
