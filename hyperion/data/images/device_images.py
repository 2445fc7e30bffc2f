"""Build batches of images on the training device.

The device holds the whole image set as uint8. Once per epoch, the host copies a table of random numbers to the device.
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
# Rows of an epoch's table of random numbers, which has one column per example: the index of the image in the set, the first pixel
# row and the first pixel column of the crop, the step from one pixel column to the next (-1 mirrors the image), and the first
# pixel row and the first pixel column of the hole.
_PLACE, _TOP, _LEFT, _STEP, _HOLE_TOP, _HOLE_LEFT = range(6)


class ImageBatches(ResumableBatches):
    """Batches of normalised images ([batch, 3, 32, 32] in channels-last layout) and labels (int64 [batch]).

    All random numbers of an epoch are drawn on the host and depend only on the seed and the epoch. Therefore the images do not
    depend on the machine, the device or the number of ranks, and a run can resume without the state of a generator. The
    augmentations are a few operations on whole batches (see `cut_out`). None of these operations waits for the device.

    Args:
        images: uint8 [N, 3, 32, 32]. They are stored on the device, with a border if the augmentation 'crop' is used.
        labels: integer classes [N].
        batch_size: number of images in a global batch.
        normalisation: means and standard deviations of the channels of the TRAIN images, with pixels scaled to 0 .. 1.
        seed: seed of the orders and of the augmentations.
        augment: names of the augmentations. 'crop' shifts each image by up to 4 pixels. 'flip' mirrors half of the images left
            to right in even epochs, and the other half in odd epochs (Jordan 2024, arXiv 2404.00498). Use only the names in
            ImageSet.augmentations, because in some image sets a flip changes the class.
        border: content of the pixels that a shift moves into the image: 'black', or 'reflect' for the image mirrored at its
            edge.
        hole: side length in pixels of a square that is set to the mean (Cutout, DeVries & Taylor 2017); 0 for no square. The
            centre of the square is drawn from the whole image, so a part of the square may be outside of the image.
        shuffle: if True, every epoch has a new order. If False, every epoch has the order of the files, as an evaluation needs.
        drop_last: if True, omit the last batch of an epoch if it is incomplete.
        device: device that stores the image set and builds the batches.
        dtype: dtype of the images. They are computed in float32 and then converted to this dtype.
        rank, ranks: rank of this process, and number of ranks that share each batch. For an evaluation in which every rank
            needs whole batches, keep the defaults.

    Raises:
        DataError: the images, the labels or the normalisation have a wrong shape or dtype; an augmentation or a border is
            unknown; the images do not fill one batch; or the ranks do not divide the batch.
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
        # Channels last: the three channels of a pixel are neighbours in memory, so the gather in `cut_out` reads whole pixels.
        pixels_NYXC = torch.from_numpy(np.array(images)).to(device).permute(0, 2, 3, 1)
        self._pixels = bordered(pixels_NYXC, border) if "crop" in augment else pixels_NYXC.contiguous()
        self._labels = torch.from_numpy(narrowed(labels, np.int64, "labels")).to(device)
        mean, deviation = (np.asarray(values, dtype=np.float64) for values in normalisation)
        # (pixel / 255 - mean) / deviation = pixel * scale + shift needs one multiplication and one addition per pixel.
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
            self._table(epoch + 1)  # copy the next table early, so that the next epoch need not wait
        first = position * self.batch_size
        part = self._part(min(self.batch_size, self.records - first))
        # Take this rank's part of the global batch: a slice of the columns of the epoch's table, [6, B / ranks].
        chosen = table[:, first + part.start : first + part.stop]
        pixels_BYXC = cut_out(self._pixels, chosen, self._steps)
        images_BYXC = (pixels_BYXC * self._scale).add_(self._shift)
        if self.hole:
            # Fill the hole with 0, which is the mean of the channel after normalisation.
            images_BYXC.masked_fill_(holes(chosen, self._steps, self.hole)[..., None], 0.0)
        # Shape [B, 3, Y, X] with the strides of [B, Y, X, 3] is PyTorch's channels-last format. No data are copied.
        return images_BYXC.to(self.dtype).permute(0, 3, 1, 2), self._labels[chosen[_PLACE]]

    def _table(self, epoch: int) -> Tensor:
        """Return an epoch's table of random numbers on the device.

        The table is int64 [6, records]. It has one column per example, in the order of the epoch.
        """
        if epoch not in self._tables:
            # Keep the table of the previous epoch, because this call may prefetch a table while the previous one is in use.
            self._tables = {known: table for known, table in self._tables.items() if known == epoch - 1}
            self._tables[epoch] = on_device(self._draw(epoch), self._labels.device)
        return self._tables[epoch]

    def _draw(self, epoch: int) -> np.ndarray:
        """Draw the random numbers of an epoch. Every rank draws all of them, so they do not depend on the number of ranks."""
        table = np.zeros((6, self.records), dtype=np.int64)
        table[_PLACE], table[_STEP] = self._order(epoch), 1
        # The third number of the seed makes this random stream differ from that of the order, which uses (seed, epoch).
        generator = np.random.default_rng((self.seed, epoch, 1))
        if "crop" in self.augment:
            # With a border of P pixels, the crop may start at pixel 0 to 2 P. A start at P means no shift.
            table[[_TOP, _LEFT]] = generator.integers(0, 2 * CROP_PADDING + 1, size=(2, self.records))
        if "flip" in self.augment:
            # Draw the direction of each image with epoch 0 in all epochs, so that each image alternates between both directions.
            first = np.random.default_rng((self.seed, 0, 2)).random(self.records) < 0.5
            mirrored = first[table[_PLACE]] ^ bool(epoch % 2)
            table[_STEP, mirrored] = -1
            # A mirrored image is read from its right edge to the left, with the step -1.
            table[_LEFT, mirrored] += self._side - 1
        if self.hole:
            # The drawn numbers are the centre of the hole. The table stores its first row and column, which may be negative.
            table[[_HOLE_TOP, _HOLE_LEFT]] = generator.integers(0, self._side, size=(2, self.records)) - self.hole // 2
        return table


def require_form(images: np.ndarray, labels: np.ndarray) -> None:
    """Check the shapes and dtypes of images and labels.

    Without this check, normalised images could be normalised again, and channels could be read as pixel rows.

    Raises:
        DataError: images are not uint8 [N, 3, Y, Y], or labels are not integers [N] from 0.
    """
    form = f"images are {images.dtype} {list(images.shape)}, expected uint8 [N, 3, Y, Y], 0 to 255, not normalised"
    remedy = None
    if np.issubdtype(images.dtype, np.floating):
        remedy = "pass the uint8 pixels; ImageBatches scales and normalises them"
    elif images.dtype != np.uint8:
        remedy = "pass the pixels as uint8, 0 to 255"
    elif images.ndim == 3:
        remedy = "pass one axis for the channels: for grey images [N, Y, Y], np.repeat(images[:, None], 3, axis=1)"
    elif images.ndim != 4:
        remedy = "pass an array of images with four axes: image, channel, pixel row, pixel column"
    elif images.shape[1] != 3 and images.shape[3] == 3:
        remedy = "pass channels first: images.transpose(0, 3, 1, 2) of [N, Y, Y, 3]"
    elif images.shape[1] != 3:
        remedy = "pass three channels: repeat that of grey images with np.repeat(images, 3, axis=1), and drop an alpha channel"
    elif images.shape[2] != images.shape[3]:
        remedy = "crop, pad or resize the images to squares before"
    if remedy:
        raise DataError(form, where="images", next_step=remedy)
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer) or (labels < 0).any():
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)} for {len(images)} images",
            where="labels",
            next_step="pass one integer class per image, counted from 0; if labels are one-hot, pass labels.argmax(1)",
        )


def _require_normalisation(*normalisation: Sequence[float]) -> None:
    mean, deviation = (np.asarray(values, dtype=np.float64) for values in normalisation)
    if mean.shape != (3,) or deviation.shape != (3,) or not ((mean >= 0) & (mean <= 1) & (deviation > 0)).all():
        raise DataError(
            f"the normalisation has means {mean.tolist()} and deviations {deviation.tolist()}",
            where="ImageBatches",
            next_step="pass three means and three deviations of pixels scaled to 0 .. 1: channel_statistics(train_images)",
        )


def bordered(pixels_NYXC: Tensor, border: str) -> Tensor:
    """Return the images with a border of CROP_PADDING pixels on each side, which is black or the mirrored image."""
    if border == "black":
        # `F.pad` counts dimensions from the last one: (0, 0) for the channels, then both sides of X and of Y.
        return F.pad(pixels_NYXC, (0, 0) + 4 * (CROP_PADDING,))
    side = pixels_NYXC.shape[1]
    # Mirror at the edge pixel without repeating it: index -k becomes k, and index (side - 1) + k becomes (side - 1) - k.
    source = torch.arange(-CROP_PADDING, side + CROP_PADDING, device=pixels_NYXC.device).abs()
    source = (side - 1) - (side - 1 - source).abs()
    return pixels_NYXC.index_select(1, source).index_select(2, source)


def cut_out(pixels_NYXC: Tensor, chosen: Tensor, steps: Tensor) -> Tensor:
    """Shift and mirror the images of a batch with a single gather operation, which can be captured in a CUDA graph.

    Args:
        pixels_NYXC: all images of the set, with their border, uint8.
        chosen: int64 [6, B], the columns of the epoch's table for the images of the batch.
        steps: the integers from 0 to the height of an image - 1.

    Returns:
        The images of the batch without border, uint8 [B, Y, X, 3].
    """
    # Pixel coordinates are index tensors, so one gather does the selection, the shift and the mirroring.
    rows_BY = chosen[_TOP][:, None] + steps
    columns_BX = torch.addcmul(chosen[_LEFT][:, None], chosen[_STEP][:, None], steps)
    return pixels_NYXC[chosen[_PLACE][:, None, None], rows_BY[:, :, None], columns_BX[:, None, :]]


def holes(chosen: Tensor, steps: Tensor, side: int) -> Tensor:
    """Return a mask that is True inside the hole of each image, bool [B, Y, X]."""
    rows_BY, columns_BX = (steps - chosen[first][:, None] for first in (_HOLE_TOP, _HOLE_LEFT))
    inside_BY, inside_BX = ((at >= 0) & (at < side) for at in (rows_BY, columns_BX))
    return inside_BY[:, :, None] & inside_BX[:, None, :]
