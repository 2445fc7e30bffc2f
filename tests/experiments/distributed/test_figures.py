"""What the distributed figures show: steps lost to a kill, ranks beside each other, whole steps on their axes."""

import pytest

from hyperion.experiments.distributed.figures import distributed_training, parity, rank_failure, resharding
from hyperion.figures.material import Material
from hyperion.figures.style import styled
from hyperion.results import Run
from tests.book.made_up.distributed import DISTRIBUTED
from tests.book.made_up.run import GPU


def killed(folder, material, sizes) -> Material:
    run = Run.create(folder, {"environment": GPU})
    run.record(
        DISTRIBUTED,
        "rank_failure",
        material.of("rank_failure"),
        material.samples("rank_failure"),
        input_hash="h",
        provenance={"sizes": sizes} if sizes else None,
    )
    return Material(run)


def drawn(function, material):
    with styled():
        figure = function(material)
        figure.draw_without_rendering()
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    return figure, " | ".join([*texts, figure.get_supxlabel().replace("\n", " ")])


def upright(axes):
    return [line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 2 and len(set(line.get_xdata())) == 1]


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_kill_and_the_last_checkpoint_are_marked(tmp_path, material):
    figure, shown = drawn(rank_failure, killed(tmp_path / "run", material, {"kill_after": 6, "checkpoint_every": 4}))
    assert "last checkpoint: step 4" in shown and "killed after step 6" in shown
    assert upright(figure.axes[0]) == [4.5, 6.5] and "lost and repeated: 2 steps" in legend(figure.axes[0])


def test_a_kill_right_after_a_checkpoint_loses_nothing(tmp_path, material):
    figure, _ = drawn(rank_failure, killed(tmp_path / "run", material, {"kill_after": 8, "checkpoint_every": 4}))
    assert upright(figure.axes[0]) == [8.5, 8.5] and not any("lost" in label for label in legend(figure.axes[0]))


def test_a_kill_before_the_first_checkpoint_has_none_to_mark(tmp_path, material):
    figure, shown = drawn(rank_failure, killed(tmp_path / "run", material, {"kill_after": 3, "checkpoint_every": 4}))
    assert upright(figure.axes[0]) == [3.5] and "last checkpoint" not in shown
    assert "lost and repeated: 3 steps" in legend(figure.axes[0])


def test_a_run_that_kept_no_sizes_has_no_marks(tmp_path, material):
    figure, shown = drawn(rank_failure, killed(tmp_path / "run", material, None))
    assert upright(figure.axes[0]) == [] and "killed after" not in shown


def test_ranks_differ_in_their_losses(material):
    figure, shown = drawn(distributed_training, material)
    rows = [row for row in material.of("distributed_training", metric="training_loss") if row.rank is not None]
    mean = sum(row.value for row in rows) / len(rows)
    heights = [bar.get_height() for bar in figure.axes[1].patches]
    assert heights == pytest.approx([100 * (row.value / mean - 1) for row in rows], abs=1e-9) and any(heights)
    assert {text.get_text() for text in figure.axes[1].texts} == {"0", "1", "2", "3"}
    assert "Rates of the ranks differ by 3.3 % at most" in shown and "lm_test_ddp 9.50 to 9.80" in shown


def test_a_single_rank_has_no_panel_of_differences_between_ranks(tmp_path, material):
    rows = [row for row in material.of("distributed_training") if row.rank in (None, 0)]
    run = Run.create(tmp_path / "run", {"environment": GPU})
    run.record(DISTRIBUTED, "distributed_training", rows, material.samples("distributed_training"), input_hash="h")
    figure, shown = drawn(distributed_training, Material(run))
    assert len(figure.axes) == 1 and "Training on one rank" in figure.get_suptitle()
    assert "The numbers at" not in shown and "Peak memory of a rank in the last epoch" in shown


@pytest.mark.parametrize("function", [parity, resharding, distributed_training, rank_failure])
def test_steps_are_whole_numbers(material, function):
    figure, _ = drawn(function, material)
    for axes in figure.axes:
        if axes.get_xlabel() == "optimizer step":
            assert all(tick == round(tick) for tick in axes.get_xticks())
