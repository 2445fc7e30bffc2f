"""Batches of images built on the training device: it holds the whole set as bytes, and the host sends only a table of random
numbers once per epoch.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hyperion.data.batches import ResumableBatches, on_device
from hyperion.data.store.arrays import narrowed
from hyperion.data.store.folders import DataError

CROP_PADDING = 4
BORDERS = ("black", "reflect")
# Rows of an epoch's table, with one column per example: its index in the set, the first row and column of the crop, the step
# from one column to the next (-1 mirrors the image), and the first row and column of the hole.
_PLACE, _TOP, _LEFT, _STEP, _HOLE_TOP, _HOLE_LEFT = range(6)


class ImageBatches(ResumableBatches):
    """Batches of normalised images [batch, 3, 32, 32] in channels-last layout, and labels int64 [batch].

    All random numbers of an epoch are drawn on the host and depend on seed and epoch only. So every machine, device and number
    of ranks gets the same images, and resuming needs no generator state. The augmentations are a few operations on whole
    batches (`cut_out`), none of which waits for the device.

    Args:
        images: uint8 [N, 3, 32, 32], stored on the device, with a border if they are shifted.
        labels: integers [N].
        batch_size: images in a global batch.
        normalisation: mean and standard deviation of each channel of the TRAIN images, full scale = 1.
        augment: 'crop' (shift by up to 4 pixels), 'flip' (left to right; each image in every other epoch, half of the images
            in the first; Jordan 2024, arXiv 2404.00498). Use those in ImageSet.augmentations, because in some sets a flip
            changes the class.
        border: pixels that a shift brings in: 'black', or the image mirrored at its edge ('reflect').
        hole: side in pixels of a square that is set to the mean (Cutout, DeVries & Taylor 2017), 0 for none. Its centre is
            drawn from the whole image, so part of it may lie outside.
        shuffle: use a new order in every epoch; otherwise the order of the files (evaluation).
        drop_last: leave out the last, incomplete batch of an epoch.
        dtype: type of the images; they are computed in float32 and then rounded.
        rank, ranks: this process's part of each batch. For evaluation use whole batches on every rank.

    Raises:
        DataError: images, labels or normalisation have a wrong form, an augmentation or border is unknown, the images do not
            fill one batch, or the ranks do not divide the batch.
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

    def _batch(self, epoch: int, position: int) -> tuple[Tensor, Tensor]:
        table = self._table(epoch)
        if position == self.batches_per_epoch // 2:
            self._table(epoch + 1)  # prepared while the device is busy, so that it does not wait at the start of the next epoch
        first = position * self.batch_size
        part = self._part(min(self.batch_size, self.records - first))
        chosen = table[:, first + part.start : first + part.stop]
        pixels_BYXC = cut_out(self._pixels, chosen, self._steps)
        images_BYXC = (pixels_BYXC * self._scale).add_(self._shift)
        if self.hole:
            images_BYXC.masked_fill_(holes(chosen, self._steps, self.hole)[..., None], 0.0)
        return images_BYXC.to(self.dtype).permute(0, 3, 1, 2), self._labels[chosen[_PLACE]]

    def _table(self, epoch: int) -> Tensor:
        """Return the epoch's random numbers int64 [6, records] on the device, one column per example, in order."""
        if epoch not in self._tables:
            self._tables = {known: table for known, table in self._tables.items() if known == epoch - 1}
            self._tables[epoch] = on_device(self._draw(epoch), self._labels.device)
        return self._tables[epoch]

    def _draw(self, epoch: int) -> np.ndarray:
        """Draw the table. Every rank draws the numbers of all ranks, so they do not depend on the number of ranks."""
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
    """Check images and labels, so that normalised images are not scaled twice and channels are not taken for rows.

    Raises:
        DataError: images are not uint8 [N, 3, Y, Y], or labels are not integers [N] from 0.
    """
    form = f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, 3, Y, Y], 0 to 255, not normalised"
    if np.issubdtype(images.dtype, np.floating):
        raise DataError(form, where="images", next_step="pass the bytes; ImageBatches scales and normalises them")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3 or images.shape[2] != images.shape[3]:
        raise DataError(form, where="images", next_step="pass channels first: images.transpose(0, 3, 1, 2) of [N, Y, Y, 3]")
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer) or (labels < 0).any():
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)} for {len(images)} images",
            where="labels",
            next_step="pass one integer class from 0 per image; for one-hot labels, labels.argmax(1)",
        )


def _require_normalisation(*normalisation: Sequence[float]) -> None:
    mean, deviation = (np.asarray(values, dtype=np.float64) for values in normalisation)
    if mean.shape != (3,) or deviation.shape != (3,) or not ((mean >= 0) & (mean <= 1) & (deviation > 0)).all():
        raise DataError(
            f"the normalisation has means {mean.tolist()} and deviations {deviation.tolist()}",
            where="ImageBatches",
            next_step="pass three of each with full scale = 1: channel_statistics of the train images",
        )


def bordered(pixels_NYXC: Tensor, border: str) -> Tensor:
    """Return the images with CROP_PADDING more pixels on each side, black or mirrored at the edge."""
    if border == "black":
        return F.pad(pixels_NYXC, (0, 0) + 4 * (CROP_PADDING,))
    side = pixels_NYXC.shape[1]
    source = torch.arange(-CROP_PADDING, side + CROP_PADDING, device=pixels_NYXC.device).abs()
    source = (side - 1) - (side - 1 - source).abs()
    return pixels_NYXC.index_select(1, source).index_select(2, source)


def cut_out(pixels_NYXC: Tensor, chosen: Tensor, steps: Tensor) -> Tensor:
    """Shift and mirror every image of a batch with a single gather, which can be captured in a CUDA graph.

    Args:
        pixels_NYXC: all images, with their border.
        chosen: int64 [6, B], columns of an epoch's table.
        steps: 0, 1, … side of an image - 1.

    Returns:
        uint8 [B, side, side, 3].
    """
    rows_BY = chosen[_TOP][:, None] + steps
    columns_BX = torch.addcmul(chosen[_LEFT][:, None], chosen[_STEP][:, None], steps)
    return pixels_NYXC[chosen[_PLACE][:, None, None], rows_BY[:, :, None], columns_BX[:, None, :]]


def holes(chosen: Tensor, steps: Tensor, side: int) -> Tensor:
    """Return the mask of each image's hole, bool [B, Y, X]."""
    rows_BY, columns_BX = (steps - chosen[first][:, None] for first in (_HOLE_TOP, _HOLE_LEFT))
    inside_BY, inside_BX = ((at >= 0) & (at < side) for at in (rows_BY, columns_BX))
    return inside_BY[:, :, None] & inside_BX[:, None, :]
