"""Each adapter does the work of the plain loop: the judge finds no difference, and losses agree within rounding.

Frameworks in an environment of their own are tested where it is installed: `hyperion frameworks install --all`.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hyperion.engines import STACKS, Record, megatron_core, plain, unequal
from hyperion.engines.launch import launch, train_on_rank
from hyperion.engines.observer import Observer
from hyperion.engines.work import Work, write_work_folder
from hyperion.errors import HyperionError
from hyperion.experiments.frameworks.works import differing_tensors
from hyperion.frameworks.shapes import transformers_config
from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import use_adapted
from hyperion.processes import Job, process_group, run_ranks
from hyperion.processes.isolated import IsolatedProcess

pytestmark = pytest.mark.slow
# Some 20 rounding errors of a loss of about ln 64.
TOLERANCE = 20 * 4.2 * 2.0**-24
SEPARATE = [name for name, stack in STACKS.items() if stack.environment]


@pytest.fixture(scope="module")
def reference(tiny_work, tmp_path_factory) -> Record:
    return Record.of(plain.train(tiny_work, Observer(tiny_work, "plain loop", (), tmp_path_factory.mktemp("plain"))))


# Frameworks that train on the same two ranks. With DDP, the final state has the bits of two micro-batches of the plain loop whose
# AdamW has these options: our own engine uses the fused one. FSDP2 adds the norms of shards, and the Trainer promises no bits.
TWO_RANKS: dict[str, dict | None] = {
    "hyperion fsdp2": None,
    "hyperion ddp": {"fused": True, "foreach": False},
    "accelerate ddp": {},
    "HF Trainer": None,
}


@pytest.fixture(autouse=True)
def new_states_of_accelerate() -> None:
    forget_states_of_accelerate()


def forget_states_of_accelerate() -> None:
    """accelerate remembers its settings in the process. A launch has a process of its own, these tests share one."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def assert_equal_work(work, record: Record, reference: Record, tolerance: float = TOLERANCE) -> None:
    assert unequal(work, record, reference, plain.first_losses(work)) == []
    assert max(abs(a - b) for a, b in zip(record.losses, reference.losses, strict=True)) < tolerance
    here, expected = load_file(record.final_file), load_file(reference.final_file)
    assert here.keys() == expected.keys()
    assert max((here[name] - expected[name]).abs().max() for name in expected) < 1e-4


@pytest.mark.parametrize("name", ["HF Trainer", "accelerate", "hyperion"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_adapters_on_one_rank(name, micro_batches, tiny_work, tmp_path, reference):
    work = replace(tiny_work, micro_batches=micro_batches)
    with process_group():
        observer = Observer(work, name, STACKS[name].packages, tmp_path)
        # Imported here, because every worker of pytest imports this file, and transformers takes 4 s.
        record = Record.of(import_module(STACKS[name].adapter).train(work, observer))
    assert_equal_work(work, record, reference)
    assert set(record.versions) == set(STACKS[name].packages)


@pytest.mark.parametrize("name", ["HF Trainer", "accelerate", "hyperion"])
def test_adapters_trace_steps_after_those_of_the_work(name, tiny_work, tmp_path, reference):
    work = replace(tiny_work, micro_batches=1, timed=True, traced=1)
    with process_group():
        observer = Observer(work, name, STACKS[name].packages, tmp_path)
        record = Record.of(import_module(STACKS[name].adapter).train(work, observer))
    assert unequal(work, record, reference, plain.first_losses(work)) == []
    assert record.losses == pytest.approx(reference.losses, abs=TOLERANCE)
    assert record.trace is not None and record.trace.parts_s["matrix products"] > 0


def train_all(stacks: dict[str, dict]) -> dict:
    """Train with several frameworks on the same ranks: their start takes longer than all trainings."""
    records = {}
    for name, values in stacks.items():
        if "accelerate" in sys.modules:
            forget_states_of_accelerate()
        records[name] = train_on_rank(**values)
    return records


def arguments_of(name: str, work: Work, folder: Path) -> dict:
    """Arguments of `train_on_rank` for a framework."""
    stack = STACKS[name]
    values = {"adapter": stack.adapter, "name": name, "packages": list(stack.packages), "folder": str(folder)}
    return values | {"work": work.as_dict(), "options": stack.options}


@pytest.fixture(scope="module")
def on_two_ranks(standing_ranks, tiny_work, tmp_path_factory) -> dict[tuple[str, int], Record]:
    """The record of each framework, by its name and the number of micro-batches of a rank."""
    places, stacks = [(name, parts) for parts in (1, 2) for name in TWO_RANKS], {}
    for name, parts in places:
        work = replace(tiny_work, micro_batches=parts)
        stacks[f"{name} {parts}"] = arguments_of(name, work, tmp_path_factory.mktemp(name.replace(" ", "-")))
    answer = standing_ranks.run(Job(train_all, {"stacks": stacks}, ranks=2))[0]
    return {(name, parts): Record.of(answer[f"{name} {parts}"]) for name, parts in places}


@pytest.mark.process
@pytest.mark.parametrize("name", TWO_RANKS)
def test_the_trainer_and_the_engine_of_this_library_on_two_ranks(name, on_two_ranks, tiny_work, reference, tmp_path):
    record = on_two_ranks[name, 1]
    if name == "HF Trainer":
        record.reduced.pop("int32", None)  # the Trainer lets DDP look for unused parameters, which reduces flags
    assert_equal_work(replace(tiny_work, micro_batches=1), record, reference)
    assert record.ranks == 2 and record.reduced["float32"] >= sum(group.elements for group in record.groups)
    if (how := TWO_RANKS[name]) is not None:
        assert tiny_work.micro_batches == 2
        parts = Record.of(plain.train(tiny_work, Observer(tiny_work, "two micro-batches", (), tmp_path), **how))
        assert differing_tensors(record, parts) == 0


@pytest.mark.process
@pytest.mark.parametrize("name", TWO_RANKS)
def test_gradients_of_accumulated_micro_batches_are_reduced_once(name, on_two_ranks, tiny_work, reference):
    once, parts = on_two_ranks[name, 1], on_two_ranks[name, 2]
    assert parts.reduced["float32"] == pytest.approx(once.reduced["float32"], rel=0.01)  # all but the loss and the norm
    parts.reduced.pop("int32", None)
    assert_equal_work(tiny_work, parts, reference)


@pytest.fixture(scope="module")
def on_ranks_of_environment(tiny_work, tmp_path_factory) -> Callable[[str], dict[str, Record]]:
    """Function that trains with the frameworks of an environment that have two ranks, all on the same ranks."""

    @cache
    def records(environment: str) -> dict[str, Record]:
        names = [name for name in SEPARATE if STACKS[name].environment == environment and STACKS[name].ranks == 2]
        folder, work = tmp_path_factory.mktemp(environment), replace(tiny_work, micro_batches=1)
        stacks = {name: arguments_of(name, work, folder / name) for name in names}
        for name in names:
            (folder / name).mkdir()
        job = Job(train_all, {"stacks": stacks}, ranks=2, timeout_s=600.0, python=STACKS[names[0]].python())
        answer = run_ranks(job, log_folder=folder / "logs")[0]
        return {name: Record.of(answer[name]) for name in names}

    return records


@pytest.mark.process
@pytest.mark.parametrize("name", SEPARATE)
def test_frameworks_in_environments_of_their_own(name, tiny_work, tmp_path, reference, on_ranks_of_environment, monkeypatch):
    """Also beside an mpi4py whose MPI library cannot be loaded: none of the launches uses MPI."""
    stack, work = STACKS[name], replace(tiny_work, micro_batches=1)
    if reason := stack.why_absent():
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", str(broken_mpi4py(tmp_path / "site")))
    record = on_ranks_of_environment(stack.environment)[name] if stack.ranks == 2 else launch(stack, work, tmp_path)
    assert_equal_work(work, record, reference)
    assert record.ranks == stack.ranks and set(record.versions) == set(stack.packages)


@pytest.mark.process
def test_deepspeed_reduces_float32_gradients_also_if_products_are_in_bf16(tiny_work, tmp_path, reference):
    stack = STACKS["deepspeed zero-3"]
    if reason := stack.why_absent():
        pytest.skip(reason)
    record = launch(stack, replace(tiny_work, dtype="bf16", micro_batches=1), tmp_path)
    assert "bfloat16" not in record.reduced and record.reduced["float32"] > 0
    assert 1e-5 < abs(record.losses[0] - reference.losses[0]) < 5e-2  # the products are in bf16


def broken_mpi4py(folder: Path) -> Path:
    """A folder for PYTHONPATH with an installed mpi4py that raises what the real one raises without its library."""
    (folder / "mpi4py").mkdir(parents=True)
    (folder / "mpi4py" / "__init__.py").write_text("")
    (folder / "mpi4py" / "MPI.py").write_text('raise RuntimeError("cannot load MPI library")\n')
    (folder / "mpi4py-4.1.2.dist-info").mkdir()
    (folder / "mpi4py-4.1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1.2\n")
    return folder


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}
# The table of layouts in the documents, and their presets, have up to four ranks for each matrix, and two for two stages.
FOUR_RANKS = {"TP 4": {"tensor": 4}, "TP 2 + PP 2": {"tensor": 2, "pipeline": 2}}


@pytest.fixture(scope="module")
def llama_of_four_heads(tmp_path_factory) -> Work:
    """20 steps of 8 rows. The Llama has four key-value heads, so that each of four ranks has one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, steps, length = tmp_path_factory.mktemp("four-heads"), 20, 16
    torch.manual_seed(0)
    shape = LlamaShape(64, 2, 8, 4, 128, 64)
    model = LlamaForCausalLM(LlamaConfig(**asdict(shape), initializer_range=64**-0.5, bos_token_id=None, eos_token_id=None))
    write_work_folder(folder, model, np.random.default_rng(0).integers(0, 64, (8 * steps, length + 1)))
    return Work(str(folder), steps, 8, length, micro_batches=2)


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("layout", FOUR_RANKS)
def test_megatron_core_on_four_ranks_trains_like_the_plain_loop(layout, llama_of_four_heads, tmp_path):
    stack = replace(STACKS["megatron-core"], ranks=4, options=FOUR_RANKS[layout])
    if reason := stack.why_absent():
        pytest.skip(reason)
    work = llama_of_four_heads
    expected = Record.of(plain.train(work, Observer(work, "plain loop", (), tmp_path / "plain")))
    record = launch(stack, work, tmp_path / "four")
    assert_equal_work(work, record, expected, 1e-5)  # the bar is 1e-4
    assert record.ranks == 4 and record.counted_tokens == 20 * 8 * 16
    assert record.norms == pytest.approx(expected.norms, rel=1e-5) and record.losses[-1] < record.losses[0]


def test_megatron_core_refuses_bf16_because_its_masters_would_start_from_rounded_weights(tiny_work, tmp_path):
    work = replace(tiny_work, dtype="bf16")
    with process_group():
        observer = Observer(work, "megatron-core", (), tmp_path)
        with pytest.raises(HyperionError, match="in fp32 only"):
            megatron_core.train(work, observer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"tie_word_embeddings": True}, "tied embeddings"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"head_dim": 32}, "heads of another width"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"rope_parameters": LLAMA_3 | {"low_freq_factor": 2.0}}, "other values of rope_type 'llama3'"),
    ],
)
def test_megatron_core_refuses_a_model_that_it_would_train_as_another_one(changes, said, tiny_work):
    config = tiny_work.config()
    assert megatron_core._translated(config)[1:] == (config["rope_parameters"]["rope_theta"], None)
    assert megatron_core._translated(config | {"rope_parameters": LLAMA_3})[1:] == (5e5, 8.0)
    with pytest.raises(HyperionError, match="does not translate to megatron-core") as error:
        megatron_core._translated(config | changes)
    assert said in error.value.what


def rotary_frequencies(config: dict) -> list[float]:
    """The frequencies of megatron-core's rotary embedding for a config.json of transformers."""
    use_adapted()
    from hyperion.parallel.megatron import gpt

    shape, theta, factor = megatron_core._translated(config)
    layout = MegatronLayout()
    with process_group(), gpt.model_parallel(layout):
        return gpt.build_gpt(shape, layout, 8, 1e-5, theta, factor).rotary_pos_emb.inv_freq.tolist()


@pytest.mark.process
@pytest.mark.parametrize("model", ["llama_tiny", "qwen_tiny"])
def test_rotary_frequencies_are_those_of_transformers(model):
    """Training cannot show this: at a few positions, the scaled frequencies of Llama 3.1 have angles of almost zero."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if reason := STACKS["megatron-core"].why_absent():
        pytest.skip(reason)
    config = transformers_config(model)
    with IsolatedProcess(timeout_s=120) as process:
        found = process.run(partial(rotary_frequencies, config.to_dict()))
    expected = LlamaRotaryEmbedding(config).inv_freq.tolist()  # type: ignore[arg-type]  # Qwen2 has the same embedding
    assert found == pytest.approx(expected, rel=1e-6) and len(found) == len(expected)
