import re

import numpy as np
import pytest
import torch

from hyperion.data.images.device_images import ImageBatches, cut_out, require_form
from hyperion.data.store.folders import DataError

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(1, 256, (50, 3, 32, 32), dtype=np.uint8)
LABELS = np.arange(50) % 10
IDENTITY = ((0.0,) * 3, (1 / 255,) * 3)  # leaves the levels 0 .. 255 as they are


def _images(**changes) -> ImageBatches:
    options = {"images": IMAGES, "labels": LABELS, "batch_size": 8, "normalisation": IDENTITY, "augment": ("crop", "flip")}
    return ImageBatches(**options | changes)


def test_images_are_normalised_with_the_given_statistics():
    mean, deviation = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    batches = _images(normalisation=(mean, deviation), augment=(), shuffle=False)
    images, labels = batches.next_batch()
    expected = (IMAGES[:8] / 255 - np.reshape(mean, (1, 3, 1, 1))) / np.reshape(deviation, (1, 3, 1, 1))
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-5)
    assert labels.tolist() == LABELS[:8].tolist()


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [8] * 6), (False, [8] * 6 + [2])])
def test_the_last_batch_is_dropped_or_kept(drop_last, sizes):
    batches = _images(drop_last=drop_last)
    assert len(batches) == len(sizes) and [len(labels) for _, labels in batches] == sizes


def test_an_epoch_shows_every_image_once():
    batches = _images(drop_last=False, augment=())
    images = torch.cat([images for images, _ in batches]).round().to(torch.uint8).numpy()
    assert {image.tobytes() for image in images} == {image.tobytes() for image in IMAGES}


@pytest.mark.parametrize("augment", [("crop",), ("flip",), ("crop", "flip")])
@pytest.mark.parametrize("border", ["black", "reflect"])
def test_augmented_images_are_shifts_and_flips_of_their_own_image(augment, border):
    images, _ = _images(augment=augment, shuffle=False, batch_size=50, drop_last=False, border=border).next_batch()
    found = images.round().to(torch.uint8).numpy()
    modes = {"black": "constant", "reflect": "reflect"}
    padded = np.pad(IMAGES, ((0, 0), (0, 0), (4, 4), (4, 4)), mode=modes[border])
    shifts = range(9) if "crop" in augment else [4]
    flips, seen = (False, True) if "flip" in augment else (False,), set()
    for image, border in zip(found, padded, strict=True):
        candidates = {
            (y, x, flip): border[:, y : y + 32, x : x + 32][:, :, :: -1 if flip else 1]
            for y in shifts
            for x in shifts
            for flip in flips
        }
        matching = [key for key, candidate in candidates.items() if np.array_equal(candidate, image)]
        assert len(matching) == 1
        seen.update(matching)
    assert len(seen) >= min(len(candidates), 20)


def test_an_unknown_augmentation_is_an_error():
    with pytest.raises(DataError, match=r"unknown augmentation \['mixup'\]"):
        _images(augment=("mixup",))


def test_an_unknown_border_is_an_error():
    with pytest.raises(DataError, match="unknown border 'white'"):
        _images(border="white")


def test_every_image_is_mirrored_in_every_other_epoch():
    batches = _images(augment=("flip",), batch_size=50, shuffle=False)
    epochs = [batches.next_batch()[0].round().to(torch.uint8).numpy() for _ in range(3)]
    mirrored = [np.array([not np.array_equal(*pair) for pair in zip(epoch, IMAGES, strict=True)]) for epoch in epochs]
    assert np.array_equal(mirrored[0], ~mirrored[1]) and np.array_equal(mirrored[0], mirrored[2])
    assert 10 <= mirrored[0].sum() <= 40


def test_a_hole_is_one_square_of_the_mean_that_may_reach_over_the_edge():
    mean = (0.5, 0.4, 0.3)
    options = {"augment": (), "shuffle": False, "batch_size": 50, "normalisation": (mean, (0.2, 0.25, 0.3))}
    plain, holed = (_images(hole=hole, **options).next_batch()[0].numpy() for hole in (0, 12))
    changed = (plain != holed).any(axis=1)
    assert np.all(holed.transpose(0, 2, 3, 1)[changed] == 0), "normalised, the mean is 0"
    places = set()
    for image in changed:
        rows, columns = (np.flatnonzero(image.any(axis=axis)) for axis in (1, 0))
        hole = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert hole.all() and hole.sum() == image.sum()
        for side in (rows, columns):
            assert 6 <= len(side) <= 12 and (len(side) == 12 or 0 in side or 31 in side)
        places.add((rows[0], columns[0]))
    assert len(places) > 25


def test_images_come_channels_last_and_rounded_from_float32():
    options = {"normalisation": ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)), "hole": 8}
    exact, rounded = (_images(dtype=dtype, **options).next_batch()[0] for dtype in (torch.float32, torch.bfloat16))
    assert exact.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(exact.bfloat16(), rounded)


def test_a_state_of_other_changes_is_refused():
    with pytest.raises(DataError, match="loader state has hole 0"):
        _images(hole=8).load_state_dict(_images().state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_makes_the_same_batches_and_its_cut_can_be_recorded():
    options = {"hole": 8, "border": "reflect", "dtype": torch.bfloat16}
    on_cpu, on_gpu = (_images(device=device, **options) for device in ("cpu", "cuda"))
    for _ in range(2 * len(on_cpu)):
        for one, other in zip(on_cpu.next_batch(), on_gpu.next_batch(), strict=True):
            assert torch.equal(one, other.cpu())
    table = on_gpu._table(1)
    chosen, graph = table[:, :8].clone(), torch.cuda.CUDAGraph()
    cut_out(on_gpu._pixels, chosen, on_gpu._steps)
    with torch.cuda.graph(graph):
        pixels = cut_out(on_gpu._pixels, chosen, on_gpu._steps)
    chosen.copy_(table[:, 8:16])
    graph.replay()
    assert torch.equal(pixels, cut_out(on_gpu._pixels, table[:, 8:16], on_gpu._steps))


@pytest.mark.parametrize(
    ("shape", "step"),
    [
        ((4, 8, 8, 3), "channels first"),
        ((4, 1, 8, 8), "repeat that of grey images"),
        ((4, 4, 8, 8), "drop an alpha channel"),
        ((4, 8, 8), "repeat(images[:, None], 3, axis=1)"),
        ((4, 3, 8, 6), "resize the images to squares"),
    ],
)
def test_images_of_another_form_get_their_own_next_step(shape, step):
    with pytest.raises(DataError, match=re.escape(str(list(shape)))) as refused:
        require_form(np.zeros(shape, np.uint8), np.arange(4))
    assert step in (refused.value.next_step or "")
