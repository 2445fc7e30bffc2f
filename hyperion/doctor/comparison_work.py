"""What the trials of the comparison time: two functions of many small operations, their number told by the side's folder.

So a slowdown can be planted: one more operation in a hundred is a slowdown of 1 %.
"""

from collections.abc import Callable

import torch


def work() -> dict[str, Callable[[], object]]:
    """A product in the first cache, and a stream through the second one."""
    from planted import OPERATIONS  # made by the trial, in the folder of each side

    torch.set_num_threads(1)  # operations so small gain nothing from threads
    a, out = torch.randn(64, 64), torch.empty(64, 64)
    x = torch.randn(1 << 15)
    y = torch.empty_like(x)

    def product() -> None:
        for _ in range(OPERATIONS["product"]):
            torch.mm(a, a, out=out)

    def stream() -> None:
        for _ in range(OPERATIONS["stream"]):
            torch.add(x, x, alpha=2.0, out=y)

    return {"product": product, "stream": stream}
