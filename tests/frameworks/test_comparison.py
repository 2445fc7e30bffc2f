"""Comparisons: keys never collide, unequal work is refused, and the texts are right for a win, a tie and a loss."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hyperion.errors import HyperionError
from hyperion.frameworks.comparison import (
    Price,
    choose_prices,
    compare_results,
    draw,
    load_results,
    markdown,
    price_note,
    ratio,
    verdict,
)
from hyperion.frameworks.config import GpuPrices
from hyperion.frameworks.result import Result, write_result
from tests.frameworks.results import result


def test_a_win_a_tie_and_a_loss_have_the_right_text():
    fast, slow, same = result(0.5), result(1.0, framework="deep"), result(0.501, framework="fsdp")
    win = verdict(fast, slow)
    assert win.startswith("amd tran llama is 2.0") and "as fast as amd deep llama" in win
    loss = verdict(slow, fast)  # the ratio is 0.5, so the other one is named as faster, with the inverted interval
    assert loss.startswith("amd tran llama is 2.0") and "as fast as amd deep llama" in loss
    assert " tie: " in verdict(fast, same) and " tie: " in verdict(same, fast)


@given(st.floats(0.1, 10), st.integers(1, 4), st.integers(1, 4))
def test_the_ratio_is_that_of_tokens_per_second_and_gpu(factor, gpus, other_gpus):
    first = result(1.0, num_gpus=8 * gpus, gradient_accumulation_steps=8, global_batch_size=64 * gpus)
    second = result(factor, num_gpus=8 * other_gpus, gradient_accumulation_steps=16, global_batch_size=128 * other_gpus)
    found = ratio(first, second)
    metrics = [one.performance_metrics.tokens_per_second_per_gpu for one in (first, second)]
    assert found.value == pytest.approx(metrics[0] / metrics[1], rel=0.05)
    assert found.ci_low <= found.value <= found.ci_high


@given(st.floats(0.2, 5), st.floats(0, 0.3))
def test_the_faster_one_is_named_first_in_every_verdict(factor, jitter):
    first, second = result(1.0, jitter=jitter), result(factor, jitter=jitter, framework="deep")
    said = verdict(first, second)
    if " tie: " not in said:
        assert said.startswith("amd tran llama is" if factor > 1 else "amd deep llama is")
        assert float(said.split(" is ")[1].split(" x")[0]) >= 1


def test_too_few_steps_are_not_ranked():
    assert "not ranked: 2 timed steps are too few" in verdict(result(0.5, steps=3), result(5.0, steps=3, framework="deep"))
    assert "not ranked: 2 timed steps are too few" in verdict(result(0.5, steps=3), result(5.0, framework="deep"))


def test_each_result_is_compared_with_the_fastest_of_its_model():
    results = [result(0.5, framework="deep"), result(0.1), result(1.0, framework="fsdp")]
    first, second = compare_results(results).verdicts
    assert first.startswith("amd tran llama is 5.0") and second.startswith("amd tran llama is 10.0")


def written(tmp_path, *results: Result):
    for one in results:
        write_result(one, tmp_path)
    return tmp_path


def test_the_platform_is_that_of_the_content_and_filters_select(tmp_path):
    folder = written(tmp_path, result(), result(platform="nvd"), result(framework="deep"), result(precision="fp32"))
    (folder / "train_amd_tran_llama.json").rename(folder / "train_nvd_misnamed.json")
    assert [one.key[:2] for one in load_results(folder)] == [("amd", "deep"), ("amd", "tran"), ("amd", "tran"), ("nvd", "tran")]
    assert [one.key[1] for one in load_results(folder, ["amd"], ["deep"])] == ["deep"]
    assert [one.precision for one in load_results(folder, precisions=["fp32"])] == ["fp32"]
    assert len(load_results(folder, ["amd,nvd"])) == 4
    with pytest.raises(HyperionError, match="no result is selected") as error:
        load_results(folder, ["cpu"])
    assert "nvd tran llama" in error.value.what and "--platform" in (error.value.next_step or "")
    with pytest.raises(HyperionError, match="no file"):
        load_results(tmp_path / "absent")


def test_two_files_of_one_combination_are_refused(tmp_path):
    folder = written(tmp_path, result())
    (folder / "train_copy.json").write_bytes((folder / "train_amd_tran_llama.json").read_bytes())
    with pytest.raises(HyperionError, match=r"train_copy\.json and train_amd_tran_llama\.json both state amd tran llama"):
        load_results(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch_size": 128, "gradient_accumulation_steps": 16}, "global batch: 128 (amd deep bf16) / 64 (amd tran bf16)"),
        ({"sequence_length": 8192}, "sequence length: 8192 (amd deep bf16) / 2048"),
        ({"precision": "fp8"}, "precision: "),
        ({"dataset": "mock"}, "data set: "),
        ({"initial_state_sha256": "other"}, "initial state: "),
        ({"row_order_sha256": "other"}, "order of the rows: "),
        ({"steps": 10}, "steps: 10 (amd deep bf16) / 20 (amd tran bf16)"),
        ({"learning_rates": (3e-3,) * 20}, "learning rate: 0.003 (amd deep bf16) / 0.0003"),
        ({"learning_rates": (3.001e-4,) * 20}, "learning rate: 0.0003001 (amd deep bf16) / 0.0003"),
        ({"learning_rates": (3e-4,) * 19 + (2e-4,)}, "learning rate: 20 rates, sha256 "),
        ({"optimizer": "SGD"}, "optimizer: SGD (amd deep bf16) / AdamW"),
        ({"betas": (0.5, 0.999)}, "betas: (0.5, 0.999) (amd deep bf16) / (0.9, 0.95)"),
        ({"eps": 1e-6}, "eps: 1e-06 (amd deep bf16) / 1e-08"),
        ({"weight_decay": 0.0}, "weight decay: 0.0 (amd deep bf16) / 0.1"),
        ({"clip_norm": 1e6}, "clipping: 1000000.0 (amd deep bf16) / 1.0"),
        ({"master_dtype": "bfloat16"}, "master dtype: bfloat16 (amd deep bf16) / float32"),
    ],
)
def test_unequal_work_is_refused_unless_forced(changes, said):
    pair = [result(), result(framework="deep", **changes)]
    with pytest.raises(HyperionError, match="the work differs") as error:
        compare_results(pair)
    assert said in error.value.what and "--force" in (error.value.next_step or "")
    forced = compare_results(pair, force=True)
    assert said in forced.differences[0] and "**Forced" in markdown(forced, "compare.png")


@pytest.mark.parametrize(
    ("precision", "factor", "differ"),
    [
        ("bf16", 1 + 1e-3, False),
        ("bf16", 1 + 3e-3, True),
        ("bf16", 0.5, True),
        ("fp32", 1 + 1e-6, False),
        ("fp32", 1 + 1e-4, True),
    ],
)
def test_the_first_losses_of_equal_weights_and_rows_are_equal(precision, factor, differ):
    first = result(precision=precision)
    losses = tuple(factor * loss for loss in first.loss_values)
    other = result(framework="deep", precision=precision, loss_values=losses)
    lines = compare_results([first, other], force=True).differences
    assert [line.partition(":")[0] for line in lines] == (
        [f"llama, loss of the first step, in {precision} from the same weights"] if differ else []
    )
    unobserved = result(framework="deep", precision=precision, loss_values=losses, initial_state_sha256=None)
    assert compare_results([first, unobserved], force=True).differences == []


def test_reductions_in_other_formats_are_refused_and_a_run_without_reductions_is_not():
    one_rank, other, third = result(), result(framework="deep", reduction_dtype="float32"), result(framework="fsdp")
    assert compare_results([one_rank, other, third]).differences == []
    third = result(framework="fsdp", reduction_dtype="bfloat16")
    with pytest.raises(HyperionError, match=r"reduction dtype: float32 \(amd deep bf16\) / bfloat16 \(amd fsdp bf16\)"):
        compare_results([one_rank, other, third])


def test_values_that_a_file_does_not_state_are_named():
    comparison = compare_results([result(), result(framework="deep", optimizer=None, betas=None)])
    (line,) = comparison.unknown
    assert line == "amd deep llama does not state these, so they may differ: optimizer, betas."
    assert f"- {line}" in markdown(comparison, "x.png")
    labels: dict[str, Any] = {"dataset": "unknown", "precision": "unknown"}
    lines = compare_results([result(**labels), result(framework="deep", **labels)]).unknown
    assert len(lines) == 2 and all("may differ: precision, data set." in line for line in lines)


def test_two_results_of_one_framework_have_different_names():
    comparison = compare_results([result(0.5), result(1.0, precision="fp32", dataset="mock")], force=True)
    assert comparison.verdicts[0].startswith("amd tran llama wikitext-2 bf16 is 2.0")
    assert comparison.verdicts[0].split("as fast as ")[1].startswith("amd tran llama mock fp32 ")


def test_other_models_and_unobserved_runs_are_no_difference():
    unobserved = result(framework="prim", initial_state_sha256=None, row_order_sha256=None)
    other = result(model="qwen", sequence_length=4096)
    comparison = compare_results([result(), unobserved, other])
    assert comparison.differences == [] and len(comparison.verdicts) == 1  # results of two models are not compared


def test_a_framework_is_compared_across_platforms():
    results = [result(0.1, framework="prim"), result(0.5), result(1.0, platform="nvd")]
    verdicts = compare_results(results).verdicts
    assert any("amd tran llama is 2.0" in line and "as fast as nvd tran llama" in line for line in verdicts)


def test_report_and_picture_show_every_combination():
    comparison = compare_results([result(), result(framework="deep", platform="nvd"), result(0.7, framework="fsdp")])
    report = markdown(comparison, "picture.png")
    assert "picture.png" in report and all(f"- {line}." in report for line in comparison.verdicts)
    assert all(f"{one.platform} {one.framework} llama" in report for one in comparison.results)
    picture = Image.open(io.BytesIO(draw(comparison, 60)))
    assert picture.width == 12 * 60 and len(np.unique(np.asarray(picture.convert("L")))) > 20
    assert draw(comparison, 60) == draw(comparison, 60)


@pytest.mark.filterwarnings("error")
def test_a_picture_can_be_drawn_whatever_the_texts_of_a_file_contain():
    odd = result(framework="deep", optimizer="$\\frac{a$ {x}")
    odd = replace(odd, gpu_info=replace(odd.gpu_info, device_name="\x1b[31m$\\frac{$" + 1000 * "G"))
    comparison = compare_results([result(), odd], force=True)
    assert Image.open(io.BytesIO(draw(comparison, 60))).width == 12 * 60


def test_the_price_of_tokens_is_that_of_a_hand_calculation():
    # Steps of 64 x 2048 tokens on 8 GPUs take 0.495, 0.505, 0.495, … s. With 0.5 s, these are 943.7184 million tokens per hour.
    # 8 GPUs cost 16 per hour, and 16 / 943.7184 = 0.016954. 0.495 s give 0.99 of this, 0.0167847, and 0.505 s 1.01, 0.017124.
    results = [result(steps=21), result(platform="nvd", steps=21), result(framework="deep", steps=21)]
    report = markdown(compare_results(results, prices={"amd": Price(2.0, "list price, USD")}), "x.png")
    cells = {
        line.split("|")[1].split()[1]: line.split("|")[4].strip() for line in report.splitlines() if line.startswith("| amd")
    }
    assert cells == dict.fromkeys(("tran", "deep"), "0.01695 [0.01678, 0.01712]")
    assert "| price of 1M tokens [95 %] |" in report and "| no price |" in report
    assert "Prices of a GPU hour: amd 2 (list price, USD)." in report
    assert "rice" not in markdown(compare_results(results), "x.png")


def test_an_option_precedes_the_configuration_and_each_price_has_its_source():
    prices = choose_prices(GpuPrices(amd=2.0, nvd=3.0), "a quote, EUR", ["nvd=2.5"])
    assert price_note(prices).startswith("Prices of a GPU hour: amd 2 (a quote, EUR), nvd 2.5 (--price). ")
    assert choose_prices(GpuPrices(), "a quote", ()) == {}
    assert choose_prices(GpuPrices(amd=2.0), "", ())["amd"].source == "config.yaml, which states no source"


@pytest.mark.parametrize("word", ["2.5", "amd", "amd=", "amd=0", "amd=-1", "amd=nan", "amd=inf", "cpu=1", "amd=two"])
def test_a_price_is_a_platform_and_a_number_above_0(word):
    with pytest.raises(HyperionError, match="is not a platform with a price above 0") as error:
        choose_prices(GpuPrices(), "", [word])
    assert word in error.value.what and error.value.where == "--price" and "amd=1.5" in (error.value.next_step or "")


def test_a_single_result_is_shown_without_a_verdict():
    comparison = compare_results([replace(result(), source="log")])
    assert comparison.verdicts == [] and "only one result" in markdown(comparison, "x.png")
