"""Prepare the images and verify each step from the image files to the batches.

The experiment counts images and classes, computes the mean of each channel, stores sample images, and times the loader.
"""

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked, timed_row
from hyperion.data import ImageSet
from hyperion.data.images.device_images import ImageBatches
from hyperion.experiments.data.loader_speed import LoaderTimingOptions, loader_limit, time_in_a_row
from hyperion.measure import Verification
from hyperion.results import Row
from hyperion.workloads import datasets

_SHOWN_PER_CLASS = 4
_CHANNELS = ("red", "green", "blue")
_LOADED = 8192  # number of images in the timed loader; the time of a batch does not depend on it
_SAMPLE_BYTES = 3 * 32 * 32 * (1 + 4)  # bytes moved per image: each value is read as one byte and written as float32
# Each value was rounded to one of 256 levels, which changes a mean by less than half a level.
_MEAN_TOLERANCE = 0.5 / 255


class ImagePipelineOptions(LoaderTimingOptions):
    """Options for the `image_pipeline` experiment.

    Args:
        batch_size: number of images in a batch.
    """

    batch_size: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the mean of the red channel as 0.5: cameras choose the exposure so that an average scene is middle grey."""
    params = {"split": "train", "channel": "red"}
    basis = "photographs expose for middle grey"
    return [Forecast("all images", "channel_mean", 0.5, basis, params=params)]


def run(context: Context, report: Report) -> Result:
    """Load and verify the images, and time the loader.

    The rows give the number of images in each class, the mean of each channel, and the loader's rate. The samples are some images
    of every class.
    """
    report(0, 2, "load and verify")
    image_set, prepared = datasets.images(context)
    rows = [row for split in prepared.steps for row in _split_rows(context, image_set, prepared.steps[split], split)]
    rows += datasets.proof_rows(context, image_set, prepared)
    report(1, 2, "make batches")
    rows.append(_loader_row(context, ImagePipelineOptions.of(context), image_set))
    return Result(rows, _shown(image_set), image_set.source)


EXPERIMENT = Experiment(forecast, run, data=datasets.IMAGES, options=ImagePipelineOptions)


def _split_rows(context: Context, image_set: ImageSet, steps: dict, split: str) -> list[Row]:
    source, name = image_set.source, image_set.name
    images = getattr(image_set, f"{split}_images")
    total = {"split": split, "what": "images"}
    rows = [context.row(name, "count", float(steps["read"]["images"]), params=total, data_source=source)]
    for label, count in steps["classes"].items():
        params = {"split": split, "what": "images of a class", "class": label}
        rows.append(context.row(name, "count", float(count), params=params, data_source=source))
    for channel, mean in enumerate(steps["channels"]["mean"]):
        # The pipeline computed the stored mean from a histogram of levels. The check recomputes it from the pixels.
        summed = float(images[:, channel].sum(dtype=np.int64)) / images[:, channel].size / 255
        rows.append(
            context.row(
                "all images",
                "channel_mean",
                mean,
                params={"split": split, "channel": _CHANNELS[channel]},
                data_source=source,
                **checked("sum over all pixels", abs(mean - summed), _MEAN_TOLERANCE),
            )
        )
    return rows


def _loader_row(context: Context, options: ImagePipelineOptions, image_set: ImageSet) -> Row:
    """Time a loader that makes augmented, normalised batches on the device. Check the labels of some of its batches."""
    size, device = options.batch_size, context.device
    batches = ImageBatches(
        image_set.train_images[:_LOADED],
        image_set.train_labels[:_LOADED],
        size,
        image_set.normalisation(),
        seed=context.seed,
        augment=image_set.augmentations,
        device=device.torch_device,
    )
    places = batches.examples(0)[: 4 * size]
    labels = torch.cat([batches.next_batch()[1] for _ in range(4)]).cpu().numpy()
    wrong = float(np.mean(labels != image_set.train_labels[places]))
    timing = time_in_a_row(context, options, batches.next_batch)
    rate = timing.estimate.map(lambda seconds: size / seconds)
    return timed_row(
        context,
        "images, on the device",
        "loader_samples_per_s",
        rate,
        timing,
        Verification("share of labels that are another image's", wrong, 0.0),
        loader_limit(context, _SAMPLE_BYTES, size),
        params={"batch": size, "workers": 0},
        data_source=image_set.source,
    )


def _shown(image_set: ImageSet) -> pd.DataFrame:
    """Return a table with the first images of every class.

    The column "pixels" holds each image as a flat list of 3 x 32 x 32 numbers.
    """
    chosen = [
        int(index)
        for label in range(len(image_set.classes))
        for index in np.flatnonzero(image_set.train_labels == label)[:_SHOWN_PER_CLASS]
    ]
    labels = image_set.train_labels[chosen]
    return pd.DataFrame(
        {
            "kind": "image",
            "index": chosen,
            "label": labels.astype(np.int64),
            "class": [image_set.classes[label] for label in labels],
            "pixels": [image.ravel().tolist() for image in image_set.train_images[chosen]],
        }
    )
