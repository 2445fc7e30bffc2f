"""A made-up run with every experiment of the book in it: test data, with valid rows, of no machine that exists."""

import math

import numpy as np
import pandas as pd
import pytest

from hyperion.book.material import Material
from hyperion.results import Prediction, Row, Run, median_estimate, proportion_estimate

HARDWARE, DATA, CORE = "01_hardware_exploration", "01_dataset_preparation", "02_core_framework"
GPU = {
    "python": "3.12.3", "torch": "2.11.0+cu128", "cuda": "12.8", "hip": None, "driver": "570.86",
    "cpu": {"name": "Test CPU", "cores": 16}, "gpus": [{"name": "NVIDIA Test GPU", "total_memory_bytes": 150 * 10**9}],
    "packages": {"numpy": "2.5.0", "pandas": "3.1.1"}, "os": "Ubuntu 24.04", "kernel": "6.8", "host_hash": "0123456789ab",
    "source": {"hash": "f" * 64, "commit": "0" * 40, "modified": False},
}  # fmt: skip
PEAKS = {"fp64": 66.9, "fp32": 66.9, "tf32": 494.7, "fp16": 989.5, "bf16": 989.5}
REACHED = {"fp64": 0.93, "fp32": 0.76, "tf32": 0.84, "fp16": 0.71, "bf16": 0.79}


def timed(random, notebook, experiment, variant, metric, rate, limit, **columns):
    """A row whose value scatters around `rate`."""
    estimate = median_estimate(rate * random.normal(1, 0.01, 40)).map(
        lambda value: min(value, 0.999 * (limit or math.inf))
    )
    source = "data sheet: units x operations per clock x maximum clock" if limit else "no limit: no data sheet entry"
    return Row(
        notebook=notebook, experiment=experiment, variant=variant, metric=metric, value=estimate.value, n=estimate.n,
        ci_low=estimate.ci_low, ci_high=estimate.ci_high, limit=limit, **{"limit_source": source} | columns,
    )  # fmt: skip


def gemm_rows(random, peaks):
    rows = []
    for dtype, peak in peaks.items():
        for size in (1024, 2048, 4096, 8192, 16384):
            params = {"m": size, "n": size, "k": size, "cache": "cold"}
            rate = (peak or 0.4) * REACHED[dtype] * (1 - math.exp(-((size / 3000) ** 1.6)))
            check = {"check": "slice against float64", "check_error": 2e-4, "check_tolerance": 1e-3}
            rows.append(timed(random, HARDWARE, "gemm", "torch.mm", "gemm_tflops", rate, peak, dtype=dtype, params=params,
                              predicted=(peak or 0.5) * 0.95, clock_mhz=1755.0, power_w=640.0, **check))  # fmt: skip
            if dtype == "bf16":
                params = params | {"plain_loop_calls": 30}
                rows.append(timed(random, HARDWARE, "gemm", "harness over plain loop", "speedup", 1.01, None, dtype=dtype,
                                  params=params))  # fmt: skip
                rows.append(timed(random, HARDWARE, "gemm", "plain loop", "gemm_tflops", rate, peak, dtype=dtype,
                                  params=params, **check))  # fmt: skip
    rows.append(Row(notebook=HARDWARE, experiment="gemm", variant="torch.mm", metric="gemm_tflops", value=None, dtype="fp8",
                    params={"m": 1024, "n": 1024, "k": 1024, "cache": "cold"},
                    value_reason="unsupported: torch.mm takes no fp8"))  # fmt: skip
    return rows


def bandwidth_rows(random, limit):
    rows = []
    for operation, factor in (("copy", 0.91), ("scale", 0.90), ("add", 0.925), ("triad", 0.93)):
        for millions in (10, 20, 50, 100, 200, 500):
            rate = (limit or 40) * factor * (1 - math.exp(-millions / 15))
            large = limit if millions >= 50 else None
            reason = {} if large else {"limit_source": "no limit: part of the output may stay in the cache (80 MiB)"}
            if large:
                reason = {"limit_source": "device memory: data sheet, HBM3e"}
            rows.append(timed(random, HARDWARE, "bandwidth", operation, "bandwidth_gb_s", rate, large, dtype="fp32",
                              params={"elements": millions * 10**6, "cache": "cold"}, predicted=limit, check="against float64",
                              check_error=0.0, check_tolerance=1e-7, **reason))  # fmt: skip
    return rows


def roofline_rows(random, peaks):
    return [
        Row(notebook=HARDWARE, experiment="roofline", variant="measured ceilings", dtype=dtype, value=(peak or 0.4) / 3.9 * 1e3,
            metric="roofline_ridge_flop_per_byte")
        for dtype, peak in peaks.items()
    ]  # fmt: skip


def time_samples(rows):
    frames = [
        pd.DataFrame(
            {"variant": r.variant, "dtype": r.dtype, "params": "{}", "index": range(3), "time_s": [0.1, 0.11, 0.1]}
        )
        for r in rows
    ]
    return pd.concat(frames, ignore_index=True)


def text_rows(source):
    common = {"notebook": DATA, "experiment": "text_pipeline", "data_source": source}
    counts = {"lines": 36718, "non-empty lines": 23767, "tokens": 2_391_884, "packed windows": 18_686}
    rows = [Row(**common, variant="WikiText-2", metric="count", value=float(count), params={"split": "train", "what": what})
            for what, count in counts.items()]  # fmt: skip
    padded = {"split": "train", "what": "padding"}
    return [*rows, Row(**common, variant="padded lines", metric="share", value=0.37, predicted=0.45, params=padded)]


def text_samples(random):
    words = [" the", ",", ".", " of", " and", "\n", " in", " to", " a", " @", "=", " was", " <unk>", "$", "�", " for"]
    texts = words + [f" word{i}" for i in range(4000)]
    counts = np.sort(random.poisson(130_000 / np.arange(1, len(texts) + 1)) + 1)[::-1]
    tokens = pd.DataFrame(
        {"kind": "token", "split": "train", "token_id": range(len(texts)), "text": texts, "count": counts}
    )
    lines = pd.DataFrame(
        {"kind": "line", "split": "train", "text": [" = Valkyria Chronicles = \n", " Senjō no Valkyria 3 <unk>"]}
    )
    return pd.concat([tokens, lines])


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def image_rows(source):
    common = {"notebook": DATA, "experiment": "image_pipeline", "data_source": source}
    rows = [Row(**common, variant="CIFAR-10", metric="count", value=5000.0,
                params={"split": "train", "what": "images of a class", "class": name}) for name in CLASSES]  # fmt: skip
    return [*rows, Row(**common, variant="all images", metric="channel_mean", value=0.4914, predicted=0.5, check="sum over all pixels",
                       check_error=1e-9, check_tolerance=2e-3, params={"split": "train", "channel": "red"})]  # fmt: skip


def image_samples(random):
    x, y = np.meshgrid(np.linspace(0, 1, 32), np.linspace(0, 1, 32))
    lines = []
    for label, name in enumerate(CLASSES):
        for index in range(4):
            waves = [np.sin(6 * (x * (label % 4 + 1) + y * (c + index + 1) / 2)) for c in range(3)]
            pixels = np.clip(127 + 90 * np.stack(waves) + random.normal(0, 12, (3, 32, 32)), 0, 255).astype(np.uint8)
            lines.append({"kind": "image", "index": label * 9 + index, "label": label, "class": name,
                          "pixels": pixels.ravel().tolist()})  # fmt: skip
    return pd.DataFrame(lines)


def epoch_row(experiment, variant, metric, value, epoch, source, **columns):
    return Row(notebook=CORE, experiment=experiment, variant=variant, dtype="bf16", metric=metric, value=value,
               params={"epoch": epoch, "split": "held-out train"} if metric in ("accuracy", "validation_loss") else {"epoch": epoch},
               data_source=source, **{"limit_source": "no limit: the entropy of natural text is not known"} | columns)  # fmt: skip


def language_rows(random, source, floor):
    rows = []
    bound = {"limit": floor, "limit_source": "entropy of the process that wrote it"} if floor else {}
    for epoch in range(1, 9):
        loss = 3.3 + 4 * math.exp(-epoch / 2)
        value = timed(random, CORE, "language_model", "transformer", "tokens_per_s", 1.1e6, None, dtype="bf16",
                      params={"epoch": epoch}, data_source=source)  # fmt: skip
        rows += [value] + [epoch_row("language_model", "transformer", *pair, epoch, source, **bound) for pair in
                           (("training_loss", loss), ("validation_loss", loss + 0.25))]  # fmt: skip
        rows += [epoch_row("language_model", "transformer", "peak_memory_gib", 11.2, epoch, source),
                 epoch_row("language_model", "transformer", "learning_rate", 3e-4 * (1 - epoch / 10), epoch, source)]  # fmt: skip
    steady = timed(random, CORE, "language_model", "transformer", "tokens_per_s", 1.15e6, None, dtype="bf16",
                   params={"batch": 65536, "step": "steady"}, data_source=source, predicted=1.9e6)  # fmt: skip
    return [*rows, steady, perplexity_row("language_model", "transformer", 38.2, source, context=512, stride=256)]


def leakage_rows():
    return [Row(notebook=CORE, experiment="leakage", variant="causal transformer", dtype="fp32", metric="validation_loss",
                value=4.16, n=8192, ci_low=4.155, ci_high=4.165, predicted=math.log(64), limit_source="no limit: an expectation",
                check="standard errors below ln V", check_error=-0.5, check_tolerance=4.0)]  # fmt: skip


def perplexity_row(experiment, variant, value, source, **params):
    return Row(notebook=CORE, experiment=experiment, variant=variant, metric="perplexity_token", value=value, n=240_000,
               ci_low=value, ci_high=value, limit_source="no limit: the entropy of natural text is not known",
               data_source=source, params={"split": "valid", "units": 240_000} | params)  # fmt: skip


def classifier_rows(random, source, bayes):
    rows = []
    for epoch in range(1, 11):
        correct = proportion_estimate(int(10_000 * (0.93 - 0.5 * math.exp(-epoch / 2.5))), 10_000)
        rows += [
            timed(random, CORE, "image_classifier", "resnet18", "images_per_s", 3.2e4, None, dtype="bf16", params={"epoch": epoch},
                  data_source=source),
            epoch_row("image_classifier", "resnet18", "training_loss", 1.9 * math.exp(-epoch / 4), epoch, source),
            epoch_row("image_classifier", "resnet18", "accuracy", correct.value, epoch, source, n=correct.n, ci_low=correct.ci_low,
                      ci_high=correct.ci_high, limit=bayes, limit_source="Bayes accuracy" if bayes else "no limit: unknown for photographs"),
            epoch_row("image_classifier", "resnet18", "peak_memory_gib", 4.31, epoch, source),
        ]  # fmt: skip
    tested = proportion_estimate(9_170, 10_000)
    return [*rows, Row(notebook=CORE, experiment="image_classifier", variant="resnet18", dtype="bf16", metric="accuracy",
                       value=tested.value, n=tested.n, ci_low=tested.ci_low, ci_high=tested.ci_high, limit=bayes or 1.0,
                       limit_source="best possible", data_source=source, params={"split": "test", "step": 900})]  # fmt: skip


def step_samples(random, floor, count):
    step = np.arange(1, count + 1)
    loss = floor + 5 * np.exp(-step / count * 4) + random.normal(0, 0.12, count)
    return pd.DataFrame({"kind": "step", "step": step, "loss": loss})


def made_up_run(folder, *, source="mirror", peaks=None, bandwidth=4800.0, environment=GPU, replay=""):
    """Record every experiment of the book into a new run."""
    random = np.random.default_rng(0)
    peaks = PEAKS if peaks is None else peaks
    run = Run.create(folder, {"profile": "full", "data_source": "auto", "seed": 0, "environment": environment})
    synthetic = source == "synthetic"
    run.predict([Prediction(notebook=HARDWARE, experiment="gemm", variant="torch.mm", dtype="bf16", metric="gemm_tflops",
                            params={"m": 16384, "n": 16384, "k": 16384, "cache": "cold"}, guess=500.0, estimate=940.0,
                            basis="roofline", input_hash="h")])  # fmt: skip
    hardware = {"gemm": gemm_rows(random, peaks), "bandwidth": bandwidth_rows(random, bandwidth),
                "roofline": roofline_rows(random, peaks)}  # fmt: skip
    for experiment, rows in hardware.items():
        run.record(HARDWARE, experiment, rows, time_samples(rows), input_hash=f"{replay}h")
    chapters = [
        (DATA, "text_pipeline", text_rows(source), text_samples(random)),
        (DATA, "image_pipeline", image_rows(source), image_samples(random)),
        (CORE, "ngram_baselines", [perplexity_row("ngram_baselines", "unigram", 812.4, source),
                                   perplexity_row("ngram_baselines", "bigram_interpolated", 262.7, source)], pd.DataFrame({"x": [1]})),
        (CORE, "leakage", leakage_rows(), step_samples(random, 4.1, 150)),
        (CORE, "language_model", language_rows(random, source, 2.9 if synthetic else None), step_samples(random, 3.2, 2000)),
        (CORE, "image_classifier", classifier_rows(random, source, 0.95 if synthetic else None), step_samples(random, 0.1, 900)),
    ]  # fmt: skip
    for notebook, experiment, rows, samples in chapters:
        run.record(notebook, experiment, rows, samples, input_hash=f"{replay}h", source=source)
    return run


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A made-up GPU run on mirrored data. Tests that write take a copy."""
    return made_up_run(tmp_path_factory.mktemp("book") / "20260101-120000-full")


@pytest.fixture(scope="session")
def cpu_run(tmp_path_factory):
    """A made-up run of a CPU that no data sheet knows, on synthetic data."""
    environment = GPU | {"gpus": [], "cuda": None, "torch": "2.13.0+cpu"}
    folder = tmp_path_factory.mktemp("book") / "20260101-120000-smoke"
    return made_up_run(folder, source="synthetic", peaks={"fp64": None, "fp32": None, "bf16": None}, bandwidth=None,
                       environment=environment)  # fmt: skip


@pytest.fixture(scope="session")
def material(run):
    return Material(run)


@pytest.fixture(scope="session")
def cpu_material(cpu_run):
    return Material(cpu_run)
