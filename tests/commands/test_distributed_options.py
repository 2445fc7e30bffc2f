"""Options of run_distributed.py: what they come to, and what is refused before a process is started."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperion.commands import distributed_options
from hyperion.commands.distributed_options import CommandOptions, Machine, OptionError, checked, parsed
from hyperion.data import DataError, load_instructions
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.errors import HyperionError
from hyperion.hardware import detect_cpu
from hyperion.models import load_llama

CPU = replace(detect_cpu(), isa=("avx2",))
H100 = replace(CPU, kind="cuda", arch="sm_90", name="GPU", torch_device="cuda:0", memory_bytes=80 * 10**9)
LAPTOP = Machine(device=CPU, devices=2, ranks=2, launched=False)
NODE = Machine(device=H100, devices=4, ranks=4, launched=True)


@pytest.fixture(autouse=True)
def data_home(tmp_path, monkeypatch):
    """An empty cache, no mirror; results in a folder of their own."""
    monkeypatch.delenv("HYPERION_DATA_MIRROR", raising=False)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HYPERION_RESULTS", str(tmp_path / "results"))


def request_of(line: str, machine: Machine = LAPTOP):
    return checked(parsed(line.split(), ""), machine)


@pytest.mark.parametrize(
    "line, model, strategy, epochs",
    [
        ("", "gpt2_124m", "ddp", 5),
        ("--model language_ddp --epochs 25", "gpt2_124m", "ddp", 25),
        ("--model language_fsdp --epochs 25", "gpt2_124m", "fsdp", 25),
        ("--model llama --lora --epochs 3", "random_llama_1b", "fsdp", 3),
        ("--model llama --lora --strategy ddp", "random_llama_1b", "ddp", 5),
        ("--model cifar --strategy fsdp", "resnet18", "fsdp", 5),
    ],
)
def test_the_readmes_commands_on_four_gpus(line, model, strategy, epochs):
    (recipe,) = request_of(line, NODE).recipes
    assert (recipe.model, recipe.strategy, recipe.epochs, recipe.steps) == (model, strategy, epochs, None)
    assert recipe.lora == ("--lora" in line) and recipe.precision == "auto"


def test_a_cpu_gets_small_models_under_names_that_say_so():
    found = request_of("--model all --steps 3 --precision fp32 --batch_size 4 --seed 7")
    names = ["lm_d128_h4_l2_ddp", "lm_d128_h4_l2_fsdp", "resnet18_w8_ddp", "random_llama_d64_l2_fsdp"]
    assert [recipe.name for recipe in found.recipes] == names
    assert {(r.steps, r.epochs, r.batch_size, r.precision) for r in found.recipes} == {(3, None, 4, "fp32")}
    assert found.options.seed == 7


def test_the_default_batch_is_one_that_the_ranks_divide():
    found = request_of("--model language_fsdp", replace(NODE, devices=3, ranks=3))
    assert found.recipes[0].batch_size == 66 and "66 instead of 64, because 3 ranks do not divide 64" in found.notes[0]


def test_random_weights_are_said_aloud_and_fit_the_device():
    assert "RANDOM WEIGHTS: random_llama_1b" in request_of("--model llama", NODE).notes[0]
    small = replace(NODE, device=replace(H100, memory_bytes=8 * 10**9))
    assert request_of("--model llama --strategy ddp", small).recipes[0].model == "random_llama_d512_l8"


@pytest.mark.parametrize(
    "line, why, remedy",
    [
        ("--lora", "--lora does not work with --model language_ddp", "use --model llama"),
        ("--model cifar --lora", "--lora does not work with --model cifar", "leave --lora out"),
        ("--model cifar --model_id x", "names the weights of a Llama", "--model llama"),
        ("--model language_ddp --strategy fsdp", "contradicts --model language_ddp", "--model language_fsdp"),
        ("--model language_fsdp --strategy ddp", "contradicts --model language_fsdp", "--model language_ddp"),
        ("--scaling_gpus 1,2", "--scaling_gpus does not work with --model language_ddp", "use --model scaling"),
        ("--model scaling --scaling_gpus 1,2,4", "this machine has 2 devices", "numbers up to 2"),
        ("--model scaling --scaling_gpus 1;2", "not a list of numbers", "write the list as 1,2,4"),
        ("--model scaling --scaling_gpus 0,1", "not a list of numbers", "write the list as 1,2,4"),
        ("--model scaling --epochs 2", "--epochs does not work with --model scaling", "leave --epochs out"),
        ("--model scaling --steps 2", "--steps does not work with --model scaling", "leave --steps out"),
        ("--model scaling --lora", "--lora does not work with --model scaling", "use --model llama"),
        ("--epochs 2 --steps 3", "--epochs and --steps are both given", "one of them"),
        ("--epochs 0", "'0' is not a whole number above 0", "--help"),
        ("--steps -1", "'-1' is not a whole number above 0", "--help"),
        ("--batch_size many", "'many' is not a whole number above 0", "--help"),
        ("--precision tf32", "cannot train in tf32", "choose auto or fp32"),
        ("--precision int4", "'int4' is not one of auto, fp32", "--help"),
        ("--model gpt5", "'gpt5' is not one of language_ddp", "--help"),
        ("--batch_size 5", "2 ranks do not divide a batch of 5", "a multiple of 2"),
        ("--model all --batch_size 5", "2 ranks do not divide a batch of 5", "a multiple of 2"),
        ("--model llama --model_id random_llama_70b", "no random Llama is named 'random_llama_70b'", "random_llama_1b"),
        ("--base_dir /no/such/place", "is not a folder", "--help"),
        ("--run nothing", "no run 'nothing'", "use one of"),
        ("--frobnicate", "No such option: --frobnicate", "--help"),
    ],
)
def test_what_means_nothing_is_refused_with_reason_and_next_step(line, why, remedy):
    with pytest.raises(HyperionError) as refused:
        request_of(line)
    assert why in refused.value.what and remedy in refused.value.next_step and refused.value.exit_code == 2


def test_bf16_where_a_gpu_has_none():
    with pytest.raises(HyperionError, match="cannot train in bf16"):
        request_of("--precision bf16", replace(NODE, device=replace(H100, arch="sm_50")))


def test_scaling_starts_launches_of_its_own():
    assert request_of("--model scaling --scaling_gpus 2,1,2").counts == (1, 2)
    assert request_of("--model scaling", replace(NODE, devices=6, launched=False)).counts == (1, 2, 4, 6)
    with pytest.raises(OptionError, match="does not work with torchrun") as refused:
        request_of("--model scaling --scaling_gpus 1,2,4", NODE)
    assert "python phase2_development/run_distributed.py --model scaling --scaling_gpus 1,2,4" in refused.value.next_step


@settings(max_examples=40)
@given(st.text("0123456789, -x٣", max_size=8))
def test_any_list_of_devices_is_either_refused_or_counts_of_what_there_is(text):
    machine = Machine(device=CPU, devices=8, ranks=8, launched=False)
    try:
        counts = checked(CommandOptions(model="scaling", scaling_gpus=text), machine).counts
    except OptionError as refused:
        assert "--scaling_gpus" in refused.what
    else:
        assert counts == tuple(sorted(set(counts))) and counts[0] >= 1 and counts[-1] <= 8
        assert set(counts) == {int(part) for part in text.split(",")}


def test_results_that_cannot_be_written(tmp_path):
    (tmp_path / "results").write_text("a file in the place of the folder")
    with pytest.raises(OptionError, match="cannot be written") as refused:
        request_of(f"--base_dir {tmp_path}")
    assert "--base_dir" in refused.value.next_step


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A whole Llama in a folder, in shards, with the tokenizer it was made for."""
    folder = tmp_path_factory.mktemp("weights") / "small-llama"
    tokenizer = train_tokenizer(load_instructions("synthetic").as_corpus())
    torch.manual_seed(0)
    load_llama("random_llama_d64_l2", vocab_size=tokenizer.vocab_size).save_pretrained(folder, max_shard_size="100KB")
    tokenizer._bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


@pytest.mark.slow
def test_a_folder_of_weights_is_taken_by_its_absolute_path(weights, monkeypatch):
    monkeypatch.chdir(weights.parent)
    assert request_of("--model llama --model_id small-llama").recipes[0].model == str(weights)


def drop_shard(folder):
    sorted(folder.glob("*.safetensors"))[1].unlink()


def other_tokenizer(folder):
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"].append(document["added_tokens"][0] | {"id": 900, "content": "<more>"})
    (folder / "tokenizer.json").write_text(json.dumps(document))


def adapter(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "base_model_name_or_path": "the-base"}))


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil, kind, why",
    [
        (drop_shard, HyperionError, "the shard .* is missing"),
        (other_tokenizer, HyperionError, "the tokenizer's largest id is .*, but the model's embedding has"),
        (adapter, HyperionError, "an adapter of rank 8 and not a model; .* adapters of rank 16"),
        (no_tokenizer, DataError, "the model has no tokenizer.json"),
    ],
)
def test_bad_weights_are_refused_before_anything_is_loaded(weights, tmp_path, spoil, kind, why):
    folder = shutil.copytree(weights, tmp_path / "spoilt")
    spoil(folder)
    with pytest.raises(kind, match=why):
        request_of(f"--model llama --lora --model_id {folder}")


@pytest.mark.parametrize(
    "before, after, named",
    [
        ("weight_decay = 0.1", "weight_decoy = 0.1", "weight_d"),
        ("batch_size = 16\n", "", "batch_size"),
        ('models = ["lm_d128_h4_l2"]', "models = []", "models"),
        ("{ full = 2e-3 }", "{ whole = 2e-3 }", "learning_rates"),
    ],
)
def test_a_wrong_size_of_a_profile_is_named(before, after, named, tmp_path, monkeypatch):
    sizes = distributed_options._SIZES.read_text()
    assert before in sizes
    changed = tmp_path / "sizes.toml"
    changed.write_text(sizes.replace(before, after))
    monkeypatch.setattr(distributed_options, "_SIZES", changed)
    with pytest.raises(HyperionError, match=named) as error:
        request_of("--model language_ddp")
    assert "sizes.toml" in str(error.value)


@pytest.mark.parametrize(
    ("before", "line", "said"),
    [
        (5, "--seed 0", "--seed 0 is given now, but the run was started with 5"),
        (0, "--seed 7", "--seed 7 is given now, but the run was started with 0"),
        (None, "--seed 0", "--seed 0 is given now, but the run was started without this option"),
        (0, "--seed 0", ""),
        (5, "", ""),
    ],
)
def test_a_resumed_run_keeps_its_options_also_if_one_is_0(before, line, said, monkeypatch, tmp_path):
    began = vars(CommandOptions()) | {"seed": before}
    monkeypatch.setattr(distributed_options, "_command", lambda run: {"options": began})
    options = parsed(line.split(), "")
    if said:
        with pytest.raises(OptionError) as error:
            distributed_options._resumed(options, tmp_path)
        assert error.value.what == said
    else:
        assert distributed_options._resumed(options, tmp_path).seed == before
