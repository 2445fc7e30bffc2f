"""Logs of Megatron-LM, Megatron-DeepSpeed and Primus give exact values; anything else is an error.

The forms of the lines are those of the frameworks. Numbers and lengths were chosen for these tests.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.frameworks.logs import (
    MEGATRON,
    MEGATRON_DEEPSPEED,
    PRIMUS,
    LoggedRun,
    RunFacts,
    logged_step,
    parse_log,
    result_of_log,
)
from hyperion.frameworks.result import ResultError, read_result, write_result

LOGS = Path(__file__).parent / "logs"
TEXTS = {path.stem: path.read_text() for path in LOGS.glob("*.log")}
GB = 2**30 / 1e9


def facts(framework: str = "prim", num_gpus: int = 8, sequence_length: int = 2048, micro: int = 1, **others) -> RunFacts:
    return RunFacts(framework, "amd", "llama", "mock", "bf16", num_gpus, sequence_length, micro, **others)


def test_a_log_of_primus():
    run = parse_log(TEXTS["primus"], "log")
    assert run == LoggedRun(
        PRIMUS, 128, (22.8134, 4.7125, 4.6875), (11.89573, 11.89001, 11.66420), (5e-6, 1e-5, 9.99e-6), 118.25 * GB
    )


def test_a_log_of_a_later_primus_whose_first_lines_are_those_of_megatron():
    """Primus prints averages only after some steps, and 26.5 gave the rates other names."""
    text = TEXTS["primus_26.5"]
    expected = (30.125, 4.75, 4.7005, 4.65), (11.89573, 11.89001, 11.66420, 11.5), (5e-6, 1e-5, 9.99e-6, 9.97e-6)
    assert parse_log(text, "log") == LoggedRun(PRIMUS, 128, *expected, 102.25 * GB)
    steps = [found for line in text.splitlines() if (found := logged_step(line))]
    assert steps == [(1, 11.89573), (2, 11.89001), (3, 11.6642), (4, 11.5)]


def test_a_line_of_another_kind_is_no_step():
    assert logged_step("[NODE-0(node)] [INFO] iteration 1 of 3") is None
    assert logged_step(" iteration        7/       9 | consumed samples: 7 | lm loss: nan |") == (7, None)


def test_primus_prints_gib_as_gb_or_as_gib():
    assert parse_log(TEXTS["primus"].replace("GB/", "GiB/"), "log") == parse_log(TEXTS["primus"], "log")


def test_the_memory_of_a_log_is_that_of_its_fullest_step():
    lines = TEXTS["primus"].splitlines()
    (last,) = [number for number, line in enumerate(lines) if (logged_step(line) or (0,))[0] == 3]
    lines[last] = lines[last].replace("118.25", "100.00")
    assert "100.00" in lines[last] and parse_log("\n".join(lines), "log").peak_memory_gb == 118.25 * GB


def test_a_log_of_megatron():
    run = parse_log(TEXTS["megatron"], "log")
    assert run == LoggedRun(MEGATRON, 64, (27.1605, 3.5), (11.92634, 11.90001), (1.5e-6, 3e-6), None)


def test_a_log_of_megatron_deepspeed():
    run = parse_log(TEXTS["megatron_deepspeed"], "log")
    assert run == LoggedRun(MEGATRON_DEEPSPEED, 64, (52.7281, 8.0), (11.76514, 11.5), (3e-4, 3e-4), None)


def test_the_result_of_a_log(tmp_path):
    made = result_of_log(LOGS / "primus.log", facts(tensor=2, micro=2, strategy="balanced"))
    assert made.key == ("amd", "prim", "llama", "mock", "bf16") and made.source == "log"
    assert made.model_info is None  # the log states no number of parameters
    assert made.source_log_file == "primus.log" and made.training_config.initial_state_sha256 is None
    assert (made.parallelism_config.data_parallel_size, made.parallelism_config.gradient_accumulation_steps) == (4, 16)
    assert made.performance_metrics.avg_step_time_seconds == pytest.approx(4.7)
    assert made.performance_metrics.tokens_per_second_per_gpu == pytest.approx(128 * 2048 / 4.7 / 8)
    assert made.memory_metrics.peak_memory_in_use_gb == pytest.approx(126.97)
    assert read_result(write_result(made, tmp_path)) == made
    assert (tmp_path / "train_amd_prim_llama_mock.json").is_file()


@pytest.mark.parametrize(
    ("log", "framework"), [("megatron", "prim"), ("megatron", "mgds"), ("primus", "mega"), ("primus", "tran")]
)
def test_a_log_of_another_framework_is_refused(log, framework):
    with pytest.raises(ResultError, match="this is a log of"):
        result_of_log(LOGS / f"{log}.log", facts(framework))


def test_facts_that_contradict_the_log_are_refused():
    with pytest.raises(ResultError, match="TP 1 x PP 3"):
        result_of_log(LOGS / "primus.log", facts(pipeline=3))
    with pytest.raises(ResultError, match="not the global batch of 128"):
        result_of_log(LOGS / "primus.log", facts(micro=3))
    with pytest.raises(ResultError, match="no step would be timed: 3 of 3 steps are skipped"):
        result_of_log(LOGS / "primus.log", facts(skipped_steps=3))
    with pytest.raises(ResultError, match="dataset must consist of"):
        result_of_log(LOGS / "primus.log", replace(facts(), dataset="../mock"))
    with pytest.raises(ResultError, match="cannot be read"):
        result_of_log(LOGS / "absent.log", facts())


MEGATRON_LINES = TEXTS["megatron"].splitlines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no line has the form"),
        ("step 1 | loss 3.0", "no line has the form"),
        ("{'loss': 3.0, 'step': 1}", "no line has the form"),
        (TEXTS["megatron"].replace("lm loss", "loss"), "lacks loss"),
        (TEXTS["megatron"].replace("lm loss: 1.19", "lm loss: nan"), "lacks loss"),
        (TEXTS["megatron"].replace("iteration        1/", "iteration       10/"), "not consecutive from 1: found 2"),
        ("\n".join(MEGATRON_LINES[:2]), "ends at iteration 1 of 2"),
        (TEXTS["megatron"] + TEXTS["megatron"].replace("3500.0", "3600.0"), "again with other values"),
        (TEXTS["megatron"].replace("size:    64 | lm loss: 1.190", "size:    32 | lm loss: 1.190"), "batch size changes"),
        (TEXTS["megatron"].replace("(ms): 3500.0", "(ms): 0.0"), "took no time"),
    ],
)
def test_an_unknown_form_is_an_error(text, said):
    with pytest.raises(ResultError) as error:
        parse_log(text, "file.log")
    assert said in error.value.what and error.value.where == "file.log" and error.value.next_step


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 900), st.text("0123456789.|/:eE+-\n iteration", max_size=12))
def test_a_damaged_log_is_read_completely_or_refused(name, place, inserted):
    text = TEXTS[name][:place] + inserted + TEXTS[name][place:]
    try:
        run = parse_log(text, "log")
    except ResultError as error:
        assert error.next_step
        return
    assert len(run.times_s) == len(run.losses) == len(run.rates) == len(parse_log(TEXTS[name], "log").times_s)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_an_error(text):
    with pytest.raises(ResultError):
        parse_log(text, "log")


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1e5), st.floats(1e-4, 20), st.floats(1e-8, 1)).map(
            lambda triple: (f"{triple[0]:.1f}", f"{triple[1]:.6E}", f"{triple[2]:.6E}")
        ),
        min_size=1,
        max_size=8,
    )
)
def test_printed_values_are_read_back(steps):
    lines = [
        f" iteration {number:8d}/{len(steps):8d} | consumed samples: 1 | elapsed time per iteration (ms): {time} |"
        f" learning rate: {rate} | global batch size:    64 | lm loss: {loss} | grad norm: 1.0 |"
        for number, (time, loss, rate) in enumerate(steps, 1)
    ]
    run = parse_log("\n".join(lines), "log")
    assert run.times_s == tuple(float(time) / 1e3 for time, _, _ in steps)
    assert run.losses == tuple(float(loss) for _, loss, _ in steps)
    assert run.rates == tuple(float(rate) for _, _, rate in steps)
