"""Every figure of the book by name: which experiment it belongs to, and how it is drawn."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from hyperion.book import (
    plots_baseline,
    plots_compilation,
    plots_data,
    plots_distributed,
    plots_gap,
    plots_hardware,
    plots_images,
    plots_interconnect,
    plots_ladder,
    plots_language_speed,
    plots_levels,
    plots_llama,
    plots_memory,
    plots_model_products,
    plots_precision,
    plots_predictions,
    plots_products,
    plots_recovery,
    plots_scaling,
    plots_summary,
    plots_training,
    plots_transfers,
)
from hyperion.book.material import Material, made_from_rows
from hyperion.book.style import png, styled
from hyperion.errors import HyperionError

ALL = "all"


@dataclass(frozen=True)
class Plot:
    """One figure.

    Args:
        name: its file's stem.
        experiment: the experiment it belongs to; `ALL` for one that spans the run.
        caption: what the reader should see in it.
        draw: makes it, or None when the run holds nothing for it.
    """

    name: str
    experiment: str
    caption: str
    draw: Callable[[Material], Figure | None]


PLOTS = (
    Plot(
        "summary",
        ALL,
        "The run at a glance: rates beside their limits, the measured roofline, and what the language model learned "
        "beyond counting.",
        plots_summary.summary,
    ),
    Plot(
        "gemm",
        "gemm",
        "Rate by size and number format, and its share of the format's limit at the maximum clock.",
        plots_hardware.gemm,
    ),
    Plot(
        "gemm_cross_check",
        "gemm",
        "The same products timed by the harness and by the loop anybody would write, interleaved.",
        plots_hardware.gemm_cross_check,
    ),
    Plot("bandwidth", "bandwidth", "Bytes read and written per second, by operation and array size.", plots_hardware.bandwidth),
    Plot("roofline", "roofline", "Left of a ridge memory bounds, right of it arithmetic.", plots_hardware.roofline),
    Plot(
        "best_products",
        "best_products",
        "What is left of each format's limit when the shape is chosen well, and what shapes that somebody needs get of it.",
        plots_products.best_products,
    ),
    Plot(
        "operand_data",
        "operand_data",
        "The same product with other numbers: at one clock for all, and each at the clock that its own power leaves.",
        plots_products.operand_data,
    ),
    Plot(
        "memory_levels",
        "memory_levels",
        "Bytes per second by working set: a step down wherever a cache is full.",
        plots_levels.memory_levels,
    ),
    Plot(
        "stream_formats",
        "stream_formats",
        "A memory moves bytes: the same streams in every number format, beside its limit.",
        plots_levels.stream_formats,
    ),
    Plot(
        "transfers",
        "transfers",
        "Between host and device by size, from pinned and from pageable memory, and from each GPU to each other one.",
        plots_transfers.transfers,
    ),
    Plot(
        "launch_cost",
        "launch_cost",
        "What launching a kernel costs, and from which size on a copy works longer than that.",
        plots_transfers.launch_cost,
    ),
    Plot(
        "gemm_gap",
        "gemm_gap",
        "From the data sheet's peak to the fastest product: what each known limit takes, and what none explains.",
        plots_gap.gemm_gap,
    ),
    Plot(
        "model_products",
        "model_products",
        "What our models' products reach, beside the fastest product of any shape and the peak.",
        plots_model_products.model_products,
    ),
    Plot(
        "products_roofline",
        "model_products",
        "Each model's products at their arithmetic intensity: which of them memory holds back.",
        plots_model_products.products_roofline,
    ),
    Plot("operator_cost", "operator_cost", "What an operator and a layer cost the host.", plots_baseline.operator_cost),
    Plot(
        "model_steps",
        "model_steps",
        "Where a training step's time goes in each of its variants, and how much of the peak and of the fastest product it uses.",
        plots_baseline.model_steps,
    ),
    Plot(
        "batch_scaling",
        "batch_scaling",
        "Samples per second and memory by batch; the line foretells the batch that does not fit.",
        plots_baseline.batch_scaling,
    ),
    Plot(
        "collectives",
        "collectives",
        "Bus bandwidth by message size up to the limit of the links, and the time of a call down to its latency.",
        plots_interconnect.collectives,
    ),
    Plot("bucket_size", "collectives", "The size from which on more bytes add little.", plots_interconnect.bucket_size),
    Plot("overlap", "collectives", "An all-reduce and products, alone and both at once.", plots_interconnect.overlap),
    Plot(
        "token_histogram",
        "text_pipeline",
        "How often each token occurs: the commonest, and all of them by rank.",
        plots_data.token_histogram,
    ),
    Plot("tokenizer_speed", "tokenizer_speed", "Tokens on disk a second, beside datasets.map.", plots_data.tokenizer_speed),
    Plot("loader_speed", "loader_speed", "Each loader by itself, and how long a step waits for it.", plots_data.loader_speed),
    Plot(
        "image_grid", "image_pipeline", "Some images of every class, as the classifier gets to see them.", plots_data.image_grid
    ),
    Plot(
        "leakage",
        "leakage",
        "Nobody can predict an independent draw: a loss below ln V would mean that the model sees the future.",
        plots_training.leakage,
    ),
    Plot(
        "language_model",
        "language_model",
        "Loss by step and by epoch, beside what counting alone achieves.",
        plots_training.language_model,
    ),
    Plot("perplexity", "language_model", "Trained and counted models on the same held-out tokens.", plots_training.perplexity),
    Plot(
        "image_classifier",
        "image_classifier",
        "Loss by step, and accuracy on images that were not trained on.",
        plots_training.image_classifier,
    ),
    Plot(
        "throughput",
        "image_classifier",
        "Items trained on per second beside a steady step timed alone, and the memory taken at most.",
        plots_training.throughput,
    ),
    Plot("time_to_accuracy", "image_classifier", "Accuracy over seconds of training.", plots_images.time_to_accuracy),
    Plot("language_speed", "language_training_speed", "Two paths and their roof.", plots_language_speed.language_speed),
    Plot("image_speed", "image_training_speed", "Two training paths in turn.", plots_images.image_training_speed),
    Plot("recovery", "recovery", "Where each fault struck, and how many steps had to be done again.", plots_recovery.recovery),
    Plot(
        "parity_ladder",
        "parity_ladder",
        "What each change does to the losses: rounding where it rounds otherwise, and nothing where it does not.",
        plots_recovery.parity_ladder,
    ),
    Plot(
        "precision",
        "precision_variants",
        "Time and memory of a training step in fp32, TF32, bf16 and fp16.",
        plots_precision.precision,
    ),
    Plot("training_ladder", "training_ladder", "What each means adds to the ones before it.", plots_ladder.training_ladder),
    Plot(
        "precision_loss",
        "precision_variants",
        "How far each format's losses stray from those of fp32 over the same batches.",
        plots_precision.precision_loss,
    ),
    Plot("memory_phases", "memory_phases", "What tensors hold after each phase of a step.", plots_memory.memory_phases),
    Plot("activation_checkpointing", "activation_checkpointing", "Memory against time.", plots_memory.checkpointing),
    Plot("memory_estimate", "memory_estimate", "Peaks of memory, foretold and measured.", plots_memory.memory_estimate),
    Plot("memory_trace", "memory_trace", "Memory over a step, and its kernels.", plots_memory.memory_trace),
    Plot(
        "compilation",
        "compilation",
        "Time of a call and memory by mode of the compiler, each measured alone.",
        plots_compilation.compilation,
    ),
    Plot(
        "compilation_break_even",
        "compilation",
        "Seconds spent by number of calls: compiling pays where a line crosses the eager one.",
        plots_compilation.break_even,
    ),
    Plot(
        "parallel_parity",
        "parallel_parity",
        "The losses of one device and of all ranks lie on each other; their distance shows on a logarithmic axis only.",
        plots_distributed.parity,
    ),
    Plot(
        "distributed_training",
        "distributed_training",
        "Loss by step, and how far each rank's loss on its own examples lies from that of all ranks together.",
        plots_distributed.distributed_training,
    ),
    Plot(
        "resharding",
        "resharding",
        "A checkpoint goes on with fewer ranks: the next losses are the same.",
        plots_distributed.resharding,
    ),
    Plot(
        "rank_failure",
        "rank_failure",
        "A run loses to the death of a rank only the steps after its last checkpoint; the resumed run makes them again.",
        plots_distributed.rank_failure,
    ),
    Plot(
        "scaling",
        "scaling",
        "How much faster the same training is on more devices, beside the ideal line.",
        plots_scaling.scaling,
    ),
    Plot(
        "communication",
        "scaling",
        "The share of a step that vanishes when every device trains alone.",
        plots_scaling.communication,
    ),
    Plot(
        "llama_lora",
        "llama_lora",
        "Loss on completions before, during and after training; and what a step holds when adapters or everything is trained.",
        plots_llama.llama_lora,
    ),
    Plot(
        "lora_sharded",
        "lora_sharded",
        "The losses of one device and of sharded ranks lie on each other.",
        plots_llama.lora_sharded,
    ),
    Plot("predictions", ALL, "How much better or worse it came than was foretold.", plots_predictions.predictions),
)


def plots_of(experiment: str) -> list[Plot]:
    """The figures that belong to an experiment."""
    return [plot for plot in PLOTS if plot.experiment == experiment]


def draw(name: str, material: Material, **options) -> bytes | None:
    """PNG bytes of a figure, None when the run holds nothing to draw in it, or refused a value that it needs (a warning).

    Args:
        options: passed to the figure, `published=True` for gemm and bandwidth.

    Raises:
        HyperionError: there is no such figure, or the rows lack what it shows.
    """
    chosen = next((plot for plot in PLOTS if plot.name == name), None)
    if chosen is None:
        raise HyperionError(f"no figure {name!r}", next_step=f"use one of {', '.join(plot.name for plot in PLOTS)}")

    @made_from_rows(f"figure {name!r}")
    def drawn() -> bytes | None:
        with styled():
            figure = chosen.draw(material, **options)
            return None if figure is None else png(figure)

    # One refused value must not cost the page, nor may a figure be missing in silence.
    refused = any(row.is_unexpected and chosen.experiment in (ALL, row.experiment) for row in material.rows)
    try:
        content, why = drawn(), "nothing is left to draw"
    except HyperionError as error:
        if not refused:
            raise
        content, why = None, error.what
    if content is None and refused:
        print(f"WARNING: no figure {name!r}, which needs a value that was refused ({why})")
    return content
