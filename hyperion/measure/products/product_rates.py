"""At which rate a product of any size should run, from measured rates of a few square ones.

The model: rate = share of the units that tiles fill x rate of a filled device at that length of the K loop. The first
follows from the sizes; the second is what measured products reached over their own share, interpolated over log K, with
the end values outside of what was measured. The short K loop is what small products suffer from beside idle units: loads
have nothing to hide behind, and a tile's beginning and end cost as much as in a long one. Where K is long and tiles are few,
as in gradients of weights, K is split, down to the shortest one that was measured.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hyperion.errors import HyperionError
from hyperion.measure.products.product_formulas import Product
from hyperion.measure.products.tiles import TILES, best_tiling, tile


@dataclass(frozen=True)
class ProductRates:
    """Rates of products of one dtype on one device.

    Args:
        units: compute units that tiles are dealt to.
        k: lengths of K that were measured, ascending.
        filled_tflops: at each, the rate over the share of the units that the product's tiles fill.
    """

    units: int
    k: tuple[int, ...]
    filled_tflops: tuple[float, ...]

    @classmethod
    def fit(cls, measured: Iterable[tuple[int, int, int, float]], units: int) -> "ProductRates":
        """From (M, N, K, TFLOPS) of measured products; of several with the same K the fastest counts.

        Raises:
            HyperionError: nothing was measured.
        """
        filled: dict[int, float] = {}
        for m, n, k, tflops in measured:
            filled[k] = max(filled.get(k, 0.0), tflops / best_tiling(m, n, units).share)
        if not filled:
            raise HyperionError(
                "no rate to go by", where="ProductRates.fit", next_step="measure at least one product of the dtype first"
            )
        return cls(units, tuple(sorted(filled)), tuple(filled[k] for k in sorted(filled)))

    def tflops(self, product: Product) -> float:
        """The rate of a product, by the tile size and the number of splits that promise most."""
        ways = [(size, splits) for size in TILES for splits in self._splits(product.k)]
        return max(
            tile(product.m, product.n, product.batch, self.units, size, splits).share * self._filled(product.k / splits)
            for size, splits in ways
        )

    def _splits(self, k: int) -> list[int]:
        return [1] + [1 << power for power in range(1, 8) if k / (1 << power) >= self.k[0]]

    def _filled(self, k: float) -> float:
        return float(np.exp(np.interp(np.log(k), np.log(self.k), np.log(self.filled_tflops))))
