"""Batches of images made on the device they are trained on: the whole set lies there as bytes, and nothing but a table of
random numbers goes there, once an epoch.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.data.batches.loaders import ResumableBatches, on_device
from hyperion.data.errors import DataError
from hyperion.data.store.arrays import narrowed

CROP_PADDING = 4
BORDERS = ("black", "reflect")
# Rows of an epoch's table, one column an example: its place in the set, the first row and column of the piece that is cut
# out, the step from one column to the next (-1 mirrors), and the first row and column of the hole.
_PLACE, _TOP, _LEFT, _STEP, _HOLE_TOP, _HOLE_LEFT = range(6)


class ImageBatches(ResumableBatches):
    """Batches of images [batch, 3, 32, 32] in channels-last layout, normalised, and labels int64 [batch].

    All random numbers of an epoch are a function of the seed and the epoch, drawn on the host: every machine, device and
    number of ranks sees the same images, and a run that is resumed needs no state of a generator. What is done with them is
    a handful of operations on whole batches (`cut_out`), none of which waits for the device.

    Args:
        images: uint8 [N, 3, 32, 32], kept on the device as they are, with a border where they are shifted.
        labels: integers [N].
        batch_size: images in a batch, of all ranks together.
        normalisation: mean and standard deviation by channel in units of full scale, those of the TRAIN images.
        augment: random changes, of 'crop' (shift by up to 4 pixels) and 'flip' (left to right, each image in every other
            epoch, half of them in the first; Jordan 2024, arXiv 2404.00498); take them from ImageSet.augmentations, because
            a flip changes the class of some sets.
        border: what a shift brings in: 'black', or the image mirrored at its edge ('reflect').
        hole: pixels on a side of a square that is painted over with the mean (Cutout, DeVries & Taylor 2017), 0 for none;
            its centre is drawn from the whole image, so that part of it may lie outside.
        shuffle: a new order every epoch, else the order of the files (evaluation).
        drop_last: leave out the records that fill no whole batch, else end the epoch with a smaller one.
        dtype: of the images; they are computed in float32 and then rounded.
        rank, ranks: this process's part of each batch; evaluation takes whole batches, on every rank.

    Raises:
        DataError: images, labels or normalisation of another form, unknown augmentation or border, too few records for one
            batch, or a batch that the ranks do not divide.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        batch_size: int,
        normalisation: tuple[Sequence[float], Sequence[float]],
        *,
        seed: int = 0,
        augment: Sequence[str] = (),
        border: str = "black",
        hole: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        ranks: int = 1,
    ):
        require_form(np.asarray(images), np.asarray(labels))
        _require_normalisation(*normalisation)
        super().__init__(len(images), batch_size, seed, drop_last, rank, ranks)
        if unknown := set(augment) - {"crop", "flip"}:
            raise DataError(f"unknown augmentation {sorted(unknown)}", next_step="use 'crop' and 'flip'")
        if border not in BORDERS:
            raise DataError(f"unknown border {border!r}", next_step=f"use one of {', '.join(BORDERS)}")
        self.augment, self.border, self.hole, self.shuffle, self.dtype = tuple(augment), border, hole, shuffle, dtype
        self._side = images.shape[-1]
        pixels_NYXC = torch.from_numpy(np.array(images)).to(device).permute(0, 2, 3, 1)
        self._pixels = bordered(pixels_NYXC, border) if "crop" in augment else pixels_NYXC.contiguous()
        self._labels = torch.from_numpy(narrowed(labels, np.int64, "labels")).to(device)
        mean, deviation = (np.asarray(values, dtype=np.float64) for values in normalisation)
        self._scale = torch.tensor(1 / (255 * deviation), dtype=torch.float32, device=device)
        self._shift = torch.tensor(-mean / deviation, dtype=torch.float32, device=device)
        self._steps = torch.arange(self._side, device=device)
        self._tables: dict[int, Tensor] = {}

    def _identity(self) -> dict:
        changes = {"augment": list(self.augment), "border": self.border, "hole": self.hole}
        return {**super()._identity(), **changes, "shuffle": self.shuffle}

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.records)
        return np.random.default_rng((self.seed, epoch)).permutation(self.records)

    def _batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        table = self._table(epoch)
        if position == self.batches_per_epoch // 2:
            self._table(epoch + 1)  # while the device is busy, so that it need not wait when the epoch turns
        first = position * self.batch_size
        part = self._part(min(self.batch_size, self.records - first))
        chosen = table[:, first + part.start : first + part.stop]
        pixels_BYXC = cut_out(self._pixels, chosen, self._steps)
        images_BYXC = (pixels_BYXC * self._scale).add_(self._shift)
        if self.hole:
            images_BYXC.masked_fill_(holes(chosen, self._steps, self.hole)[..., None], 0.0)
        return images_BYXC.to(self.dtype).permute(0, 3, 1, 2), self._labels[chosen[_PLACE]]

    def _table(self, epoch: int) -> Tensor:
        """The epoch's random numbers int64 [6, records] on the device, each column those of one example, in order."""
        if epoch not in self._tables:
            self._tables = {known: table for known, table in self._tables.items() if known == epoch - 1}
            self._tables[epoch] = on_device(self._draw(epoch), self._labels.device)
        return self._tables[epoch]

    def _draw(self, epoch: int) -> np.ndarray:
        """See `_table`. Every rank draws the numbers of all, so that they depend on no number of ranks."""
        table = np.zeros((6, self.records), dtype=np.int64)
        table[_PLACE], table[_STEP] = self._order(epoch), 1
        generator = np.random.default_rng((self.seed, epoch, 1))
        if "crop" in self.augment:
            table[[_TOP, _LEFT]] = generator.integers(0, 2 * CROP_PADDING + 1, size=(2, self.records))
        if "flip" in self.augment:
            first = np.random.default_rng((self.seed, 0, 2)).random(self.records) < 0.5
            mirrored = first[table[_PLACE]] ^ bool(epoch % 2)
            table[_STEP, mirrored] = -1
            table[_LEFT, mirrored] += self._side - 1
        if self.hole:
            table[[_HOLE_TOP, _HOLE_LEFT]] = generator.integers(0, self._side, size=(2, self.records)) - self.hole // 2
        return table


def require_form(images: np.ndarray, labels: np.ndarray) -> None:
    """Refuse images that would be scaled twice, channels that would be taken for rows, and labels of another form.

    Raises:
        DataError: images are not uint8 [N, 3, Y, Y], or labels are not classes from 0 [N].
    """
    form = f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, 3, Y, Y], 0 to 255, not normalised"
    if np.issubdtype(images.dtype, np.floating):
        raise DataError(form, where="images", next_step="give the bytes; scaling and normalising is done here")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3]:
        raise DataError(form, where="images", next_step="give channels first: images.transpose(0, 3, 1, 2) of [N, Y, Y, 3]")
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer) or (labels < 0).any():
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)} for {len(images)} images",
            where="labels",
            next_step="give one class for each image, a whole number from 0; labels.argmax(1) of one-hot labels",
        )


def _require_normalisation(*normalisation: Sequence[float]) -> None:
    mean, deviation = (np.asarray(values, dtype=np.float64) for values in normalisation)
    if mean.shape != (3,) or deviation.shape != (3,) or not ((mean >= 0) & (mean <= 1) & (deviation > 0)).all():
        raise DataError(
            f"the normalisation has means {mean.tolist()} and deviations {deviation.tolist()}",
            where="ImageBatches",
            next_step="give three of each in units of full scale, 0 to 1: channel_statistics of the train images",
        )


def bordered(pixels_NYXC: Tensor, border: str) -> Tensor:
    """The images with CROP_PADDING pixels more on each side, black or mirrored at the edge."""
    if border == "black":
        return F.pad(pixels_NYXC, (0, 0) + 4 * (CROP_PADDING,))
    side = pixels_NYXC.shape[1]
    source = torch.arange(-CROP_PADDING, side + CROP_PADDING, device=pixels_NYXC.device).abs()
    source = (side - 1) - (side - 1 - source).abs()
    return pixels_NYXC.index_select(1, source).index_select(2, source)


def cut_out(pixels_NYXC: Tensor, chosen: Tensor, steps: Tensor) -> Tensor:
    """One gather that shifts and mirrors every image of a batch as its table says; it may be part of a captured graph.

    Args:
        pixels_NYXC: the set.
        chosen: int64 [6, B], columns of an epoch's table.
        steps: 0, 1, … to the side of an image.

    Returns:
        [B, side, side, 3], bytes as the set's.
    """
    rows_BY = chosen[_TOP][:, None] + steps
    columns_BX = torch.addcmul(chosen[_LEFT][:, None], chosen[_STEP][:, None], steps)
    return pixels_NYXC[chosen[_PLACE][:, None, None], rows_BY[:, :, None], columns_BX[:, None, :]]


def holes(chosen: Tensor, steps: Tensor, side: int) -> Tensor:
    """Where the hole of each image lies: bool [B, Y, X]."""
    rows_BY, columns_BX = (steps - chosen[first][:, None] for first in (_HOLE_TOP, _HOLE_LEFT))
    inside_BY, inside_BX = ((at >= 0) & (at < side) for at in (rows_BY, columns_BX))
    return inside_BY[:, :, None] & inside_BX[:, None, :]
