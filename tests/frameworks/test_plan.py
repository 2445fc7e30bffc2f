"""Plans: which combinations are selected, on how many devices, with which division, and why one cannot run."""

import importlib.metadata
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.engines import STACKS, environments
from hyperion.errors import HyperionError
from hyperion.frameworks import plan as plans
from hyperion.frameworks.config import Benchmark, Config, Frameworks, Hardware, Paths, Settings, Strategy
from hyperion.frameworks.parallelism import PRESETS, Parallelism, Preset, divide
from hyperion.frameworks.plan import EXTERNAL, TITLES, asked_platform, resolve, select_frameworks, select_models
from hyperion.frameworks.shapes import MODELS
from hyperion.models.llama import LlamaShape
from tests.frameworks.results import machine


def planned(framework="tran", model="llama", asked="amd", facts=None, config=None, dry_run=False, environment=None):
    return resolve(config or Config(), framework, model, asked, facts or machine("amd", 8), dry_run, environment or {})


@pytest.mark.parametrize(
    ("names", "codes"),
    [
        ("megatron-core", ["mcore"]),
        ("tran,deep", ["tran", "deep"]),
        ("Transformers, DEEPSPEED ,fsdp2", ["tran", "deep", "fsdp"]),
        (["deep", "primus,deepspeed"], ["deep", "prim"]),
        ("megatron-deepspeed", ["mgds"]),
        ("", ["tran", "deep", "fsdp", "nemo", "prim", "mgds"]),
    ],
)
def test_frameworks_are_selected_by_code_or_alias(names, codes):
    assert select_frameworks(names, Config()) == codes


@given(st.lists(st.sampled_from([*TITLES, "hf", "zero", "primus", "", " "])))
def test_a_selection_has_no_repetition_and_keeps_the_order(names):
    text = ",".join(names)
    if text and not text.strip(" ,"):
        with pytest.raises(HyperionError, match="contains no name"):
            select_frameworks(text, Config())
        return
    codes = select_frameworks(text, Config())
    assert len(set(codes)) == len(codes) and set(codes) <= set(TITLES)


def test_an_unknown_framework_or_model_is_an_error_that_lists_the_valid_ones():
    with pytest.raises(HyperionError, match="'foo', 'bar'") as error:
        select_frameworks("tran,foo,bar", Config())
    assert all(code in (error.value.next_step or "") for code in (*TITLES, "transformers"))
    with pytest.raises(HyperionError, match="no model is named 'lama'") as error:
        select_models(["lama"], Config())
    assert "qwen_tiny" in (error.value.next_step or "")


def test_a_selection_of_nothing_is_refused():
    for select, where in ((select_frameworks, "FRAMEWORKS or --frameworks"), (select_models, "--model")):
        with pytest.raises(HyperionError, match="' , ' contains no name") as error:
            select(" , ", Config())
        assert error.value.where == where and "choose from" in (error.value.next_step or "")
    disabled = Frameworks(**{code: replace(getattr(Frameworks(), code), enabled=False) for code in TITLES})
    with pytest.raises(HyperionError, match="no framework is enabled"):
        select_frameworks("", Config(frameworks=disabled))


@pytest.mark.parametrize("framework", ["tran", "prim"])
def test_skipping_all_steps_is_refused(framework):
    for skipped, steps in ((50, 50), (99, 50)):
        config = Config(
            benchmark=replace(Benchmark(), skip_first_steps=skipped), training=replace(Config().training, steps=steps)
        )
        with pytest.raises(HyperionError, match=f"no step would be timed: {skipped} of 50 steps are skipped") as error:
            planned(framework, config=config)
        assert error.value.where == "benchmark.skip_first_steps"
    config = Config(benchmark=replace(Benchmark(), skip_first_steps=49))
    assert planned(framework, config=config).skipped_steps == 49


def test_models_are_selected_and_tiny_replaces_them():
    assert select_models([], Config()) == ["llama", "qwen"]
    assert select_models(["tiny"], Config()) == ["llama_tiny", "qwen_tiny"]
    assert select_models(["qwen", "tiny"], Config()) == select_models(["tiny,qwen"], Config()) == ["qwen_tiny"]
    assert select_models(["llama_tiny"], Config()) == ["llama_tiny"]


def test_a_disabled_framework_runs_only_if_it_is_named():
    config = Config(frameworks=replace(Frameworks(), tran=Settings(enabled=False)))
    assert "tran" not in select_frameworks("", config) and select_frameworks("tran", config) == ["tran"]


def test_a_framework_is_skipped_on_a_platform_that_it_does_not_support():
    plan = planned("prim", asked="nvd", facts=machine("nvd", 8))
    assert plan.reason.startswith("unavailable: Primus supports amd, not nvd")


def test_the_platform_of_the_machine_is_enforced():
    assert asked_platform("auto", machine("amd", 1), False) == "amd"
    assert asked_platform("amd", machine("cpu"), False) == "amd"  # the rehearsal of a tiny model
    assert asked_platform("amd", machine("nvd", 1), True) == "amd"  # a plan for another machine
    with pytest.raises(HyperionError, match="amd was asked for") as error:
        asked_platform("amd", machine("nvd", 1), False)
    assert "train_nvd.sh" in (error.value.next_step or "")


def test_a_full_model_needs_a_gpu_and_a_tiny_one_rehearses_on_the_cpu():
    assert "needs a GPU of platform amd" in planned(facts=machine("cpu")).reason
    plan = planned(model="llama_tiny", facts=machine("cpu"))
    assert (plan.reason, plan.platform, plan.devices) == ("", "cpu", 2)
    assert plan.file_name == "train_cpu_tran_llama_tiny.json"
    assert planned(model="llama_tiny").file_name == "train_amd_tran_llama_tiny.json"


def test_the_number_of_devices():
    assert planned(facts=machine("amd", 4)).devices == 4  # all that PyTorch sees
    config = Config(hardware=Hardware(amd_num_gpus=2, cpu_ranks=8))
    assert planned(config=config).devices == 2
    assert planned(config=config, model="llama_tiny", facts=machine("cpu")).devices == 2
    assert planned(facts=machine("nvd", 1), dry_run=True).devices == 8  # a dry run for the documented node
    with pytest.raises(HyperionError, match="2 GPUs are asked for, but PyTorch sees 1") as error:
        planned(config=config, facts=machine("amd", 1))
    assert error.value.next_step == "set CONFIG_AMD_NUM_GPUS=1"


def test_a_model_that_does_not_fit_is_not_started():
    small = machine("amd", 1, 80 * 10**9)
    assert "need 128 GB on each GPU, which has 80 GB" in planned("deep", facts=small).reason
    assert "need 128 GB" in planned("tran", facts=machine("amd", 8, 80 * 10**9)).reason  # each rank has a whole copy
    assert planned("fsdp", facts=machine("amd", 8, 80 * 10**9)).reason == ""


@pytest.mark.parametrize(
    ("stage", "gpus", "needed"),
    # Llama has 8.03 · 10^9 parameters: 8 + 12/8 = 9.5 bytes, 4 + 16/8 = 6, 16/8 = 2; on one device 20, 20 and 16.
    [(1, 8, 76), (2, 8, 48), (3, 8, 16), (1, 1, 161), (2, 1, 161), (3, 1, 128)],
)
def test_each_zero_stage_divides_only_its_share(stage, gpus, needed):
    config = Config(frameworks=replace(Frameworks(), deep=replace(Frameworks().deep, zero_stage=stage)))
    small, large = (machine("amd", gpus, memory * 10**9) for memory in (needed - 1, needed + 1))
    assert f"need {needed} GB on each GPU, which has {needed - 1} GB" in planned("deep", facts=small, config=config).reason
    assert "GB on each GPU" not in planned("deep", facts=large, config=config).reason


def test_settings_of_rocm_are_applied_on_rocm_only_and_the_shell_has_precedence():
    default = {"HSA_NO_SCRATCH_RECLAIM": "1", "HSA_ENABLE_SDMA": "1"}
    assert planned().environment == default  # NCCL_DEBUG is off by default
    assert planned(environment={"HSA_ENABLE_SDMA": "0", "NCCL_DEBUG": "INFO"}).environment == default | {"HSA_ENABLE_SDMA": "0"}
    assert planned(asked="nvd", facts=machine("nvd", 8)).environment == {}
    assert planned(model="llama_tiny", facts=machine("cpu")).environment == {}
    config = Config(rocm=replace(Config().rocm, nccl_debug="WARN"))
    assert planned(config=config).environment == default | {"NCCL_DEBUG": "WARN"}
    assert "RCCL_DEBUG" not in planned(config=config).environment


def test_the_label_is_that_of_the_stack_that_runs():
    config = Config(frameworks=replace(Frameworks(), deep=replace(Frameworks().deep, zero_stage=2)))
    assert {code: planned(code, config=config).stack for code in ("tran", "deep", "fsdp")} == {
        "tran": "HF Trainer",
        "deep": "deepspeed zero-2",
        "fsdp": "hyperion fsdp2",
    }
    assert {planned(code).stack for code in EXTERNAL} == {""}
    assert all(planned(code).stack in STACKS for code in TITLES if code not in EXTERNAL)


def test_a_preset_with_model_parallelism_is_not_run_by_a_data_parallel_stack(monkeypatch):
    monkeypatch.setattr("hyperion.engines.stacks.why_not_installed", lambda name: "")
    config = Config(parallelism=Strategy("memory_opt"))
    reason = planned("fsdp", config=config).reason
    assert "needs TP 2 and PP 2" in reason and "--frameworks mcore" in reason
    assert "trains in fp32 only here, not bf16; next step: --precision fp32" in planned("mcore", config=config).reason
    config = replace(config, training=replace(config.training, precision="fp32"))
    assert planned("mcore", config=config).reason == ""
    # Weights, gradients and moments in float32 are 16 bytes for each of 8.03 · 10^9 parameters, divided by TP 2 · PP 2.
    small, large = (machine("amd", 8, memory * 10**9) for memory in (31, 33))
    assert "need 32 GB on each GPU, which has 31 GB" in planned("mcore", config=config, facts=small).reason
    assert planned("mcore", config=config, facts=large).reason == ""


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("platform", ["amd", "nvd"])
def test_each_preset_fits_each_model_on_the_documented_node(name, model, platform):
    plan = planned("tran", model, platform, machine(platform, 8), Config(parallelism=Strategy(name)))
    division, sizes = plan.parallelism, plan.work
    tp, pp, dp = division.tensor_model_parallel_size, division.pipeline_model_parallel_size, division.data_parallel_size
    assert tp * pp * dp == 8 and division.strategy_name == name
    assert division.gradient_accumulation_steps * sizes["micro_batch_size"] * dp == sizes["global_batch_size"]
    assert MODELS[model].shape.num_attention_heads % tp == 0


SHAPE = LlamaShape(64, 4, 8, 4, 128, 256)


@given(*[st.integers(1, 9)] * 2, st.integers(1, 16), st.integers(1, 64), st.integers(1, 4))
def test_a_division_fulfils_all_equations_or_is_refused(tp, pp, devices, batch, micro):
    try:
        division = divide("x", Preset(tp, pp), devices, batch, micro, SHAPE, "here")
    except HyperionError as error:
        dp = devices / (tp * pp)
        assert "does not fit" in error.what
        assert dp != int(dp) or batch % (micro * int(dp)) or 4 % tp or 4 % pp
        return
    dp, ga = division.data_parallel_size, division.gradient_accumulation_steps
    assert tp * pp * dp == devices and ga * micro * dp == batch and 8 % tp == 4 % tp == 4 % pp == 0


def test_faults_name_each_equation():
    faults = Parallelism("x", 3, 2, 1, 2).faults(8, 64, 1, replace(SHAPE, num_hidden_layers=3))
    assert [fault.partition(",")[0] for fault in faults] == [
        "TP 3 x PP 2 x DP 1 is 6",
        "GA 2 x micro-batch 1 x DP 1 is not the global batch of 64",
        "8 attention heads cannot be divided by TP 3",
        "4 key-value heads cannot be divided by TP 3",
        "3 layers cannot be divided by PP 2",
    ]
    assert Parallelism("x", 0, 1, 1, 1).faults(8, 64, 1) == ["TP 0, PP 1, DP 1 and GA 1 must all be at least 1"]


def primus(tmp_path):
    folder = tmp_path / "Primus"
    for file in ("primus/cli/main.py", "examples/run_pretrain.sh"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return Config(paths=Paths(primus=str(folder)))


def test_the_command_of_primus(tmp_path):
    plan = planned("prim", config=primus(tmp_path))
    assert plan.reason == "" and plan.command[:2] == ("bash", "examples/run_pretrain.sh")
    assert plan.folder == str(tmp_path / "Primus")
    assert plan.environment["EXP"].endswith("llama3.1_8B-BF16-pretrain.yaml") and plan.environment["GPUS_PER_NODE"] == "8"
    options = dict(zip(plan.command[2::2], plan.command[3::2], strict=True))
    assert options["--global_batch_size"] == "64" and options["--train_iters"] == "50" and options["--log_interval"] == "1"
    assert plan.dataset == "mock"  # its experiment files train on synthetic tokens
    assert plan.environment["HSA_ENABLE_SDMA"] == "1"
    assert "no tiny twin" in planned("prim", "llama_tiny", config=primus(tmp_path)).reason
    assert "needs a GPU" in planned("prim", config=primus(tmp_path), facts=machine("cpu")).reason


def test_primus_is_refused_with_settings_that_it_would_not_use(tmp_path):
    config = primus(tmp_path)
    fp32 = replace(config, training=replace(config.training, precision="fp32"))
    assert "train in bf16, not fp32" in planned("prim", config=fp32).reason
    assert "HSA_ENABLE_SDMA=1" in planned("prim", config=config, environment={"HSA_ENABLE_SDMA": "0"}).reason
    unset = replace(config, rocm=replace(config.rocm, hsa_enable_sdma=""))
    plan = planned("prim", config=unset)  # its script sets it
    assert plan.reason == "" and plan.environment["HSA_ENABLE_SDMA"] == "1"


def test_the_digest_depends_on_the_machine_and_the_folder(tmp_path):
    facts = machine("amd", 8)
    other_gpus = replace(facts, gpus=tuple(replace(gpu, name="other") for gpu in facts.gpus))
    others = [replace(facts, torch="0.1"), replace(facts, hip="0.1"), other_gpus]
    assert len({planned(facts=one).digest for one in (facts, *others)}) == 4
    assert planned("prim", config=primus(tmp_path)).digest != planned("prim", config=primus(tmp_path / "other")).digest


@pytest.mark.parametrize(("framework", "package"), [("tran", "transformers"), ("tran", "accelerate"), ("deep", "transformers")])
def test_the_digest_depends_on_the_versions_of_the_packages(framework, package, monkeypatch):
    facts, read = machine("amd", 8), importlib.metadata.version
    before = planned(framework, facts=facts).digest
    assert planned(framework, facts=facts).digest == before
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == package else read(name))
    assert planned(framework, facts=facts).digest != before


def test_the_digest_depends_on_the_version_of_an_environment_of_its_own(monkeypatch):
    facts = machine("amd", 8)
    before = {name: planned(name, facts=facts).digest for name in ("tran", "deep")}
    other = replace(environments.ENVIRONMENTS["deepspeed"], requirements=("deepspeed==0.1",))
    monkeypatch.setitem(environments.ENVIRONMENTS, "deepspeed", other)
    after = {name: planned(name, facts=facts).digest for name in before}
    assert after["tran"] == before["tran"] and after["deep"] != before["deep"]


def test_the_command_of_megatron_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "why_not_installed", lambda name: "")
    for file in ("pretrain_gpt.py", "megatron/training.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    settings = replace(Frameworks().mgds, data_path="folder/c4_text_document", tokenizer="tokenizer")
    config = Config(paths=Paths(megatron_deepspeed=str(tmp_path)), frameworks=replace(Frameworks(), mgds=settings))
    plan = planned("mgds", config=config)
    assert plan.reason == "" and "pretrain_gpt.py" in plan.command and "--swiglu" in plan.command
    assert plan.command[plan.command.index("--num-key-value-heads") + 1] == "8"
    (file,) = plan.files
    assert f"--deepspeed_config={file}" in plan.command and '"stage": 1' in plan.files[file]
    assert plan.file_name == "train_amd_mgds_llama_c4-text-document.json"
    reserved = replace(config, frameworks=replace(config.frameworks, mgds=replace(settings, data_path="tiny")))
    assert "names another part" in planned("mgds", config=reserved).reason
    assert "biases" in planned("mgds", "qwen", config=config).reason
    without = Config(paths=config.paths)
    assert "data_path or tokenizer is not set" in planned("mgds", config=without).reason


@pytest.mark.parametrize(
    ("framework", "said"), [("nemo", "nemo_automodel"), ("prim", "PRIMUS_PATH"), ("mgds", "MEGATRON_DEEPSPEED")]
)
def test_an_external_framework_that_is_absent_says_what_is_missing(framework, said):
    reason = planned(framework).reason
    assert reason.startswith("unavailable: ") and said in reason and "next step" in reason
