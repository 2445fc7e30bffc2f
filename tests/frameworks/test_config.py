"""config.yaml: each key changes a plan, an unknown key is refused, and the environment has precedence."""

import copy
import functools
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.engines.external import ENTRIES
from hyperion.frameworks import plan as plans
from hyperion.frameworks.comparison import choose_prices, compare_results, draw, markdown
from hyperion.frameworks.config import Config, ConfigError, GpuPrices, load_config, parse_config
from hyperion.frameworks.docker import docker_command
from hyperion.frameworks.plan import TITLES, output_folder, resolve, select_frameworks, select_models
from tests.frameworks.results import machine, result

SHIPPED = Path(__file__).resolve().parents[2] / "phase2_development/frameworks/config.yaml"
DOCUMENT = yaml.safe_load(SHIPPED.read_text())
# A value that differs from the shipped one, for keys that a general rule does not change to a valid value.
OTHER = {
    "models": ["qwen"],
    "dataset": "synthetic",
    "training.precision": "fp32",
    "hardware.amd_num_gpus": 4,
    "hardware.nvd_num_gpus": 4,
    "hardware.cpu_ranks": 1,
    "training.beta1": 0.5,
    "training.beta2": 0.5,
    "training.steps": 70,
    "training.sizes.global_batch_size": 128,
    "training.tiny.global_batch_size": 32,
    "training.tiny.micro_batch_size": 1,
    "training.sizes.micro_batch_size": 2,
    "benchmark.skip_first_steps": 40,
    "parallelism.preset": "max_perf",
    "rocm.hsa_no_scratch_reclaim": "0",
    "rocm.hsa_enable_sdma": "",
    "rocm.nccl_debug": "INFO",
    "comparison.price_per_gpu_hour.amd": 2.0,
    "comparison.price_per_gpu_hour.nvd": 2.0,
    "frameworks.deep.zero_stage": 1,
    "frameworks.mgds.zero_stage": 0,
}


def leaves(document: dict, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in document.items():
        found += leaves(value, (*place, key)) if isinstance(value, dict) else [(*place, key)]
    return found


def changed(place: tuple[str, ...], tmp_path: Path) -> dict:
    document = copy.deepcopy(DOCUMENT)
    inside = document
    for key in place[:-1]:
        inside = inside[key]
    value, name = inside[place[-1]], ".".join(place)
    if name in OTHER:
        other = OTHER[name]
    elif place[-1] in ("tensor", "pipeline"):
        other = 3 - value if value < 3 else 2
    elif place[-1] == "platforms":
        other = value[:1] if len(value) > 1 else ["nvd"]
    elif isinstance(value, bool):
        other = not value
    elif place[0] == "paths":
        (tmp_path / place[-1]).mkdir()
        other = str(tmp_path / place[-1])
    elif isinstance(value, str):
        other = "x" + value
    else:
        other = 2 * value
    assert other != value
    inside[place[-1]] = other
    return document


def effects(config: Config, preset: str) -> str:
    """Everything that a configuration decides: all plans on three machines, the folder, the docker line and the comparison."""
    config = replace(config, parallelism=replace(config.parallelism, preset=preset)) if preset else config
    enabled, models = select_frameworks("", config), select_models("", config)
    found: list = [enabled, models, str(output_folder(config))]
    for (kind, gpus), framework, model in itertools.product(
        (("amd", 8), ("nvd", 8), ("cpu", 0)), TITLES, ("llama", "qwen", "llama_tiny")
    ):
        asked = "amd" if kind == "cpu" else kind
        if kind == "cpu" and preset not in ("", "identical"):
            continue
        found.append(asdict(resolve(config, framework, model, asked, machine(kind, gpus), environment={})))
    return json.dumps([*found, docker_command(config, Path("/checkout"), "amd", [], {})])


@functools.cache
def effects_of_the_shipped_file(preset: str) -> str:
    config = parse_config(SHIPPED.read_bytes(), "a")
    first, second = effects(config, preset), effects(config, preset)
    assert first == second
    return first


@pytest.mark.parametrize("place", [leaf for leaf in leaves(DOCUMENT) if leaf != ("version",)], ids=".".join)
def test_each_key_is_consumed(place, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "installed_python", lambda name: name)  # reads the metadata of packages, which takes time
    monkeypatch.setattr(plans, "why_not_found", lambda name, named: "" if name == "NeMo" or all(named.values()) else "absent")
    base, other = parse_config(SHIPPED.read_bytes(), "a"), parse_config(yaml.safe_dump(changed(place, tmp_path)), "b")
    if place[0] == "comparison":
        assert consumed_by_the_comparison(place[1], base, other)
        return
    preset = place[2] if place[:2] == ("parallelism", "presets") else ""
    assert effects(other, preset) != effects_of_the_shipped_file(preset)


def consumed_by_the_comparison(key: str, base: Config, other: Config) -> bool:
    if key == "dpi":
        comparison = compare_results([result()])
        return len(draw(comparison, base.comparison.dpi)) != len(draw(comparison, other.comparison.dpi))
    if key.startswith("price"):
        return report_with_a_price(base) != report_with_a_price(other)
    return getattr(base.comparison, key) != getattr(other.comparison, key)  # the file names, which test_commands.py checks


def report_with_a_price(config: Config) -> str:
    stated = config.comparison.price_per_gpu_hour
    stated = GpuPrices(stated.amd or 1.0, stated.nvd or 1.0)  # a source alone is cited nowhere
    prices = choose_prices(stated, config.comparison.price_source, ())
    return markdown(compare_results([result(), result(platform="nvd")], prices=prices), "compare.png")


def test_the_shipped_file_states_every_key_with_its_default():
    assert parse_config(SHIPPED.read_bytes(), "shipped") == Config()
    assert json.loads(json.dumps(asdict(Config()))) == DOCUMENT


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainin: {}", "unknown field config.trainin"),
        ("training: {steps: 1}", "config.training.steps must be greater than or equal to 2, not 1"),
        ("training: {learning_rate: 3e-4}", "config.training.learning_rate must be a valid number, not '3e-4'"),
        ("frameworks: {deep: {zero_stage: 4}}", "config.frameworks.deep.zero_stage"),
        ("models: [llama]\nmodels: [qwen]", "the key 'models' occurs twice"),
        ("models: []", "config.models must have at least 1 item"),
        ("a: &x 1\nb: *x", "aliases"),
        ("version: 2", "config.version"),
        ("comparison: {report: sub/report.md}", "config.comparison.report must match pattern"),
        ("comparison: {report: ''}", "config.comparison.report must match pattern"),
        ("comparison: {price_per_gpu_hour: {amd: 0}}", "config.comparison.price_per_gpu_hour.amd must be greater than 0, not 0"),
        ("comparison: {price_per_gpu_hour: {cpu: 1}}", "unknown field config.comparison.price_per_gpu_hour.cpu"),
        ('comparison: {price_source: "a\\nb"}', "config.comparison.price_source must match pattern"),
        ("comparison: {plot: ..}", "config.comparison.plot must match pattern"),
        ("comparison: {plot: compare.pdf}", "config.comparison.plot must match pattern"),
        ("- a", "config"),
        ("a: [", "not a valid YAML document"),
        ("training: {sizes: {global_batch_size: true}}", "global_batch_size must be a valid integer, not True"),
    ],
)
def test_errors_name_the_key(text, said):
    with pytest.raises(ConfigError) as error:
        parse_config(text, "file.yaml")
    assert said in error.value.what and error.value.where == "file.yaml" and error.value.next_step


KEYS = st.sampled_from(sorted(DOCUMENT)) | st.text(max_size=8)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60) | TREES.map(yaml.safe_dump))
def test_any_content_is_a_configuration_or_an_error(content):
    try:
        assert isinstance(parse_config(content, "any"), Config)
    except ConfigError as error:
        assert error.next_step


def test_the_environment_precedes_the_file_which_precedes_the_default(tmp_path):
    (tmp_path / "primus").mkdir()
    file = tmp_path / "config.yaml"
    file.write_text("paths: {output_dir: from-file}\nhardware: {amd_num_gpus: 2}")
    assert load_config(None, {}).hardware.amd_num_gpus == "auto" and load_config(None, {}).paths.output_dir == ""
    config = load_config(file, {})
    assert (config.hardware.amd_num_gpus, config.paths.output_dir) == (2, "from-file")
    variables = {"CONFIG_AMD_NUM_GPUS": "4", "CONFIG_OUTPUT_DIR": "from-env", "PRIMUS_PATH": str(tmp_path / "primus")}
    config = load_config(file, variables)
    assert (config.hardware.amd_num_gpus, config.paths.output_dir) == (4, "from-env")
    assert config.paths.primus == str(tmp_path / "primus")
    config = load_config(file, {"MEGATRON_DEEPSPEED_PATH": str(tmp_path), "CONFIG_NVD_NUM_GPUS": "3"})
    assert config.paths.megatron_deepspeed == str(tmp_path) and config.hardware.nvd_num_gpus == 3
    assert load_config(file, {"CONFIG_AMD_NUM_GPUS": ""}).hardware.amd_num_gpus == 2  # as make passes unset variables


@pytest.mark.parametrize("variable", ["PRIMUS_PATH", "MEGATRON_DEEPSPEED_PATH"])
def test_a_path_that_is_no_folder_is_an_error_that_names_the_variable(variable, tmp_path):
    with pytest.raises(ConfigError, match="is not a folder") as error:
        load_config(None, {variable: str(tmp_path / "absent")})
    assert error.value.where == variable


@pytest.mark.parametrize("text", ["0", "-1", "two", "8.0", "²", "1" * 20, " 8"])
def test_a_number_of_gpus_is_a_number(text):
    with pytest.raises(ConfigError, match="is not a number of GPUs"):
        load_config(None, {"CONFIG_AMD_NUM_GPUS": text})


def test_a_missing_file_and_an_unknown_preset_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml", {})
    file = tmp_path / "config.yaml"
    file.write_text("parallelism: {preset: fastest}")
    with pytest.raises(ConfigError, match="no preset 'fastest'") as error:
        load_config(file, {})
    assert "balanced" in (error.value.next_step or "")


def test_the_external_frameworks_are_those_that_have_an_entry_point():
    assert set(plans.EXTERNAL.values()) == set(ENTRIES)
