"""What the fine-tuning figures show: losses with their start, memory beside its floor and forecast, parity with its limit."""

import numpy as np
import pytest

from hyperion.experiments.llama.figures import llama_lora, lora_sharded
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.llama import CHAPTER, lora_rows, lora_samples
from tests.book.made_up.run import GPU


def material_of(folder, **options) -> Material:
    run, samples = Run.create(folder, {"environment": GPU}), lora_samples(np.random.default_rng(0))
    for experiment in ("llama_lora", "lora_sharded"):
        rows = [row for row in lora_rows(**options) if row.experiment == experiment]
        run.record(CHAPTER, experiment, rows, samples[experiment], input_hash="h")
    return Material(run)


def drawn(function, material):
    with styled():
        figure = function(material)
        figure.draw_without_rendering()
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    ticks = [label.get_text() for axes in figure.axes for label in axes.get_xticklabels()]
    return figure, " | ".join([*texts, *ticks, figure.get_suptitle(), figure.get_supxlabel()])


def test_losses_start_where_nothing_is_known_and_memory_is_labelled(tmp_path):
    figure, shown = drawn(llama_lora, material_of(tmp_path / "run"))
    assert "random weights" in shown and "LoRA\n4.10 GiB" in shown and "full fine-tuning\n21.6 GiB" in shown
    assert "random_llama_1b" in shown and "Random weights" in shown
    known = next(text for text in figure.axes[0].texts if text.get_text().startswith("random weights"))
    assert known.get_window_extent().x0 >= figure.axes[0].get_window_extent().x1  # no mark can lie on it
    heights = sorted(patch.get_height() for patch in figure.axes[1].patches if patch.get_height())
    assert heights == pytest.approx([2.3, 4.1, 17.5, 21.6])


def test_what_did_not_fit_is_left_out_and_told(tmp_path):
    _, shown = drawn(llama_lora, material_of(tmp_path / "run", full=None))
    assert "full fine-tuning: out of memory: made up" in shown


def test_parity_has_its_tolerance(tmp_path):
    figure, shown = drawn(lora_sharded, material_of(tmp_path / "run"))
    assert "4 ranks" in shown and "tolerance 0.0001" in shown
    assert figure.axes[1].lines[0].get_ydata() == pytest.approx(np.full(20, 2e-7), rel=1e-6)


def test_without_rows_there_is_no_figure(tmp_path):
    empty = Material(Run.create(tmp_path / "run", {"environment": GPU}))
    assert llama_lora(empty) is None and lora_sharded(empty) is None
