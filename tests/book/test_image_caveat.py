"""Wherever an accuracy is shown, it stands there that the copy of CIFAR-10 is not the published one, if it is not."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from hyperion.book import show
from hyperion.book.export import reference_readme
from hyperion.book.outline import banner, headlines, sections
from hyperion.book.report import report_page
from hyperion.chapter.context import Result
from hyperion.experiments.baselines.figures import image_classifier, time_to_accuracy
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.paths import reference_folder
from hyperion.results import Row, Run
from tests.book.made_up.images import classifier_samples, time_to_accuracy_row

LOSSY = {"place": "mirror", "sha256": "15f3c4a60ca7572f"}
OFFICIAL = {"place": "cache", "sha256": "0123456789abcdef", "official": True}
OTHER = {"place": "mirror", "sha256": "0123456789abcdef", "official": False}


def texts(figure):
    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())


def material_of(tmp_path, source, entry, digest="h"):
    """A run with the accuracy of one epoch, of the test images, and the time to a target."""
    run = Run.create(tmp_path, {"profile": "smoke", "environment": {"gpus": [], "cpu": {"name": "Laptop", "cores": 4}}})
    common = {"notebook": "02_core_framework", "experiment": "image_classifier", "variant": "resnet18", "metric": "accuracy"}
    common |= {"value": 0.9, "n": 100, "ci_low": 0.85, "ci_high": 0.95, "limit": 1.0, "limit_source": "all", "dtype": "bf16"}
    shown = [{"split": "held-out train", "epoch": 1, "step": 90}, {"split": "test", "step": 90}]
    rows = [Row(**common, params=params, data_source=source) for params in shown] + [time_to_accuracy_row(source)]
    samples = classifier_samples(np.random.default_rng(0))
    run.record("02_core_framework", "image_classifier", rows, samples, input_hash=digest, data={"cifar-10": entry}, source=source)
    return Material(run)


@pytest.mark.parametrize(
    ("source", "entry", "says"),
    [
        ("mirror", LOSSY, "Lossy mirror: "),
        ("mirror", OTHER, "Unofficial mirror: "),
        ("mirror", None, "Unofficial mirror: "),
        ("cache", OFFICIAL, ""),
        ("synthetic", None, ""),
    ],
)
def test_the_caveat_follows_from_the_checksum_of_the_data(tmp_path, source, entry, says):
    caveat = material_of(tmp_path, source, entry).image_caveat
    assert caveat.startswith(says) and bool(caveat) == bool(says)
    assert not says or "cannot be compared with published ones" in caveat


@pytest.mark.slow
def test_every_place_that_shows_an_accuracy_has_the_caveat(tmp_path, capsys):
    material = material_of(tmp_path, "mirror", LOSSY)
    caveat = material.image_caveat
    assert caveat in banner(material)
    assert [h.label for h in headlines(material)] == ["resnet18, accuracy, bf16, test split (lossy mirror)"]
    (section,) = [section for section in sections(material) if section.experiment == "image_classifier"]
    assert section.tables and all(caveat in caption for caption, _ in section.tables)
    with styled():
        assert all(caveat in texts(draw(material)) for draw in (image_classifier, time_to_accuracy))
    assert caveat in report_page(material) and caveat in reference_readme(material.run, material)["README.md"].decode()
    show(Result(material.rows, pd.DataFrame()), material.run)
    shown = capsys.readouterr().out
    assert f"\n{caveat}\n===" in shown and shown.count(caveat) == 1 + len(section.tables)


def test_a_replay_says_what_its_reference_was_measured_on(tmp_path):
    material = material_of(tmp_path, "mirror", None, digest="replay:h200-study:abc")
    assert material.image_caveat.startswith("Lossy mirror: ")


@pytest.mark.parametrize("name", ["h200x2", "h200-study"])
def test_the_pages_of_the_references_have_it(name):
    page = (reference_folder() / name / "README.md").read_text()
    assert Material(Run.open(reference_folder() / name)).image_caveat in page
