"""The exercises on frameworks: what is given fails, a right answer passes."""

from hyperion.experiments.frameworks.exercises import OVERSTATED, judge_equal_work, mystery_run
from tests.exercise_scores import solved


def losses_agree(run, reference):
    return all(abs(a - b) < 1e-5 for a, b in zip(run["losses"], reference["losses"], strict=True))


def test_losses_alone_do_not_show_unequal_work():
    given = judge_equal_work(losses_agree)
    assert list(given["right"]) == [True, True, False, False, False, False, True]


def test_a_judge_of_the_work_passes_and_one_of_bits_does_not():
    def of_work(run, reference):
        same = all(run[name] == reference[name] for name in ("rows", "counted_tokens", "optimizer_steps", "undecayed"))
        return same and losses_agree(run, reference) and abs(run["first_norm"] / reference["first_norm"] - 1) < 1e-3

    assert solved(judge_equal_work(of_work))
    assert not solved(judge_equal_work(lambda run, reference: run == reference))
    assert not solved(judge_equal_work(lambda run, reference: 1 / 0))


def test_the_mystery_run_counts_each_micro_batch_as_a_step():
    run = mystery_run()
    factor = run["counted_tokens"].sum() / (64 * run["rows_read"].sum())
    assert factor == OVERSTATED.expected == 8 and OVERSTATED.judge(8) == "right"
