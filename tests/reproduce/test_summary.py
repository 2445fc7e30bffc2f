import io

from rich.console import Console

from hyperion.reproduce.summary import Line, best_fraction, show_table
from hyperion.results import Row


def rate(value, limit, metric="bandwidth_gb_s", **columns):
    return Row(notebook="n", experiment="e", variant="v", metric=metric, value=value, limit=limit, **columns)


def test_the_best_fraction_is_that_of_the_rate_nearest_its_limit():
    rows = [rate(50, 100), rate(90, 100, "gemm_tflops", dtype="bfloat16"), rate(80, None), rate(None, 100)]
    assert best_fraction(rows) == "90% (gemm_tflops bfloat16)"
    assert best_fraction([rate(0.99, 1, "accuracy"), rate(1.0, 1.0, "perplexity_token")]) == ""


def test_the_table_shows_notes_as_they_are_and_fits_a_log():
    text = io.StringIO()
    lines = {"01_x": Line("failed", 3.2, [rate(50, 100)], "KeyError: [red]"), "02_y": Line("unfinished", None, [])}
    show_table(Console(file=text, width=40), lines)
    assert "KeyError: [red]" in text.getvalue() and "50% (bandwidth_gb_s)" in text.getvalue()
