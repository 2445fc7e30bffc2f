"""Rows and samples of data and training chapters that nothing was trained for: test data, valid by every rule of a row."""

import functools
import math

import numpy as np
import pandas as pd

from hyperion.results import Row, proportion_estimate
from tests.book.made_up.hardware import timed

DATA, CORE = "01_dataset_preparation", "02_core_framework"


def text_rows(source):
    common = {"notebook": DATA, "experiment": "text_pipeline", "data_source": source}
    counts = {"lines": 36718, "non-empty lines": 23767, "tokens": 2_391_884, "packed windows": 18_686}
    rows = [
        Row(**common, variant="WikiText-2", metric="count", value=float(count), params={"split": "train", "what": what})
        for what, count in counts.items()
    ]
    padded = {"split": "train", "what": "padding"}
    return [*rows, Row(**common, variant="padded lines", metric="share", value=0.37, predicted=0.45, params=padded)]


def text_samples(random):
    words = [" the", ",", ".", " of", " and", "\n", " in", " to", " a", " @", "=", " was", " <unk>", "$", "�", " for"]
    texts = words + [f" word{i}" for i in range(4000)]
    counts = np.sort(random.poisson(130_000 / np.arange(1, len(texts) + 1)) + 1)[::-1]
    tokens = pd.DataFrame({"kind": "token", "split": "train", "token_id": range(len(texts)), "text": texts, "count": counts})
    lines = pd.DataFrame(
        {"kind": "line", "split": "train", "text": [" = Valkyria Chronicles = \n", " Senjō no Valkyria 3 <unk>"]}
    )
    return pd.concat([tokens, lines])


def tokenizer_rows(source):
    common = {"notebook": DATA, "experiment": "tokenizer_speed", "data_source": source, "limit_source": "no limit"}
    rates = {
        ("each distinct word once", 1): 1.9e6,
        ("each distinct word once", 2): 2.6e6,
        ("datasets.map", 1): 5.1e5,
        ("datasets.map", 2): 7.7e5,
    }
    check = {"check": "share of tokens that differ", "check_error": 0.0, "check_tolerance": 0.0}
    rows = []
    for (variant, processes), rate in rates.items():
        params = {"lines": 36718, "cores": 2, "processes": processes}
        spread = {"n": 5, "ci_low": 0.97 * rate, "ci_high": 1.04 * rate}
        rows.append(Row(**common, variant=variant, metric="tokenizer_tokens_per_s", value=rate, params=params, **spread, **check))
    for processes, ratio in ((1, 3.7), (2, 3.4)):
        params = {"lines": 36718, "cores": 2, "processes": processes, "over": "datasets.map"}
        spread = {"n": 5, "ci_low": 0.96 * ratio, "ci_high": 1.05 * ratio}
        rows.append(Row(**common, variant="each distinct word once", metric="speedup", value=ratio, params=params, **spread))
    return rows


def loader_rows(source):
    common = {"notebook": DATA, "experiment": "loader_speed", "data_source": source}
    loaders = {
        ("packed, on the device", 0): 7e4,
        ("packed, from its file", 0): 1.2e5,
        ("packed, from its file, ahead", 2): 4.4e4,
        ("padded, on the device", 0): 3.8e4,
    }
    check = {"check": "share of batches that differ", "check_error": 0.0, "check_tolerance": 0.0, "limit_source": "no limit"}
    rows = []
    for (variant, workers), rate in loaders.items():
        params = {"batch": 64, "length": 1024, "workers": workers}
        spread = {"n": 30, "ci_low": 0.98 * rate, "ci_high": 1.03 * rate}
        rows.append(Row(**common, variant=variant, metric="loader_samples_per_s", value=rate, params=params, **spread, **check))
    for variant, workers, share in (("packed, on the device", 0, 0.0012), ("packed, from its file, ahead", 2, 0.0005)):
        params = {"batch": 64, "length": 1024, "workers": workers, "what": "waiting for the loader"}
        rows.append(Row(**common, variant=variant, metric="share", value=share, params=params))
    return rows


CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def image_rows(source):
    common = {"notebook": DATA, "experiment": "image_pipeline", "data_source": source}
    rows = [
        Row(
            **common,
            variant="CIFAR-10",
            metric="count",
            value=5000.0,
            params={"split": "train", "what": "images of a class", "class": name},
        )
        for name in CLASSES
    ]
    return [
        *rows,
        Row(
            **common,
            variant="all images",
            metric="channel_mean",
            value=0.4914,
            predicted=0.5,
            check="sum over all pixels",
            check_error=1e-9,
            check_tolerance=2e-3,
            params={"split": "train", "channel": "red"},
        ),
    ]


def image_samples(random):
    x, y = np.meshgrid(np.linspace(0, 1, 32), np.linspace(0, 1, 32))
    lines = []
    for label, name in enumerate(CLASSES):
        for index in range(4):
            waves = [np.sin(6 * (x * (label % 4 + 1) + y * (c + index + 1) / 2)) for c in range(3)]
            pixels = np.clip(127 + 90 * np.stack(waves) + random.normal(0, 12, (3, 32, 32)), 0, 255).astype(np.uint8)
            lines.append(
                {"kind": "image", "index": label * 9 + index, "label": label, "class": name, "pixels": pixels.ravel().tolist()}
            )
    return pd.DataFrame(lines)


def epoch_row(experiment, variant, metric, value, epoch, source, **columns):
    return Row(
        notebook=CORE,
        experiment=experiment,
        variant=variant,
        dtype="bf16",
        metric=metric,
        value=value,
        params={"epoch": epoch, "split": "held-out train"} if metric in ("accuracy", "validation_loss") else {"epoch": epoch},
        data_source=source,
        **{"limit_source": "no limit: the entropy of natural text is not known"} | columns,
    )


def language_rows(random, source, floor):
    rows = []
    bound = {"limit": floor, "limit_source": "entropy of the process that wrote it"} if floor else {}
    for epoch in range(1, 9):
        loss = 3.3 + 4 * math.exp(-epoch / 2)
        value = timed(
            random,
            CORE,
            "language_model",
            "transformer",
            "tokens_per_s",
            1.1e6,
            None,
            dtype="bf16",
            params={"epoch": epoch},
            data_source=source,
        )
        rows += [value] + [
            epoch_row("language_model", "transformer", *pair, epoch, source, **bound)
            for pair in (("training_loss", loss), ("validation_loss", loss + 0.25))
        ]
        rows += [
            epoch_row("language_model", "transformer", "peak_memory_gib", 11.2, epoch, source),
            epoch_row("language_model", "transformer", "learning_rate", 3e-4 * (1 - epoch / 10), epoch, source),
        ]
    steady = timed(
        random,
        CORE,
        "language_model",
        "transformer",
        "tokens_per_s",
        1.15e6,
        None,
        dtype="bf16",
        params={"batch": 65536, "step": "steady"},
        data_source=source,
        predicted=1.9e6,
    )
    model = functools.partial(perplexity_row, "language_model", "transformer", source=source, context=512, stride=256)
    return [*rows, steady, model(38.2), model(36.9, split="test")]


def leakage_rows():
    return [
        Row(
            notebook=CORE,
            experiment="leakage",
            variant="causal transformer",
            dtype="fp32",
            metric="validation_loss",
            value=4.16,
            n=8192,
            ci_low=4.155,
            ci_high=4.165,
            predicted=math.log(64),
            limit_source="no limit: an expectation",
            check="standard errors below ln V",
            check_error=-0.5,
            check_tolerance=4.0,
        )
    ]


def perplexity_row(experiment, variant, value, source, **params):
    return Row(
        notebook=CORE,
        experiment=experiment,
        variant=variant,
        metric="perplexity_token",
        value=value,
        n=240_000,
        ci_low=value,
        ci_high=value,
        limit_source="no limit: the entropy of natural text is not known",
        data_source=source,
        params={"split": "valid", "units": 240_000} | params,
    )


def classifier_rows(random, source, bayes):
    rows = []
    for epoch in range(1, 11):
        correct = proportion_estimate(int(10_000 * (0.93 - 0.5 * math.exp(-epoch / 2.5))), 10_000)
        rows += [
            timed(
                random,
                CORE,
                "image_classifier",
                "resnet18",
                "images_per_s",
                3.2e4,
                None,
                dtype="bf16",
                params={"epoch": epoch},
                data_source=source,
            ),
            epoch_row("image_classifier", "resnet18", "training_loss", 1.9 * math.exp(-epoch / 4), epoch, source),
            epoch_row(
                "image_classifier",
                "resnet18",
                "accuracy",
                correct.value,
                epoch,
                source,
                n=correct.n,
                ci_low=correct.ci_low,
                ci_high=correct.ci_high,
                limit=bayes,
                limit_source="Bayes accuracy" if bayes else "no limit: unknown for photographs",
            ),
            epoch_row("image_classifier", "resnet18", "peak_memory_gib", 4.31, epoch, source),
        ]
    tested = proportion_estimate(9_170, 10_000)
    return [
        *rows,
        Row(
            notebook=CORE,
            experiment="image_classifier",
            variant="resnet18",
            dtype="bf16",
            metric="accuracy",
            value=tested.value,
            n=tested.n,
            ci_low=tested.ci_low,
            ci_high=tested.ci_high,
            limit=bayes or 1.0,
            limit_source="best possible",
            data_source=source,
            params={"split": "test", "step": 900},
        ),
    ]


def step_samples(random, floor, count):
    step = np.arange(1, count + 1)
    loss = floor + 5 * np.exp(-step / count * 4) + random.normal(0, 0.12, count)
    return pd.DataFrame({"kind": "step", "step": step, "loss": loss})
