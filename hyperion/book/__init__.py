"""The book: tables, figures, the report and the reference pages, all made from stored rows and samples.

This package does not import torch.
"""

from hyperion.book.display import (
    announce,
    banner,
    compared_steps,
    fill,
    pick,
    show,
    show_answer,
    show_predictions,
    show_published,
    show_sentence,
    show_table,
    teach,
    verdict,
)
from hyperion.book.export import export_run, reference_readme
from hyperion.book.outline import environment
from hyperion.book.plots import all_plots, draw
from hyperion.book.report import write_report
from hyperion.experiments.interconnect.figures import kernels_chosen, link_meanings, links_between, rates_by_size
from hyperion.figures.material import Material
from hyperion.figures.published import published_bandwidth, published_baseline, published_gemm, published_source
from hyperion.figures.tables import epoch_table, markdown, metric_table

__all__ = [
    "Material",
    "all_plots",
    "announce",
    "banner",
    "compared_steps",
    "draw",
    "environment",
    "epoch_table",
    "export_run",
    "fill",
    "kernels_chosen",
    "link_meanings",
    "links_between",
    "markdown",
    "metric_table",
    "pick",
    "published_bandwidth",
    "published_baseline",
    "published_gemm",
    "published_source",
    "rates_by_size",
    "reference_readme",
    "show",
    "show_answer",
    "show_predictions",
    "show_published",
    "show_sentence",
    "show_table",
    "teach",
    "verdict",
    "write_report",
]
