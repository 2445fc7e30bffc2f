"""Runs: the others continue, a finished run is not repeated, and only what ran has a file."""

import json
import math
import os
import random
import signal
import stat
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import hyperion.data
from hyperion.engines import plain
from hyperion.engines.launch import train_on_rank
from hyperion.engines.observer import Observer
from hyperion.engines.record import Group, Record
from hyperion.engines.work import stored_tokens
from hyperion.frameworks import run as runs
from hyperion.frameworks.config import Config, Paths, Strategy
from hyperion.frameworks.parallelism import PRESETS
from hyperion.frameworks.plan import Plan, resolve
from hyperion.frameworks.progress import EVENTS, Progress, read_events
from hyperion.frameworks.result import read_result
from hyperion.frameworks.run import PREVIOUS, exit_code, log_file, run_plans
from hyperion.hardware import detect
from hyperion.processes import JobError, process_group
from hyperion.results import StoreError
from tests.frameworks.results import machine

CPU = machine("cpu")
CODES = {"HF Trainer": "tran", "hyperion fsdp2": "fsdp"}
ADAMW = "torch.optim.adamw.AdamW"


def plan(framework: str, model: str = "llama_tiny", config: Config | None = None, facts=CPU) -> Plan:
    return resolve(config or Config(), framework, model, "amd", facts, environment={})


def record(plan: Plan, **changes) -> Record:
    steps = plan.work["steps"]
    decayed = Group(139_264.0, 0.1, (0.9, 0.95), 1e-8, (plan.work["learning_rate"],), "float32", ADAMW)
    groups = [decayed, replace(decayed, elements=320.0, weight_decay=0.0)]
    values = {"stack": plan.stack, "ranks": plan.devices, "versions": {"torch": "2"}, "engine": "E", "device": "D"}
    values |= {"losses": [5.0] * steps, "norms": [1.0] * steps, "clipped_norms": [1.0] * steps, "step_times_s": [0.5] * steps}
    batch, length = plan.work["global_batch_size"], plan.work["sequence_length"]
    rows = [list(range(step * batch, (step + 1) * batch)) for step in range(steps)]
    values |= {"initial_sha256": "state", "rows": rows, "counted_tokens": steps * batch * length, "groups": groups, "reduced": {}}
    return Record(**(values | {"optimizer_steps": steps, "peak_memory_gib": 2.0} | changes))


@pytest.fixture
def launched(monkeypatch):
    """The names of the stacks that were launched. A stack in the dict `failing` raises its error."""
    names: list[str] = []
    failing: dict[str, BaseException] = {}

    def launch(stack, work, folder, ranks, timeout_s, on_line, on_step):
        names.append(stack.name)
        assert stack.ranks == ranks
        on_line("a line of the run")
        on_step(1, 5.0)
        if stack.name in failing:
            raise failing[stack.name]
        return record(replace(plan(CODES[stack.name]), work=plan("tran").work | {"learning_rate": work.learning_rate}))

    monkeypatch.setattr(runs, "launch", launch)
    monkeypatch.setattr(runs, "_write_work", lambda plan, folder: None)
    launch.names, launch.failing = names, failing  # type: ignore[attr-defined]
    return launch


def test_exactly_the_selected_plans_run_and_each_has_a_file(launched, tmp_path):
    outcomes = list(run_plans([plan("tran"), plan("fsdp")], tmp_path, CPU))
    assert launched.names == ["HF Trainer", "hyperion fsdp2"] and exit_code(outcomes) == 0
    assert sorted(file.name for file in tmp_path.glob("*")) == [
        "events.jsonl",
        "logs",
        "train_cpu_fsdp_llama_tiny.json",
        "train_cpu_tran_llama_tiny.json",
    ]
    assert log_file(plan("tran"), tmp_path).read_text() == "a line of the run\n"
    result = read_result(tmp_path / "train_cpu_tran_llama_tiny.json")
    assert result == outcomes[0].result and result.plan_sha256 == plan("tran").digest
    assert result.source == "observed" and result.training_config.parallel_strategy == "HF Trainer"
    assert result.memory_metrics.peak_memory_allocated_gb == pytest.approx(2 * 2**30 / 1e9)
    assert result.gpu_info.total_memory_gb == pytest.approx(detect(CPU).memory_bytes / 1e9)
    assert result.learning_rates == (3e-4,) * 50 and result.performance_metrics.skipped_steps == 25


def test_the_others_continue_after_a_failure_which_has_no_file(launched, tmp_path):
    launched.failing["HF Trainer"] = JobError("train was killed by SIGKILL\nlast line of its log")
    outcomes = list(run_plans([plan("tran"), plan("prim"), plan("fsdp")], tmp_path, CPU))
    assert [outcome.failed for outcome in outcomes] == [True, False, False]
    assert outcomes[0].state == "failed: train was killed by SIGKILL: last line of its log"
    assert [file.name for file in tmp_path.glob("*.json")] == ["train_cpu_fsdp_llama_tiny.json"]
    assert exit_code(outcomes) == 1


def test_the_others_continue_after_an_error_of_any_kind(launched, tmp_path):
    launched.failing["HF Trainer"] = OSError(28, "No space left on device")
    outcomes = list(run_plans([plan("tran"), plan("fsdp")], tmp_path, CPU))
    assert outcomes[0].state == "failed: OSError: [Errno 28] No space left on device" and outcomes[1].state == "trained"
    launched.failing["HF Trainer"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(run_plans([plan("tran"), plan("fsdp")], tmp_path, CPU))


def test_the_event_log_tells_what_became_of_each_combination(launched, tmp_path):
    launched.failing["HF Trainer"] = JobError("train was killed by SIGKILL\nlast line of its log")
    seen = []
    plans = [plan("tran"), plan("prim"), plan("fsdp")]
    list(run_plans(plans, tmp_path, CPU, on_progress=lambda plan, progress: seen.append((plan.framework, progress.step))))
    list(run_plans([plan("fsdp")], tmp_path, CPU))
    events = read_events(tmp_path / EVENTS)
    assert [(event.framework, event.event, event.step) for event in events] == [
        ("tran", "started", None),
        ("tran", "progress", 1),
        ("tran", "failed", None),
        ("prim", "unavailable", None),
        ("fsdp", "started", None),
        ("fsdp", "progress", 1),
        ("fsdp", "trained", None),
        ("fsdp", "finished before", None),
    ]
    assert events[2].reason == "train was killed by SIGKILL: last line of its log" and "next step" in events[3].reason
    assert seen == [("tran", 1), ("fsdp", 1)]


def test_an_event_log_that_cannot_be_written_stops_no_run(launched, tmp_path, capsys):
    (tmp_path / EVENTS).mkdir()
    outcomes = list(run_plans([plan("tran"), plan("fsdp")], tmp_path, CPU))
    assert [outcome.state for outcome in outcomes] == ["trained", "trained"]
    assert f"the event 'started' is not in {tmp_path / EVENTS}: Is a directory" in capsys.readouterr().err


@pytest.mark.process
def test_a_killed_runner_leaves_complete_lines(launched, tmp_path, monkeypatch):
    def killed(*arguments, on_line, on_step):
        on_step(1, 5.0)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(runs, "launch", killed)
    if (runner := os.fork()) == 0:
        list(run_plans([plan("tran")], tmp_path, CPU))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(runner, 0)[1]) == -signal.SIGKILL
    assert [event.event for event in read_events(tmp_path / EVENTS)] == ["started", "progress"]


def test_only_unavailable_combinations_end_with_code_3_and_no_file(launched, tmp_path):
    outcomes = list(run_plans([plan("nemo"), plan("prim"), plan("mgds")], tmp_path / "out", CPU))
    assert exit_code(outcomes) == 3 and launched.names == [] and not (tmp_path / "out").exists()
    assert all(outcome.state.startswith("unavailable") for outcome in outcomes)


def test_a_finished_run_is_resumed_and_other_settings_run_again(launched, tmp_path):
    list(run_plans([plan("tran")], tmp_path, CPU))
    (again,) = run_plans([plan("tran")], tmp_path, CPU)
    assert again.state == "finished before" and again.result and launched.names == ["HF Trainer"] and exit_code([again]) == 0
    other = replace(Config(), training=replace(Config().training, learning_rate=1e-4))
    (changed,) = run_plans([plan("tran", config=other)], tmp_path, CPU)
    assert changed.state == "trained" and changed.result and changed.result.learning_rates == (1e-4,) * 50
    list(run_plans([plan("tran")], tmp_path, CPU, again=True))
    file = tmp_path / "train_cpu_tran_llama_tiny.json"
    file.write_text(file.read_text()[:-40])
    (damaged,) = run_plans([plan("tran")], tmp_path, CPU)
    assert damaged.state == "trained" and len(launched.names) == 4


def test_a_failed_run_moves_the_file_of_other_settings_aside(launched, tmp_path):
    list(run_plans([plan("tran")], tmp_path, CPU))
    (file,) = tmp_path.glob("*.json")
    earlier = file.read_bytes()
    launched.failing["HF Trainer"] = JobError("no memory")
    other = replace(Config(), training=replace(Config().training, seed=1))
    (outcome,) = run_plans([plan("tran", config=other)], tmp_path, CPU)
    assert outcome.failed and list(tmp_path.glob("*.json")) == []
    assert (tmp_path / f"{file.name}{PREVIOUS}").read_bytes() == earlier
    list(run_plans([plan("tran")], tmp_path, CPU))  # fails too, and there is no file to move
    assert (tmp_path / f"{file.name}{PREVIOUS}").read_bytes() == earlier


def test_a_folder_that_cannot_be_written_ends_the_call_before_the_first_run(launched, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        list(run_plans([plan("tran")], tmp_path / "file", CPU))
    assert launched.names == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer_steps": 100}, "100 optimizer steps"),  # micro-batches counted as steps
        ({"losses": [5.0] * 10}, "10 losses"),
        ({"ranks": 1}, "1 ranks"),
        ({"counted_tokens": 768}, "counted 768 tokens instead of 25600"),
        ({"rows": [[*range(16)], *[[-1] * 16] * 49]}, "read other rows in step 2"),
    ],
)
def test_a_record_of_other_work_has_no_result(changes, said, launched, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "launch", lambda *args, **others: record(plan("tran"), **changes))
    (outcome,) = run_plans([plan("tran")], tmp_path, CPU)
    assert outcome.failed and said in outcome.state and not list(tmp_path.glob("*.json"))


def grouped(**changes) -> dict:
    """Changes of a record: its parameter groups with other options."""
    return {"groups": [replace(group, **changes) for group in record(plan("tran")).groups]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (grouped(optimizer="torch.optim.sgd.SGD"), "optimizer: torch.optim.sgd.SGD instead of AdamW"),
        (grouped(learning_rates=(3.0,)), "learning rate: 3 instead of 0.0003"),
        (grouped(betas=(0.5, 0.999)), "betas: 0.5, 0.999 instead of 0.9, 0.95"),
        (grouped(eps=1e-6), "eps: 1e-06 instead of 1e-08"),
        (grouped(weight_decay=0.0), "weight decay: none instead of 0.1"),
        (grouped(weight_decay=0.1), "decay on norms: 0 elements without decay instead of 320"),
        (grouped(dtype="bfloat16"), "master dtype: bfloat16 instead of float32"),
        (grouped(elements=320.0), "updated elements: 640 instead of 139,584"),
        ({"losses": [5.0] * 49 + [math.nan]}, "not finite: loss of nan in step 50"),
        ({"groups": []}, "rates [] instead of 50 steps on 2 ranks with one learning rate"),
        ({"norms": [5.0] * 50, "clipped_norms": [5.0] * 50}, "gradient clipping: norm 5 at the optimizer in 50 steps"),
        ({"norms": [5.0] * 50, "clipped_norms": [0.5] * 50}, "gradient clipping: gradients scaled to 0.5"),
        ({"reduced": {"bfloat16": 139_584}}, "reduction dtype: bfloat16 instead of float32"),
    ],
)
def test_a_record_of_other_settings_has_no_result(changes, said, launched, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "launch", lambda *args, **others: record(plan("tran"), **changes))
    (outcome,) = run_plans([plan("tran")], tmp_path, CPU)
    assert outcome.failed and said in outcome.state and not list(tmp_path.glob("*.json"))


def test_the_settings_that_were_observed_are_in_the_file(launched, tmp_path, monkeypatch):
    reduced = {"float32": 139_584, "int64": 1}
    monkeypatch.setattr(runs, "launch", lambda *args, **others: record(plan("tran"), reduced=reduced))
    (outcome,) = run_plans([plan("tran")], tmp_path, CPU)
    training = read_result(tmp_path / outcome.plan.file_name).training_config
    assert (training.optimizer, training.betas, training.eps, training.weight_decay) == ("AdamW", (0.9, 0.95), 1e-8, 0.1)
    assert (training.clip_norm, training.master_dtype, training.reduction_dtype) == (1.0, "float32", "float32")


def primus(tmp_path: Path, script: str, steps: int = 3) -> Plan:
    """The plan of a Primus whose entry point is this script."""
    folder = tmp_path / "Primus"
    for file, text in (("primus/cli/main.py", ""), ("examples/run_pretrain.sh", script)):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        (folder / file).chmod(stat.S_IRWXU)
    training = Config().training
    sizes = replace(training.sizes, global_batch_size=128, micro_batch_size=2)
    config = Config(paths=Paths(primus=str(folder)), training=replace(training, steps=steps, sizes=sizes))
    return plan("prim", "llama", config, machine("amd", 8))


LOG = Path(__file__).parent / "logs/primus.log"
SHOW = f'test "$GPUS_PER_NODE" = 8 -a "$2" = 3 && test -n "$EXP" && cat {LOG}\n'


@pytest.mark.process
def test_primus_runs_by_its_own_entry_point_and_its_log_becomes_a_result(tmp_path):
    (outcome,) = run_plans([primus(tmp_path, SHOW)], tmp_path / "out", machine("amd", 8))
    assert outcome.state == "trained"
    content = json.loads((tmp_path / "out/train_amd_prim_llama_mock.json").read_text())
    assert content["source"] == "log" and content["source_log_file"] == "train_amd_prim_llama_mock.log"
    assert content["step_times"] == [22.8134, 4.7125, 4.6875] and content["environment"]["HSA_ENABLE_SDMA"] == "1"


@pytest.mark.process
def test_the_steps_that_a_framework_logs_are_reported_while_it_runs(tmp_path, monkeypatch):
    """The script ends only after its first step was reported. Its log has a line twice, and one that is written in two parts."""
    monkeypatch.setattr(runs, "_POLL_S", 0.01)
    reported, seen = tmp_path / "reported", []
    head, tail = f"head -c 900 {LOG}", f"tail -c +901 {LOG}"  # cut inside the line of step 2
    script = f"{head}; until test -f {reported}; do sleep 0.01; done; {tail}\n"

    def on_progress(plan: Plan, progress: Progress) -> None:
        seen.append((progress.step, progress.steps, progress.loss))
        reported.touch()

    limited = replace(primus(tmp_path, script), timeout_s=60.0)
    (outcome,) = run_plans([limited], tmp_path / "out", machine("amd", 8), on_progress=on_progress)
    assert outcome.state == "trained"
    assert seen == [(1, 3, 11.89573), (2, 3, 11.89001), (3, 3, 11.66420)]
    events = read_events(tmp_path / "out" / EVENTS)
    assert [(event.event, event.step) for event in events][:2] == [("started", None), ("progress", 1)]


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "steps", "said"),
    [
        (SHOW + "exit 7", 3, "ended with exit code 7"),
        ("echo nothing", 3, "no line has the form"),
        (f"cat {LOG.with_name('megatron.log')}", 2, "this is a log of Megatron-LM"),
        (f"cat {LOG}", 5, "the log states 3 steps of 128 rows, not 5 of 128"),
        ("kill -9 $$", 3, "ended with exit code -9"),
    ],
)
def test_a_run_of_primus_without_its_log_is_a_failure_without_a_file(script, steps, said, tmp_path):
    (outcome,) = run_plans([primus(tmp_path, script, steps)], tmp_path / "out", machine("amd", 8))
    assert outcome.failed and said in outcome.state and not list((tmp_path / "out").glob("*.json"))


@pytest.mark.process
def test_a_run_without_an_end_is_stopped(tmp_path):
    endless = replace(primus(tmp_path, "sleep 100 & sleep 100"), timeout_s=0.5)
    (outcome,) = run_plans([endless], tmp_path / "out", machine("amd", 8))
    assert "no end after 0.5 s" in outcome.state


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "tolerance"), [("llama_tiny", "bf16", 1e-4), ("qwen_tiny", "fp32", 1e-5)])
def test_the_trainer_and_fsdp_train_the_same_work(model, precision, tolerance, tmp_path, monkeypatch):
    def in_this_process(stack, work, folder, ranks, timeout_s, on_line, on_step) -> Record:
        """Two ranks train in tests/engines/test_adapters.py and in test_commands.py."""
        assert ranks == 1 and work.dtype == precision
        with process_group():
            return Record.of(
                train_on_rank(stack.adapter, stack.name, list(stack.packages), work.as_dict(), folder, stack.options)
            )

    monkeypatch.setattr(runs, "launch", in_this_process)
    training = replace(Config().training, steps=3, precision=precision)
    config = Config(training=training, dataset="synthetic", hardware=replace(Config().hardware, cpu_ranks=1))
    outcomes = list(run_plans([plan("tran", model, config), plan("fsdp", model, config)], tmp_path, CPU))
    assert [outcome.state for outcome in outcomes] == ["trained", "trained"]
    one, other = (read_result(tmp_path / outcome.plan.file_name) for outcome in outcomes)
    assert [one.framework, other.framework, one.precision] == ["tran", "fsdp", precision]
    assert one.loss_values == pytest.approx(other.loss_values, abs=tolerance) and one.loss_values[2] < one.loss_values[0]
    assert one.training_config.initial_state_sha256 == other.training_config.initial_state_sha256
    assert one.training_config.row_order_sha256 == other.training_config.row_order_sha256
    assert not list(tmp_path.glob(".work*"))


# The presets of NVIDIA GPUs: the model, TP and PP. Qwen2.5 has biases of queries, keys and values.
PRESETS_ON = {
    "identical": ("llama_tiny", 1, 1),
    "max_perf": ("qwen_tiny", 2, 1),
    "memory_opt": ("llama_tiny", 2, 2),
    "minimal_comm": ("qwen_tiny", 1, 2),
    "balanced": ("llama_tiny", 2, 1),
}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_trains_a_tiny_model_like_the_plain_loop(preset, tmp_path):
    model, tensor, pipeline = PRESETS_ON[preset]
    config = Config(training=replace(Config().training, steps=3, precision="fp32"), dataset="synthetic")
    config = replace(config, parallelism=Strategy(preset), hardware=replace(config.hardware, cpu_ranks=max(2, tensor * pipeline)))
    chosen = resolve(config, "mcore", model, "nvd", CPU, environment={})
    if chosen.reason:
        pytest.skip(chosen.reason)
    (outcome,) = run_plans([chosen], tmp_path, CPU)
    assert outcome.state == "trained"
    found = read_result(tmp_path / chosen.file_name)
    division = found.parallelism_config
    assert (division.tensor_model_parallel_size, division.pipeline_model_parallel_size) == (tensor, pipeline)
    assert found.versions["megatron.core"] and found.training_config.parallel_strategy == "megatron-core"
    assert tensor * pipeline * division.data_parallel_size == found.training_config.num_gpus == chosen.devices
    with runs._Works(tmp_path) as works:
        work = works.work_of(chosen)
        expected = Record.of(plain.train(work, Observer(work, "plain loop", (), tmp_path / "plain")))
    assert found.loss_values == pytest.approx(tuple(expected.losses), abs=1e-5)
    assert found.training_config.initial_state_sha256 == expected.initial_sha256


def test_plans_share_files_only_if_model_data_and_work_are_equal(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(runs, "_write_work", lambda plan, folder: written.append(plan.dataset))
    first = plan("tran")
    other_work = replace(first, work=first.work | {"seed": 7})
    with runs._Works(tmp_path) as works:
        for one in (first, plan("fsdp"), replace(first, dataset="c4"), replace(first, dataset="c4"), other_work):
            works.work_of(one)
    assert written == [first.dataset, "c4", first.dataset]


def test_a_run_that_reads_a_short_text_several_times_has_different_rows(monkeypatch, tmp_path):
    text = "".join(random.Random(0).choices(string.ascii_letters, k=6 * 17))  # six rows in each pass
    corpus = SimpleNamespace(splits={"train": [text]})
    monkeypatch.setattr(hyperion.data, "load_wikitext2", lambda source, allow_synthetic: corpus)
    sizes = {"steps": 4, "global_batch_size": 4, "sequence_length": 16}
    chosen = plan("tran")
    runs._write_work(replace(chosen, work=chosen.work | sizes), tmp_path)
    rows = ["".join(map(chr, row)) for row in stored_tokens(tmp_path)]
    assert len(set(rows)) == len(rows) == 16 and all(row in text + text[1:] + text[2:] for row in rows)
    assert "".join(rows[:6]) == text
