"""Each headline is the best of what its label names, and nothing that the label leaves open is better."""

import math
from dataclasses import dataclass, replace

import pytest

from hyperion.book.export import _only_weak
from hyperion.book.outline import headlines
from hyperion.results import Row


@dataclass
class Rows:
    rows: list[Row]
    unsteady: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    unrecorded: tuple[float, ...] = ()
    image_caveat: str = ""

    def steadiness(self, row: Row) -> str:
        if row.value in self.short:
            return "unknown (5 samples)"
        if row.value in self.unrecorded:
            return "unknown"
        return "no (warm-up)" if row.value in self.unsteady else "yes"


def row(experiment, variant, metric, value, dtype="bf16", **params):
    return Row(
        notebook="nb",
        experiment=experiment,
        variant=variant,
        metric=metric,
        value=value,
        dtype=dtype,
        params=params,
        limit_source="no limit: made up",
    )


def told(*rows, unsteady=(), short=()):
    return {headline.label: headline.row.value for headline in headlines(Rows(list(rows), unsteady, short))}


def test_a_reference_models_best_step_is_looked_for_in_both_experiments():
    rates = [
        row("model_steps", "resnet50", "samples_per_s", 766.0, "fp32", batch=32),
        row("model_steps", "resnet50", "samples_per_s", 1483.0, batch=32),
        row("batch_scaling", "resnet50", "samples_per_s", 2306.0, batch=1024),
        row("model_steps", "vit_b_16", "samples_per_s", 335.0, "fp32", batch=32),
        row("batch_scaling", "vit_b_16", "samples_per_s", 31.0, batch=1),
    ]
    assert told(*rates, row("model_steps", "vit_b_16", "samples_per_s", 330.0, batch=32, mode="compiled")) == {
        "resnet50, training, bf16, batch 1,024": 2306.0,
        "vit_b_16, training, fp32, batch 32": 335.0,
    }
    fastest = row("model_steps", "vit_b_16", "samples_per_s", 2900.0, batch=32, mode="compiled")
    assert told(*rates, fastest)["vit_b_16, training, bf16, compiled, batch 32"] == 2900.0


def product(experiment, variant, value, dtype="bf16", m=4096, n=4096, k=4096, **params):
    return row(experiment, variant, "gemm_tflops", value, dtype, m=m, n=n, k=k, **params)


def test_the_largest_square_product_is_quoted_and_no_faster_one_of_another_shape():
    """The fastest shape differs between launches, and a median over launches must not mix shapes."""
    rows = [product("gemm", "torch.mm", 741.0), product("gemm", "torch.mm", 700.0, m=8192, n=8192, k=8192)]
    rows += [product("gemm", "torch.mm", 750.0, m=8192, n=9000, k=8192), product("best_products", "fastest found", 790.0)]
    rows += [product("best_products", "finalist", 780.0, m=16384, n=16384, k=16384)]
    assert told(*rows) == {"matrix product, 8,192 × 8,192, bf16, cold caches": 700.0}
    fp8 = [product("best_products", "finalist", value, "fp8", m=m, n=m, k=m) for value, m in ((1300.0, 7168), (1290.0, 8192))]
    assert told(*rows, *fp8)["matrix product, 8,192 × 8,192, fp8, cold caches"] == 1290.0


def test_an_unsteady_product_is_replaced_by_no_other_shape():
    rows = [product("gemm", "torch.mm", 741.0), product("gemm", "torch.mm", 700.0, m=8192, n=8192, k=8192)]
    assert told(*rows, unsteady=(700.0,)) == {}


def test_a_baseline_of_several_seeds_is_quoted_in_the_mean():
    one = row("image_classifier", "resnet18", "accuracy", 0.948, split="test")
    assert told(one) == {"resnet18, accuracy, bf16, test split": 0.948}
    each = row("image_classifier", "resnet18", "accuracy", 0.948, split="test, every seed", seed=0)
    mean = row("image_classifier", "resnet18", "accuracy", 0.946, split="test, mean of seeds", seeds=5)
    words = row("language_model", "lm", "perplexity_word", 88.0, split="test")
    # The number of steps was chosen on the validation split.
    tuned = row("language_model", "lm", "perplexity_word", 92.0, split="valid")
    assert told(one, each, mean, words, tuned) == {
        "resnet18, accuracy, bf16, test split, mean of 5 seeds": 0.946,
        "lm, perplexity per word, bf16, test split": 88.0,
    }


def step_times(experiment, variant, **params):
    loops = ("hyperion", "plain", "plain, captured")
    return [row(experiment, variant, "step_time_s", 0.05, loop=loop, **params) for loop in loops]


def test_a_ratio_over_a_loop_that_the_host_limits_is_no_headline():
    """Eager calls of a small batch, and the plain loop of ResNet-18, wait for the host: their speed is that of the host."""
    shared = {"model": "lm", "batch": 8}
    rows = [row("compilation", "reduce-overhead", "inference_time_s", 4.5e-4, **shared)]
    rows += [row("compilation", "reduce-overhead", "speedup", 2.8, **shared)]
    rows += [row("image_training_speed", "resnet18", "speedup", 4.3, batch=128, compiled=True)]
    assert told(*rows) == {}
    ratio = row("language_training_speed", "lm", "speedup", 1.118, batch=65536, compiled=True)
    assert told(ratio) == {}, "the times of its loops are unknown"
    assert told(ratio, *step_times("language_training_speed", "lm", batch=65536)) == {
        "lm, training, batch 65,536 tokens: this library over a plain compiled loop": 1.118
    }


def test_the_ratio_over_a_plain_loop_in_a_graph_is_a_headline_and_no_ratio_of_two_rungs_is():
    shared = {"batch": 65536, "compiled": True}
    rows = [row("language_training_speed", "lm", "speedup", 1.11, over="plain, captured", **shared)]
    rows += [row("language_training_speed", "lm", "speedup", 1.02, over="plain", rung="plain, captured", **shared)]
    rows += [row("image_training_speed", "resnet18", "speedup", 1.03, over="plain, captured", **shared | {"batch": 512})]
    rows += [row("image_training_speed", "resnet18", "speedup", 1.2, over="plain, captured", rung="x", **shared | {"batch": 512})]
    rows += step_times("language_training_speed", "lm", **shared)
    rows += step_times("image_training_speed", "resnet18", **shared | {"batch": 512})
    assert told(*rows) == {
        "lm, training, batch 65,536 tokens: this library over the same plain loop in a graph": 1.11,
        "resnet18, training, batch 512: this library over the same plain loop in a graph": 1.03,
    }


def test_a_ratio_of_two_loops_is_a_headline_only_if_the_times_of_both_were_steady():
    shared = {"batch": 65536, "compiled": True}
    ratio = row("language_training_speed", "lm", "speedup", 1.11, over="plain", loop="hyperion", **shared)
    times = [row("language_training_speed", "lm", "step_time_s", 0.06, loop="plain", **shared)]
    times += [row("language_training_speed", "lm", "step_time_s", 0.05, loop="hyperion", **shared)]
    other = row("language_training_speed", "lm", "step_time_s", 0.04, loop="plain, captured", **shared)
    label = "lm, training, batch 65,536 tokens: this library over a plain compiled loop"
    assert told(ratio, *times, other) == told(ratio, *times, other, unsteady=(0.04,)) == {label: 1.11}
    assert told(ratio, *times, other, unsteady=(0.06,)) == told(ratio, *times, other, unsteady=(0.05,)) == {}
    assert told(ratio, *times, other, short=(0.06,)) == told(ratio, *times, other, short=(0.05,)) == {}


def test_a_ratio_of_two_formats_is_a_headline_only_if_the_times_of_both_were_steady():
    shared = {"batch": 512, "mode": "graph"}
    rows = [row("precision_variants", "resnet18", "speedup", 7.6, over="fp32", **shared)]
    rows += [row("precision_variants", "resnet18", "step_time_s", time_s, dtype, **shared) for dtype, time_s in _TIMES_S.items()]
    assert (
        told(*rows)
        == told(*rows, unsteady=(0.015,))
        == {"resnet18, training step as a graph: bf16 over IEEE fp32, TF32 off": 7.6}
    )
    assert told(*rows, unsteady=(0.07,)) == told(*rows, unsteady=(0.009,)) == {}
    assert [one.steady for one in headlines(Rows(rows))] == ["yes"], "a ratio is as steady as its times"
    for time_s in (0.07, 0.009):
        assert [one.steady for one in headlines(Rows(rows, unrecorded=(time_s,)))] == ["unknown"]


def test_the_ratio_of_two_speed_ups_has_an_interval_that_contains_both_uncertainties():
    shared = {"batch": 512, "mode": "graph"}
    ratios = [row("precision_variants", "resnet18", "speedup", value, dtype, over="fp32", **shared) for dtype, value in _RATIOS]
    ratios = [
        replace(r, ci_low=r.value / low, ci_high=r.value * high)
        for r, low, high in zip(ratios, (1.03, 1.02), (1.04, 1.05), strict=True)
    ]
    times = [row("precision_variants", "resnet18", "step_time_s", time_s, dtype, **shared) for dtype, time_s in _TIMES_S.items()]
    found = {one.label.rpartition("graph: ")[2]: one.row for one in headlines(Rows([*ratios, *times]))}
    over = found["bf16 over tf32"]
    assert over.value == 2.0
    # bf16 is at its lower end while TF32 is at its upper end, and the other way round.
    assert math.log(over.value / over.ci_low) == pytest.approx(math.hypot(math.log(1.03), math.log(1.05)))
    assert math.log(over.ci_high / over.value) == pytest.approx(math.hypot(math.log(1.04), math.log(1.02)))
    assert list({one.label: one for one in headlines(Rows([*ratios, *times], unsteady=(0.015,)))}) == [
        "resnet18, training step as a graph: bf16 over IEEE fp32, TF32 off"
    ]


_RATIOS = (("bf16", 8.0), ("tf32", 4.0))
_TIMES_S = {"fp32": 0.07, "tf32": 0.015, "bf16": 0.009}


def test_the_format_of_a_training_is_the_one_that_speeds_it_up_most():
    rates = [
        row("precision_variants", "resnet18", "speedup", value, dtype, batch=512, over="fp32", mode="graph")
        for dtype, value in (("tf32", 5.0), ("bf16", 7.6), ("fp16", 9.3))
    ]
    # An eager step depends on the speed of the host.
    eager = row("precision_variants", "resnet18", "speedup", 9.9, "bf16", batch=512, over="fp32")
    assert told(eager, *rates) == {
        "resnet18, training step as a graph: fp16 over tf32": pytest.approx(9.3 / 5.0),
        "resnet18, training step as a graph: fp16 over IEEE fp32, TF32 off": 9.3,
    }
    assert told(*rates[1:]) == {"resnet18, training step as a graph: fp16 over IEEE fp32, TF32 off": 9.3}
    assert told(eager) == {}


@pytest.mark.parametrize(("small_s", "host_bound"), [(0.0194, True), (0.0103, True), (0.0101, False), (0.0053, False)])
def test_a_step_that_the_host_limits_is_no_headline(small_s, host_bound):
    """The host needs the same time for each batch, the device a quarter of the time for a quarter of the batch."""
    rows = []
    for batch, seconds in ((16, small_s), (64, 0.0204)):
        rows.append(row("batch_scaling", "resnet50", "step_time_s", seconds, batch=batch))
        rows.append(row("batch_scaling", "resnet50", "samples_per_s", batch / seconds, batch=batch))
    assert ("resnet50, training, bf16, batch 64" not in told(*rows)) == host_bound


def test_warm_caches_and_small_arrays_give_no_headline():
    shared = {"m": 4096, "n": 4096, "k": 4096}
    rows = [
        row("gemm", "torch.mm", "gemm_tflops", 741.0, cache="cold", **shared),
        row("gemm", "torch.mm", "gemm_tflops", 750.0, cache="hot", **shared),
        row("bandwidth", "copy", "bandwidth_gb_s", 9000.0, "fp32", cache="cold", elements=10**6),
        row("bandwidth", "copy", "bandwidth_gb_s", 4271.0, "fp32", cache="cold", elements=5 * 10**8),
        row("bandwidth", "copy", "bandwidth_gb_s", 4300.0, "fp32", cache="hot", elements=5 * 10**8),
    ]
    assert told(*rows) == {"matrix product, 4,096 × 4,096, bf16, cold caches": 741.0, "memory copy, fp32, largest arrays": 4271.0}


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduces_over_other_numbers_of_ranks_are_another_kind(ranks):
    rates = [row("collectives", "all_reduce", "busbw_gb_s", 100.0 * n, "fp32", bytes=64, ranks=n) for n in (2, 4)]
    assert told(*rates)[f"all-reduce over {ranks} devices"] == 100.0 * ranks


def test_strong_scaling_stands_beside_weak_on_the_most_devices():
    def cell(model, mode, ranks, value):
        return row("scaling", model, "scaling_efficiency", value, model=model, strategy="ddp", mode=mode, ranks=ranks)

    cells = [cell(model, mode, ranks, 0.9) for ranks in (2, 4) for mode in ("strong", "weak") for model in ("a", "b")]
    cells += [row("scaling", model, "share", 0.1, what="exposed communication") for model in ("a", "b")]
    labels = [f"{model}, DDP: {mode} scaling to 4 devices" for model in ("a", "b") for mode in ("weak", "strong")]
    assert list(told(*cells)) == labels
    # Each step of "a" has another time; strong scaling on one device is no row, because it is the same step as weak scaling.
    steps = {0.1: ("weak", 1), 0.2: ("weak", 2), 0.4: ("weak", 4), 0.3: ("strong", 4)}
    cells += [row("scaling", "a", "step_time_s", time, mode=mode, ranks=ranks) for time, (mode, ranks) in steps.items()]
    assert list(told(*cells, unsteady=(0.2,))) == labels
    assert list(told(*cells, unsteady=(0.1,))) == labels[2:]
    assert list(told(*cells, unsteady=(0.3,))) == [labels[0], *labels[2:]]


def test_weak_scaling_without_strong_scaling_is_explained():
    both = ["gpt2, DDP: weak scaling to 4 devices", "gpt2, DDP: strong scaling to 4 devices", "memory copy"]
    assert _only_weak(both) == _only_weak([]) == ""
    assert "promises too much" in _only_weak([*both, "resnet18, DDP: weak scaling to 4 devices"])


@pytest.mark.slow
def test_no_two_headlines_of_a_run_have_one_label(material, cpu_material):
    for of in (material, cpu_material):
        labels = [headline.label for headline in headlines(of)]
        assert len(labels) > 10 and len(set(labels)) == len(labels)


def test_a_steady_value_of_a_busy_machine_is_shown_as_busy():
    busy = replace(product("gemm", "torch.mm", 700.0), throttle="power+busy")
    assert [one.steady for one in headlines(Rows([busy]))] == ["busy"]
    assert headlines(Rows([busy], unsteady=(700.0,))) == []
    assert [one.steady for one in headlines(Rows([replace(busy, throttle="power")]))] == ["yes"]
