"""How much of a device the tiles of a product fill: a product is cut into tiles, and a tile occupies a whole unit.

Source: NVIDIA, Matrix Multiplication Background User's Guide, sections on tile and wave quantization.
"""

from dataclasses import dataclass
from math import ceil, prod

# Rows and columns of the output that one unit works on, as the BLAS libraries of both vendors choose them.
TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


@dataclass(frozen=True)
class Tiling:
    """A product cut into tiles of one size.

    Args:
        tile: rows and columns of a tile.
        tiles: how many there are, those of all splits and of a batch together.
        waves: rounds in which all units take a tile each; the last may leave most of them idle.
        share: of the device's arithmetic in these rounds, what goes into the output.
    """

    tile: tuple[int, int]
    tiles: int
    waves: int
    share: float

    def __str__(self) -> str:
        return f"{self.tiles} tiles of {self.tile[0]} x {self.tile[1]} in {self.waves} wave{'' if self.waves == 1 else 's'}"


def tile(m: int, n: int, batch: int, units: int, tile: tuple[int, int], splits: int = 1) -> Tiling:
    """Cut a product's output [batch, m, n] into tiles for `units` units.

    Args:
        splits: parts into which K is cut, each a tile of its own, to be added up afterwards.
    """
    rows, columns = tile
    tiles = batch * ceil(m / rows) * ceil(n / columns) * splits
    waves = ceil(tiles / units)
    return Tiling(tile, tiles, waves, batch * m * n * splits / (waves * units * rows * columns))


def best_tiling(m: int, n: int, units: int, batch: int = 1, tolerance: float = 0.0) -> Tiling:
    """Of the usual tile sizes the one that leaves least idle; K is not split.

    Args:
        tolerance: share that may be given up for a larger tile, which loads less for each product of two numbers.
    """
    tilings = [tile(m, n, batch, units, size) for size in TILES]
    least = max(tiling.share for tiling in tilings) - tolerance
    return max((tiling for tiling in tilings if tiling.share >= least), key=lambda tiling: (prod(tiling.tile), tiling.share))
