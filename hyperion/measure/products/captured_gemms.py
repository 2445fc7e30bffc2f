"""Every matrix product that a call does, captured where PyTorch dispatches: of one's own model, forward and backward."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hyperion.measure.products.dispatch import Call, dispatched
from hyperion.measure.products.product_formulas import Product, products_of

# Words in the names of operators that multiply matrices; `upsample_bilinear2d` has one too and interpolates.
_MULTIPLIES = re.compile(
    r"^(?!upsample).*(mm|mv|dot|matmul|linear|linalg|conv|convolution|attention|einsum|lstm|gru|rnn|transformer)"
    r"(?![a-z])|conv\d"
)


@dataclass(frozen=True)
class CapturedGemms:
    """The products of one call.

    Args:
        counts: how often each product is done, in the order of the first.
        others: the operators that move memory and have no product formula, by name, with how often each was dispatched.
    """

    counts: dict[Product, int]
    others: dict[str, int]

    @property
    def flops(self) -> int:
        """Of all products, a multiply-add being 2."""
        return sum(product.flops * count for product, count in self.counts.items())

    @property
    def without_formula(self) -> dict[str, int]:
        """Those of `others` that multiply matrices by their name: their FLOPs are missing in `flops`."""
        return {name: count for name, count in self.others.items() if _MULTIPLIES.search(name)}

    def by_flops(self) -> list[tuple[Product, int]]:
        """Products with their counts, those first on which most FLOPs are spent."""
        return sorted(self.counts.items(), key=lambda item: -item[0].flops * item[1])

    def __str__(self) -> str:
        lines = [f"{self.flops / 1e9:.4g} GFLOP in {sum(self.counts.values())} products of {len(self.counts)} kinds"]
        lines += [f"{100 * p.flops * n / self.flops:5.1f} %  {n} x {p}" for p, n in self.by_flops()]
        if self.without_formula:
            lines.append(f"without a formula, not counted: {', '.join(self.without_formula)}")
        return "\n".join(lines)


def capture_gemms(function: Callable[[], object]) -> CapturedGemms:
    """Call a function once and list the matrix products that it dispatches; its backward's too, where it calls that.

    Args:
        function: a forward pass, a training step. Within `shapes_only` nothing of it is computed.
    """
    return gemms_of(dispatched(function))


def gemms_of(calls: list[Call]) -> CapturedGemms:
    """The products of operators that `dispatched` listed."""
    counts: Counter[Product] = Counter()
    others: Counter[str] = Counter()
    for call in calls:
        products = products_of(call)
        if products is not None:
            counts.update(products)
        elif call.moves:
            others[call.name] += 1
    return CapturedGemms(dict(counts), dict(others))
