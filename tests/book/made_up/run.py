"""A made-up run with every experiment of the book in it: test data, with valid rows, of no machine that exists."""

import numpy as np
import pandas as pd

from hyperion.results import Prediction, Run
from tests.book.made_up.baseline import baseline_chapters
from tests.book.made_up.collectives import collectives_chapter, mpi_chapter
from tests.book.made_up.compilation import compilation_chapter
from tests.book.made_up.distributed import distributed_chapters
from tests.book.made_up.frameworks import framework_chapters
from tests.book.made_up.hardware import HARDWARE, PEAKS, bandwidth_rows, gemm_rows, roofline_rows, time_samples
from tests.book.made_up.images import classifier_samples, speed_chapters, time_to_accuracy_row
from tests.book.made_up.kernels import kernel_chapters
from tests.book.made_up.learning import (
    CORE,
    DATA,
    classifier_rows,
    image_rows,
    image_samples,
    language_rows,
    leakage_rows,
    loader_rows,
    perplexity_row,
    step_samples,
    text_rows,
    text_samples,
    tokenizer_rows,
)
from tests.book.made_up.levels import levels_chapters
from tests.book.made_up.llama import llama_chapter
from tests.book.made_up.megatron import megatron_chapters
from tests.book.made_up.operators import operator_chapters
from tests.book.made_up.precision import precision_chapters
from tests.book.made_up.products import products_chapters
from tests.book.made_up.quantization import quantization_chapters
from tests.book.made_up.recovery import recovery_chapters
from tests.book.made_up.runtimes import runtime_chapters
from tests.book.made_up.serving import serving_chapters
from tests.book.made_up.triton import triton_chapters
from tests.book.made_up.workloads import workload_chapters

GPU = {
    "python": "3.12.3",
    "torch": "2.11.0+cu128",
    "cuda": "12.8",
    "hip": None,
    "driver": "570.86",
    "cpu": {"name": "Test CPU", "cores": 16},
    "gpus": [{"name": "NVIDIA Test GPU", "total_memory_bytes": 150 * 10**9}],
    "packages": {"numpy": "2.5.0", "pandas": "3.1.1"},
    "os": "Ubuntu 24.04",
    "kernel": "6.8",
    "host_hash": "0123456789ab",
    "source": {"hash": "f" * 64, "commit": "0" * 40, "modified": False},
}


def made_up_run(folder, *, source="mirror", peaks=None, bandwidth=4800.0, environment=GPU, replay=""):
    """Record every experiment of the book into a new run."""
    random = np.random.default_rng(0)
    peaks = PEAKS if peaks is None else peaks
    run = Run.create(folder, {"profile": "full", "data_source": "auto", "seed": 0, "environment": environment})
    synthetic = source == "synthetic"
    run.predict(
        [
            Prediction(
                notebook=HARDWARE,
                experiment="gemm",
                variant="torch.mm",
                dtype="bf16",
                metric="gemm_tflops",
                params={"m": 16384, "n": 16384, "k": 16384, "cache": "cold"},
                guess=500.0,
                made_at="2026-01-01T00:00:00.000+00:00",
                estimate=940.0,
                basis="roofline",
                input_hash="h",
            )
        ]
    )
    hardware = {
        "gemm": gemm_rows(random, peaks),
        "bandwidth": bandwidth_rows(random, bandwidth),
        "roofline": roofline_rows(random, peaks),
    }
    for experiment, rows in hardware.items():
        run.record(HARDWARE, experiment, rows, time_samples(rows), input_hash=f"{replay}h")
    chapters = [
        collectives_chapter(np.random.default_rng(2), limited=bandwidth is not None),
        mpi_chapter(np.random.default_rng(8), gpus=bandwidth is not None),
        *llama_chapter(np.random.default_rng(3)),
        *distributed_chapters(np.random.default_rng(4)),
        *speed_chapters(limited=bandwidth is not None),
        *recovery_chapters(),
        compilation_chapter(),
        *precision_chapters(),
        *levels_chapters(np.random.default_rng(6), limited=bandwidth is not None),
        *workload_chapters(np.random.default_rng(9), limited=bandwidth is not None),
        *products_chapters(np.random.default_rng(5), limited=bandwidth is not None),
        *kernel_chapters(np.random.default_rng(7), peaks),
        *triton_chapters(),
        *runtime_chapters(),
        *quantization_chapters(),
        *operator_chapters(),
        *serving_chapters(),
        *framework_chapters(),
        *megatron_chapters(),
        *baseline_chapters(np.random.default_rng(1), limited=bandwidth is not None),
        (DATA, "text_pipeline", text_rows(source), text_samples(random)),
        (DATA, "image_pipeline", image_rows(source), image_samples(random)),
        (DATA, "tokenizer_speed", tokenizer_rows(source), pd.DataFrame({"x": [1]})),
        (DATA, "loader_speed", loader_rows(source), pd.DataFrame({"x": [1]})),
        (
            CORE,
            "ngram_baselines",
            [
                perplexity_row("ngram_baselines", "unigram", 812.4, source),
                perplexity_row("ngram_baselines", "bigram_interpolated", 262.7, source),
            ],
            pd.DataFrame({"x": [1]}),
        ),
        (CORE, "leakage", leakage_rows(), step_samples(random, 4.1, 150)),
        (CORE, "language_model", language_rows(random, source, 2.9 if synthetic else None), step_samples(random, 3.2, 2000)),
        (
            CORE,
            "image_classifier",
            [*classifier_rows(random, source, 0.95 if synthetic else None), time_to_accuracy_row(source)],
            classifier_samples(random),
        ),
    ]
    for notebook, experiment, rows, samples in chapters:
        run.record(notebook, experiment, rows, samples, input_hash=f"{replay}h", source=source)
    return run
