"""The result file: what fits is read back, what contradicts its own series is refused, older files are migrated."""

import itertools
import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.frameworks.result import (
    Result,
    ResultError,
    derive,
    file_name,
    label_fault,
    migrate,
    parse_result,
    read_result,
    write_result,
)
from tests.frameworks.results import result

OLD = {
    "platform": "rocm",
    "gpu_info": {"device_count": 8, "device_name": "AMD Instinct MI300X", "gpu_cores": 304, "software_stack": "prim", "extra": 1},
    "timestamp": "2026-01-05T00:00:00",
    "parallelism": {"strategy": "data", "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 4},
    "training_config": {"max_steps": 9, "global_batch_size": 64, "sequence_length": 2048, "num_gpus": 8},
    "performance_metrics": {"avg_step_time_seconds": 1.0},
    "raw_step_times": [9.0, 2.0, 2.0, 3.0],
    "loss_values": [4.0, 3.0, 2.0, 1.0],
    "learning_rates": [1e-4] * 4,
    "source": "run.log",
}


def test_a_result_is_written_atomically_under_its_documented_name_and_read_back(tmp_path):
    wanted = result()
    path = write_result(wanted, tmp_path / "new")
    assert path.name == "train_amd_tran_llama.json" and read_result(path) == wanted
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file is left
    content = json.loads(path.read_text())
    assert {"platform", "gpu_info", "training_config", "performance_metrics", "step_times", "loss_values"} <= content.keys()
    assert {"learning_rates", "memory_metrics", "parallelism_config", "schema_version"} <= content.keys()


def test_a_refused_result_leaves_the_old_file(tmp_path):
    path = write_result(result(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ResultError, match="platform"):
        write_result(replace(result(), platform="tpu"), tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("framework", ["tran", "deep", "fsdp", "nemo", "prim", "mgds"])
@pytest.mark.parametrize("model", ["llama", "qwen"])
@pytest.mark.parametrize("platform", ["amd", "nvd"])
def test_the_documented_names(platform, framework, model):
    assert file_name(platform, framework, model, "wikitext-2", "bf16") == f"train_{platform}_{framework}_{model}.json"


def test_names_never_collide():
    labels = itertools.product(
        ("llama", "llama_tiny"), ("wikitext-2", "c4", "fp32", "tiny", "unknown"), ("bf16", "fp32", "tiny", "unknown")
    )
    names = [file_name("amd", "tran", *one) for one in labels if not label_fault(*one)]
    assert len(set(names)) == len(names) == 2 * 3 * 3


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("loss_values",), [1.0], "loss_values has 1 values, but total_steps is 20"),
        (("learning_rates",), [], "learning_rates has 0 values"),
        (("training_config", "max_steps"), 21, "max_steps is 21"),
        (("training_config", "num_gpus"), 4, "TP 1 x PP 1 x DP 8 is 8, but there are 4 devices"),
        (("training_config", "global_batch_size"), 128, "is not the global batch of 128"),
        (("training_config", "gradient_accumulation_steps"), 2, "gradient_accumulation_steps differs"),
        (("parallelism_config", "tensor_model_parallel_size"), 3, "TP 3"),
        (("performance_metrics", "tokens_per_second"), 8 * 262144.0, "performance_metrics.tokens_per_second"),
        (("performance_metrics", "max_step_time_seconds"), 0.505 * (1 + 1e-5), "max_step_time_seconds is 0.505"),
        (("performance_metrics", "total_time_seconds"), 1.0, "total_time_seconds is 1.0"),
        (("performance_metrics", "throughput_per_gpu_core"), None, "throughput_per_gpu_core is None"),
        (("performance_metrics", "skipped_steps"), 20, "no step is timed"),
        (("gpu_info", "device_count"), 1, "device_count is 1"),
        (("memory_metrics", "peak_memory_allocated_gb"), 0, "peak_memory_allocated_gb must be greater than 0"),
        (("platform",), "cuda", "platform"),
        (("schema_version",), 2, "schema_version"),
        (("framework",), "megatron", "framework"),
        (("step_times", 3), -1.0, "step_times"),
        (("step_times", 3), 1e300, "step_times"),
        (("loss_values", 3), -1e308, "loss_values"),
        (("memory",), {}, "unknown field"),
        (("dataset",), "x/../../pwned", "dataset must consist of"),
        (("dataset",), ".hidden", "dataset must consist of"),
        (("dataset",), "FP32", "names another part"),
        (("dataset",), "tiny", "names another part"),
        (("model",), "../llama", "model must be one of llama, qwen"),
        (("precision",), "../bf16", "precision must be one of bf16, fp32"),
    ],
)
def test_a_contradiction_is_refused_by_name(place, value, said):
    document = json.loads(json.dumps(asdict(result())))
    inside = document
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    with pytest.raises(ResultError) as error:
        parse_result(document, "file.json")
    assert said in error.value.what and error.value.next_step


def test_rates_are_those_of_the_timed_steps_and_the_total_is_that_of_all():
    metrics = derive((10.0, 1.0, 3.0), 1, result().training_config, 100)  # 64 rows of 2048 tokens on 8 GPUs
    assert (metrics.total_steps, metrics.skipped_steps, metrics.total_time_seconds) == (3, 1, 14.0)
    assert (metrics.min_step_time_seconds, metrics.avg_step_time_seconds, metrics.max_step_time_seconds) == (1.0, 2.0, 3.0)
    assert (metrics.steps_per_second, metrics.tokens_per_second) == (0.5, 65_536.0)
    assert (metrics.tokens_per_second_per_gpu, metrics.throughput_per_gpu_core) == (8192.0, 81.92)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(asdict(result()))), JSON)
def test_any_value_of_a_field_gives_a_result_or_an_error(name, value):
    document = json.loads(json.dumps(asdict(result()))) | {name: value}
    try:
        assert isinstance(parse_result(document, "any"), Result)
    except ResultError as error:
        assert error.next_step


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(OLD)), JSON)
def test_any_older_file_gives_a_result_or_an_error(name, value):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train_tran_llama.json"
        path.write_text(json.dumps(OLD | {name: value}))
        try:
            assert isinstance(migrate(path), Result)
        except ResultError as error:
            assert error.next_step


def test_an_older_file_is_migrated_with_what_it_states_and_nothing_else(tmp_path):
    path = tmp_path / "train_amd_prim_llama.json"
    path.write_text(json.dumps(OLD))
    new = migrate(path, {"precision": "bf16"})
    assert new.key == ("amd", "prim", "llama", "unknown", "bf16") and new.source == "migrated"
    division = new.parallelism_config
    assert (division.strategy_name, division.tensor_model_parallel_size, division.data_parallel_size) == ("data", 2, 4)
    assert division.gradient_accumulation_steps == 16  # 64 / (1 x 4)
    assert new.step_times == (9.0, 2.0, 2.0, 3.0) and new.source_log_file == "run.log"
    # The stated mean of 1.0 s is not that of the steps; the first step is not timed.
    assert new.performance_metrics.avg_step_time_seconds == pytest.approx(7 / 3)
    assert new.performance_metrics.tokens_per_second_per_gpu == pytest.approx(64 * 2048 * 3 / 7 / 8)
    assert new.memory_metrics.peak_memory_allocated_gb is None and "not measured" in new.memory_metrics.measurement_method
    assert new.gpu_info.software_stack is None and new.model_info is None
    written = write_result(new, tmp_path)
    assert migrate(written) == new  # a file of the present form stays as it is


def test_a_file_without_the_settings_of_the_optimizer_is_read_and_they_are_unknown(tmp_path):
    document = json.loads(json.dumps(asdict(result())))
    settings = ("optimizer", "betas", "eps", "weight_decay", "clip_norm", "master_dtype", "reduction_dtype")
    for name in settings:
        del document["training_config"][name]
    training = parse_result(document, "file.json").training_config
    assert [getattr(training, name) for name in settings] == [None] * len(settings)


def test_the_name_of_an_older_file_states_a_tiny_model(tmp_path):
    path = tmp_path / "train_nvd_tran_llama_tiny.json"
    path.write_text(json.dumps(OLD | {"parallelism": {}}))
    assert migrate(path).model == "llama_tiny"


def test_a_migration_replaces_no_other_file(tmp_path):
    path, known = tmp_path / "train_amd_prim_llama.json", {"dataset": "wikitext-2", "precision": "bf16"}
    path.write_text(json.dumps(OLD))
    other = tmp_path / "new" / path.name
    other.parent.mkdir()
    other.write_text("of another run")
    with pytest.raises(ResultError, match="exists with other content"):
        write_result(migrate(path, known), other.parent, path)
    assert other.read_text() == "of another run"
    assert write_result(migrate(path, known), tmp_path, path) == path and read_result(path).source == "migrated"
    assert write_result(migrate(path, known), tmp_path, path) == path


def test_a_file_that_names_no_framework_needs_it_from_its_user(tmp_path):
    path = tmp_path / "benchmark_rocm_llama.json"
    path.write_text(json.dumps(OLD))
    with pytest.raises(ResultError, match="states framework, model") as error:
        migrate(path)
    assert "--set" in (error.value.next_step or "")
    assert migrate(path, {"framework": "tran", "model": "llama"}).framework == "tran"
    path.write_text(json.dumps({name: value for name, value in OLD.items() if name != "raw_step_times"}))
    with pytest.raises(ResultError, match="missing field"):
        migrate(path, {"framework": "tran", "model": "llama"})
