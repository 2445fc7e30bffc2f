"""Each experiment at toy sizes: which rows it leaves, that they obey the rules, and that the floors hold."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hyperion.book import pick
from hyperion.chapter import Context, experiment_named, load_profile
from hyperion.errors import HyperionError
from hyperion.experiments.baselines import image_classifier
from hyperion.experiments.baselines.image_classifier import ImageClassifierOptions, TrainedImages, compile_training
from hyperion.models import resnet18
from hyperion.results import RowError, Run
from hyperion.training import History, seed_everything
from hyperion.training.loop import EpochRecord
from hyperion.workloads import datasets
from hyperion.workloads.twins import ONE_BY_ONE, REPLAYED, captured_parity, parity_row
from tests.training.small import small_batches, small_engine

SYNTHETIC = {"lines": {"train": 4000, "valid": 60, "test": 60}, "images": {"train": 600, "test": 200}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experiments")


@pytest.fixture(scope="module", autouse=True)
def own_data_and_one_thread(folder):
    """Toy models gain nothing from threads, and on busy cores threads that wait for each other cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYPERION_DATA", str(folder / "data"))
        yield
    torch.set_num_threads(threads)


def perform(name: str, sizes: dict, folder, upstream=()):
    """Run an experiment here and store its rows, which validates every one of them."""
    context = Context(
        notebook="toy",
        experiment=name,
        sizes=sizes,
        data_source="synthetic",
        synthetic=SYNTHETIC,
        workspace=folder / "work" / name,
        upstream=list(upstream),
    )
    result = experiment_named(name).run(context, lambda done, total, note: None)
    place = folder / f"run-{name}"
    run = Run.open(place) if (place / "run.json").exists() else Run.create(place, {})
    run.record("toy", name, result.rows, result.samples, input_hash="toy", source=result.source)
    assert run.rows("toy", name) == result.rows
    return result, context


@pytest.fixture(scope="module")
def ceilings(folder):
    gemm_sizes = {
        "dtypes": ["fp32", "tf32", "bf16"],
        "sizes": [64, 96],
        "time_limit_s": 0.02,
        "cross_check_dtype": "fp32",
        "cross_check_calls": 2,
    }
    gemm, _ = perform("gemm", gemm_sizes, folder)
    bandwidth, _ = perform("bandwidth", {"dtype": "fp32", "millions": [0.01, 0.02], "time_limit_s": 0.02}, folder)
    return gemm, bandwidth


@pytest.mark.slow
def test_gemm_leaves_a_row_for_each_cell_and_a_reason_where_there_is_none(ceilings):
    rows = [row for row in ceilings[0].rows if row.variant == "torch.mm"]
    assert {(row.dtype, row.params["m"]) for row in rows} == {(d, m) for d in ("fp32", "tf32", "bf16") for m in (64, 96)}
    assert all("unsupported" in row.value_reason for row in rows if row.dtype == "tf32")
    measured = [row for row in rows if row.value is not None]
    assert {row.params["cache"] for row in measured} == {"cold", "hot"}
    assert len(measured) == 8 and all(row.n >= 30 and row.check == "float64 slice" for row in measured)


@pytest.mark.slow
def test_gemm_is_held_against_a_plain_loop_at_every_size(ceilings):
    ratios = [row for row in ceilings[0].rows if row.metric == "speedup"]
    assert [row.params["m"] for row in ratios] == [64, 96]
    rates = {(row.variant, row.params["m"]): row.value for row in ceilings[0].rows if "plain_loop_calls" in row.params}
    for row in ratios:
        m = row.params["m"]
        assert row.value == pytest.approx(rates["harness", m] / rates["plain loop", m])


@pytest.mark.slow
def test_bandwidth_in_a_cache_has_no_limit_and_says_why(ceilings):
    assert {row.variant for row in ceilings[1].rows} == {"copy", "scale", "add", "triad"}
    assert all(row.limit is None and row.limit_source.startswith("no limit: ") for row in ceilings[1].rows)


@pytest.mark.slow
def test_roofline_ridge_is_the_quotient_of_the_measured_ceilings(ceilings, folder):
    upstream = ceilings[0].rows + ceilings[1].rows
    result, _ = perform("roofline", {}, folder, upstream)
    rates = [row for row in upstream if (row.metric, row.dtype) == ("gemm_tflops", "bf16")]
    best = max(row.value for row in rates if row.params["cache"] == "cold")
    largest = [row.value for row in ceilings[1].rows if row.params["elements"] == 20_000]
    ridge = {row.dtype: row.value for row in result.rows}
    assert ridge["bf16"] == pytest.approx(best * 1e3 / max(largest))
    assert "tf32" not in ridge


def test_forecasts_on_an_unknown_device_are_null_with_the_reason(folder):
    context = Context(notebook="toy", experiment="roofline", sizes={}, workspace=folder)
    assert experiment_named("roofline").forecast(context) == []
    sizes = {"dtype": "fp32", "millions": [1], "time_limit_s": 0.1}
    for forecast in experiment_named("bandwidth").forecast(replace(context, experiment="bandwidth", sizes=sizes)):
        assert forecast.estimate is None and forecast.basis


@pytest.fixture(scope="module")
def text(folder):
    return perform("text_pipeline", {}, folder)[0]


def test_text_pipeline_counts_what_the_corpus_has(text):
    counts = {(r.params.get("split"), r.params["what"]): r.value for r in text.rows if r.metric == "count"}
    assert counts["train", "lines"] == 4000 and counts["valid", "words with <eos>"] == 60 * 16
    assert counts["train", "tokens"] == 4000 * 16  # each word of the synthetic text is one token
    assert {row.data_source for row in text.rows} == {"synthetic"}
    assert set(text.samples["kind"]) == {"token", "line"}
    assert text.samples.loc[text.samples["kind"] == "token", "count"].sum() == 4000 * 16


def test_image_pipeline_counts_and_shows_every_class(folder):
    result, _ = perform("image_pipeline", {"batch_size": 32, "calls": 1, "time_limit_s": 0.01}, folder)
    (rate,) = [row for row in result.rows if row.metric == "loader_samples_per_s"]
    assert rate.check_error == 0 and rate.n >= 30 and rate.value > 0
    per_class = [r.value for r in result.rows if r.params.get("what") == "images of a class" and r.params["split"] == "train"]
    assert len(per_class) == 10 and sum(per_class) == 600
    assert len(result.samples) == 40 and len(result.samples["pixels"][0]) == 3 * 32 * 32


def test_pipelines_say_what_is_official_and_what_splits_share(text, folder):
    images, _ = perform("image_pipeline", {"batch_size": 32, "calls": 1, "time_limit_s": 0.01}, folder)
    for result, records in ((text, {"valid": 60, "test": 60}), (images, {"test": 200})):
        shares = {(r.params["what"], r.params.get("split")): r for r in result.rows if r.metric == "share"}
        official = shares["files with the publisher's checksum", None]
        assert official.value is None and "no publisher" in official.value_reason
        for split, count in records.items():
            row = shares["records that stand in another split", split]
            assert (row.value, row.check_error, row.params["records"]) == (0.0, 0.0, count)


@pytest.mark.slow
@pytest.mark.mirror
def test_rows_of_the_real_text_say_which_files_are_official(mirror, folder, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    context = Context(
        notebook="toy", experiment="text_pipeline", sizes={}, data_source="mirror", synthetic=SYNTHETIC, workspace=folder
    )
    corpus, _, prepared = datasets.text(context)
    official, *overlaps = datasets.proof_rows(context, corpus, prepared)
    for row in (official, *overlaps):
        row.validate()
    assert official.params["files"] == 3 and official.params["official"] == (official.value == 1)
    assert [(row.params["split"], row.value, row.params["records"]) for row in overlaps] == [
        ("valid", 0.0, 1746),
        ("test", 0.0, 1995),
    ]


@pytest.mark.slow
def test_tokenizers_write_the_same_tokens_and_are_compared_in_turn(folder):
    sizes = {"lines": 100, "processes": [1], "cores": 1, "samples": 3, "time_limit_s": 0.01}
    result, context = perform("tokenizer_speed", sizes, folder)
    rates = {row.variant: row for row in result.rows if row.metric == "tokenizer_tokens_per_s"}
    assert set(rates) == {"each distinct word once", "datasets.map"}
    assert all(row.check_error == 0 for row in rates.values())
    (speedup,) = [row for row in result.rows if row.metric == "speedup"]
    assert speedup.value == pytest.approx(rates["each distinct word once"].value / rates["datasets.map"].value)
    forecast = experiment_named("tokenizer_speed").forecast(context)[0]
    assert (forecast.variant, forecast.metric, forecast.params) == (speedup.variant, "speedup", speedup.params)


def test_loaders_deliver_the_same_batches_and_a_step_tells_its_wait(text, folder):
    sizes = {
        "sequence_length": 16,
        "batch_size": 8,
        "workers": [1, 2],
        "model": "lm_d128_h4_l2",
        "steps": 5,
        "calls": 2,
        "time_limit_s": 0.01,
    }
    result, context = perform("loader_speed", sizes, folder, text.rows)
    rates = [row for row in result.rows if row.metric == "loader_samples_per_s"]
    assert len(rates) == 5 and all(row.check_error == 0 for row in rates)
    shares = {(r.variant, r.params["workers"], r.params["what"]): r.value for r in result.rows if r.metric == "share"}
    carrying = {variant: share for (variant, _, what), share in shares.items() if what == "positions that carry a loss"}
    # A line of the synthetic text has 16 tokens: its last position has no target.
    assert carrying == {"packed, on the device": 1.0, "padded, on the device": 15 / 16}
    waiting = [share for (_, _, what), share in shares.items() if what == "waiting for the loader"]
    assert len(waiting) == 3 and all(0 < share < 1 for share in waiting)
    (forecast,) = experiment_named("loader_speed").forecast(context)
    assert forecast.estimate is None and "no ceilings" in forecast.basis


def test_counting_models_cannot_pass_the_floor_and_the_bigram_sees_nothing_in_it(text, folder):
    result, _ = perform("ngram_baselines", {}, folder)
    for row in result.rows:
        assert row.value > row.limit
    # The words and the newline are one token each, so both perplexities have the same denominator.
    by_key = {(row.variant, row.params["split"], row.metric): row.value for row in result.rows}
    assert by_key["unigram", "valid", "perplexity_token"] == pytest.approx(by_key["unigram", "valid", "perplexity_word"])


@pytest.mark.slow
def test_language_model_scores_once_a_seed_above_the_floor_and_resumes_to_the_same(text, folder):
    sizes = {
        "model": "lm_d128_h4_l2",
        "sequence_length": 32,
        "batch_size": 4,
        "steps": 6,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "precision": "auto",
        "evaluate_every": 1,
        "checkpoint_every": 2,
        "evaluation_batch_size": 8,
        "stride": 16,
        "steady_time_limit_s": 0.05,
        "dropout": 0.2,
        "seeds": 2,
        "beats": {"baseline": "unigram", "factor": 1.0, "floor_share": 1.0},
    }
    result, context = perform("language_model", sizes, folder, text.rows)
    excess = [row for row in result.rows if row.metric == "excess_loss_nats"]
    assert len(excess) == 2 and all(row.value > 0 for row in excess)
    scored = next(r for r in result.rows if r.metric == "perplexity_token" and r.params["split"] == "valid")
    assert math.log(scored.value / scored.limit) == pytest.approx(excess[0].value)
    assert scored.n == 60 * 16  # every token once
    words, byte = (pick(result.rows, m, split="valid") for m in ("perplexity_word", "bits_per_byte"))
    assert words.value == pytest.approx(scored.value), "each word of the synthetic text is one token"
    assert byte.value == pytest.approx(math.log2(words.value) * words.params["units"] / byte.params["units"])
    line = 15 * (1 + 4) + 2  # a space and four letters a word, a space, the newline
    assert byte.params["units"] == 60 * line and scored.params["dropout"] == 0.2
    for split in ("valid", "test"):
        each = [r for r in result.rows if r.metric == "perplexity_word" and r.params.get("split") == f"{split}, every seed"]
        assert [r.params["seed"] for r in each] == [0, 1] and each[0].value != each[1].value
        of_all = f"{split}, mean of seeds"
        mean, deviation = (pick(result.rows, f"perplexity_word{sd}", split=of_all) for sd in ("", "_sd"))
        assert (mean.n, mean.value) == (2, pytest.approx((each[0].value + each[1].value) / 2))
        assert deviation.value == pytest.approx(abs(each[0].value - each[1].value) / 2**0.5)
    assert len(result.samples.query("kind == 'step' and seed == 1")) == 6
    forecast = experiment_named("language_model").forecast(context)[0]
    assert (
        forecast.params.items()
        <= next(r for r in result.rows if r.metric == forecast.metric and "batch" in r.params).params.items()
    )
    # The workspace holds the finished checkpoint: the same call trains nothing again and scores the same.
    again = experiment_named("language_model").run(context, lambda *report: None)
    assert next(r for r in again.rows if r.key == scored.key).value == scored.value


def test_recorded_steps_that_train_another_way_are_refused(text, folder):
    context = Context(notebook="toy", experiment="language_model", sizes={}, workspace=folder)

    def losses(rate: float) -> np.ndarray:
        seed_everything(0)
        engine, batches = small_engine(learning_rate=rate), small_batches()
        return np.array([float(engine.train_step(batches.next_batch()).loss) for _ in range(20)])

    plain = losses(3e-2)
    same = parity_row(context, "m", "fp32", {REPLAYED: losses(3e-2), ONE_BY_ONE: plain}, "synthetic")
    other = parity_row(context, "m", "fp32", {REPLAYED: losses(3e-3), ONE_BY_ONE: plain}, "synthetic")
    assert same.check_error == 0 and other.check_error > other.check_tolerance
    asked = []

    def begin(capture: bool):
        asked.append(capture)
        return small_engine(capture=capture), small_batches().next_batch

    assert captured_parity(context, "m", begin, "synthetic") == ([], []) and asked == [True], "a CPU records nothing"


@pytest.mark.slow
def test_a_compiled_classifier_is_evaluated_uncompiled_and_computes_the_same():
    torch.manual_seed(0)
    model, images = resnet18(10, 4), torch.randn(8, 3, 32, 32)
    expected = model(images)  # its statistics of the batch are those of the next call too
    calls = []

    def backend(graph, inputs):
        calls.append("compiled")
        return graph

    compile_training(model, backend)
    torch.testing.assert_close(model(images), expected)
    assert calls == ["compiled"]
    model.eval()(images[:5])
    assert calls == ["compiled"]


IMAGE_SIZES = {
    "width": 4,
    "batch_size": 50,
    "epochs": 2,
    "held_out_images": 100,
    "learning_rate": 0.1,
    "warmup_share": 0.2,
    "weight_decay": 5e-4,
    "label_smoothing": 0.1,
    "reaches": 0.0,
    "border": "reflect",
    "hole": 8,
    "precision": "auto",
    "target": 0.05,
    "compiled": False,
    "evaluate_every": 1,
    "checkpoint_every": 5,
    "steady_time_limit_s": 0.05,
    "seeds": 2,
}


@pytest.mark.slow
def test_image_classifier_tests_once_a_seed_and_knows_the_best_possible(folder):
    result, _ = perform("image_classifier", IMAGE_SIZES, folder)
    accuracies = [row for row in result.rows if row.metric == "accuracy"]
    splits = ["held-out train", "held-out train", "test", "test, every seed", "test, every seed", "test, mean of seeds"]
    assert [row.params["split"] for row in accuracies] == splits
    held_out, test, first, second, mean = accuracies[0], *accuracies[2:]
    assert (held_out.n, test.n, mean.n) == (100, 200, 2)
    # Only of the whole test split is it known how many labels were changed.
    assert [row.limit for row in (held_out, test, first, second, mean)] == [None, 0.9, 0.9, 0.9, 0.9]
    assert test.value == first.value and mean.value == pytest.approx((first.value + second.value) / 2)
    deviation = next(row for row in result.rows if row.metric == "accuracy_sd")
    assert deviation.value == pytest.approx(abs(first.value - second.value) / 2**0.5)
    times = [row for row in result.rows if row.metric == "time_to_accuracy_s"]
    evaluated = result.samples.query("kind == 'evaluation' and seed == 0")
    assert [row.params.get("seed") for row in times] == [None, 0, 1]
    assert times[0].value == evaluated["time_s"].iloc[0] < evaluated["time_s"].iloc[1]
    assert (result.samples["kind"] == "steady step").sum() >= 30
    epochs = [row for row in result.rows if row.metric == "epoch_time_s"]
    assert [row.params["epoch"] for row in epochs] == [1, 2] and all(row.value > 0 for row in epochs)
    assert {row.variant for row in result.rows} == {"resnet18_w4"}
    mfu = next(row for row in result.rows if row.metric == "mfu")
    assert mfu.value is None and "no peak" in mfu.value_reason  # no CPU has a published one


@pytest.mark.parametrize(("precision", "compared"), [("bf16", True), ("fp32", False)])
def test_image_classifier_compares_its_accuracies_with_those_in_fp32(precision, compared, folder, monkeypatch):
    """The trainings are replaced, because bf16 is slow on a CPU."""
    tested = {("bf16", 0): 0.92, ("bf16", 1): 0.94, ("fp32", 0): 0.93, ("fp32", 1): 0.96}

    def trained(data, seed, report):
        dtype = data.precision.dtype
        record = EpochRecord(1, 10, 10, 1.0, 0.1, 100, 1.0, 10, 100.0, "peak_rss_gib", None, {"accuracy": 0.9})
        history = History("image", losses=[1.0] * 10, epochs=[record])
        return (
            None,
            None,
            TrainedImages(seed, "resnet18_w4", dtype, 10, history, {"accuracy": tested[dtype, seed], "images": 100}),
        )

    monkeypatch.setattr(image_classifier, "_train", trained)
    monkeypatch.setattr(image_classifier, "_best_possible", lambda *rest: (None, "no limit: toy"))
    context = Context(notebook="toy", experiment="image_classifier", sizes={}, workspace=folder)
    options = ImageClassifierOptions.parse(IMAGE_SIZES | {"precision": precision, "compare_with_fp32": True}, "image_classifier")
    splits = SimpleNamespace(test=([], []))
    data = image_classifier._Data(context, options, SimpleNamespace(source="mirror", test_images=[]), splits)
    runs = [trained(data, seed, None)[2] for seed in (0, 1)]
    rows, curves = image_classifier._compared_with_fp32(data, runs, lambda *progress: None)
    (difference,) = [row for row in rows if row.metric == "accuracy_difference"]
    if not compared:
        assert difference.value_reason == "no difference: the training itself runs in fp32" and len(rows) == 1 and not curves
        return
    assert (difference.n, difference.dtype, difference.params["from"]) == (2, "bf16", "fp32")
    # Two differences, -0.01 and -0.02: Student's t for one degree of freedom is 12.7062.
    assert difference.value == pytest.approx(-0.015) and difference.ci_low == pytest.approx(-0.015 - 12.7062 * 0.005, rel=1e-4)
    assert {row.dtype for row in rows if row.metric == "accuracy"} == {"fp32"}
    # The curves of the other precision have kinds of their own, so that no figure mixes them.
    assert {kind for curve in curves for kind in curve["kind"]} == {"step, fp32", "evaluation, fp32"}


def test_a_comparison_of_accuracies_needs_two_seeds():
    with pytest.raises(HyperionError, match="at least two seeds"):
        ImageClassifierOptions.parse(IMAGE_SIZES | {"seeds": 1, "compare_with_fp32": True}, "image_classifier")


@pytest.mark.parametrize(
    ("epochs", "fault"),
    [({"epoch": 1}, "option 'epoch' .*: there is no such option"), ({}, "option 'epochs' .*: it has no value")],
)
def test_a_misspelt_option_is_named_and_not_the_one_it_stands_for(epochs, fault):
    with pytest.raises(HyperionError, match=fault):
        ImageClassifierOptions.parse({name: size for name, size in IMAGE_SIZES.items() if name != "epochs"} | epochs, "toy")


@pytest.mark.slow
def test_the_leakage_check_refuses_a_model_that_sees_the_future(folder, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v))
    sizes = load_profile("smoke").sizes("leakage")
    with pytest.raises(RowError, match="failed its check 'standard errors below ln V"):
        perform("leakage", sizes, folder)
