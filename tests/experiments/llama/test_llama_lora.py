"""Fine-tuning with LoRA on synthetic rows: what must hold does, and where it is made not to hold the row is refused."""

import json
from dataclasses import replace

import pytest
import torch

from hyperion.chapter.context import Context
from hyperion.data import load_instructions
from hyperion.data.store.folders import cache_root
from hyperion.data.text.tokenizer import train_tokenizer
from hyperion.errors import HyperionError
from hyperion.experiments.llama import llama_lora
from hyperion.experiments.llama.llama_lora import (
    LlamaLoraOptions,
    adapter_rows,
    fine_tune,
    forecast,
    full_memory,
    restored_adapters,
)
from hyperion.measure import bytes_of, state_of
from hyperion.models import LlamaLM, load_llama
from hyperion.results import RowError
from hyperion.training import Precision, frozen_sha256
from hyperion.workloads.fine_tuning import (
    FULL,
    LORA,
    base_model,
    count_tokens,
    fine_tuning_engine,
    least_flops,
    shape_of,
    state_bytes,
    step_flops,
    with_lora,
)

FP32 = Precision("fp32", "test")
SIZES = {
    "model": "random_llama_d64_l2",
    "real_weights": False,
    "sequence_length": 48,
    "batch_size": 4,
    "held_out_rows": 40,
    "evaluation_batch_size": 20,
    "steps": 30,
    "learning_rate": 1e-2,
    "precision": "fp32",
    "steady_time_limit_s": 0.1,
}


@pytest.fixture
def context(tmp_path, monkeypatch) -> Context:
    torch.set_num_threads(1)
    monkeypatch.delenv("HYPERION_DATA_MIRROR", raising=False)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    return Context(
        notebook="06_llama_lora", experiment="llama_lora", sizes=dict(SIZES), data_source="synthetic", workspace=tmp_path
    )


@pytest.fixture
def options(context) -> LlamaLoraOptions:
    return LlamaLoraOptions.of(context)


@pytest.fixture
def data(context, options):
    return options.data(context)


@pytest.fixture
def batch(context, options, data):
    return llama_lora._batches(context, options, data).next_batch()


@pytest.mark.slow
def test_training_lowers_the_held_out_loss_and_every_row_holds(context):
    result = fine_tune(context, lambda *progress: None)
    for row in result.rows:
        row.validate()
    rows = {(row.metric, row.params.get("what"), row.params.get("step")): row for row in result.rows}
    before, after = rows["validation_loss", None, 0], rows["validation_loss", None, SIZES["steps"]]
    assert after.value < before.value - 1 and after.limit == 0.0 and result.source == "synthetic"
    assert before.value == pytest.approx(next(f for f in forecast(context) if f.params == {"step": 0}).estimate, abs=0.15)
    checked = {what for metric, what, _ in rows if metric == "relative_difference"}
    assert checked == {"base weights after training", "logits, adapter loaded", "logits, adapter merged"}
    assert rows["count", "trainable parameters", None].value == 2 * 16 * (128 + 96 + 96 + 128)
    kinds = result.samples.groupby("kind").size()
    assert kinds["step"] == SIZES["steps"] and kinds["learned token"] >= 2
    read, learned = (
        next(row for row in result.rows if row.params.get("tokens") == tokens and row.metric == "tokens_per_s")
        for tokens in ("prompt and completion", "completion")
    )
    assert learned.value / read.value == pytest.approx(learned.params["batch"] / read.params["batch"])
    memory = [
        row
        for part in (result, full_memory(context, lambda *progress: None))
        for row in part.rows
        if row.metric == "tensor_memory_gib"
    ]
    assert [row.variant for row in memory] == [LORA, FULL] and memory[0].value < memory[1].value
    assert all(row.limit < row.value for row in memory)
    # An epoch's memory has the evaluation in it: the forecast is of the step, whose rows name the model.
    foretold = [f for f in forecast(context) if f.metric == "tensor_memory_gib"]
    assert all(f.params and f.params.items() <= row.params.items() for f, row in zip(foretold, memory, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("method", [LORA, FULL])
def test_the_bytes_of_a_step_are_those_that_are_estimated(context, options, data, batch, method):
    base = base_model(context, data, torch.float32)
    model = with_lora(base, 0) if method == LORA else LlamaLM(base)
    engine = fine_tuning_engine(context, options, model, FP32)
    engine.optimizer.zero_grad = lambda: None  # the gradients of the step stay to be counted
    engine.train_step(batch)
    held = state_of(model, engine.optimizer)
    del held["buffers"]
    counted = bytes_of(tensor for tensors in held.values() for tensor in tensors if tensor.ndim)
    assert counted == state_bytes(shape_of(base), method, "fp32")


def test_the_least_work_is_less_than_the_work(batch):
    config, work = load_llama("random_llama_d64_l2", vocab_size=640, device="meta").config, count_tokens(batch)
    assert work.positions >= work.tokens > work.completion_tokens > 0
    for method in (LORA, FULL):
        assert 0 < least_flops(config, method, work) < step_flops(config, method, work.length).forward_backward


def test_tokens_are_counted_from_targets(data):
    whole = torch.from_numpy(data.train.inputs).long(), torch.from_numpy(data.train.targets).long()
    work = count_tokens(whole)
    assert (work.tokens, work.completion_tokens) == (data.train.tokens, data.train.completion_tokens)


@pytest.mark.slow
def test_a_base_that_was_trained_by_mistake_is_caught(context, options, data, batch):
    base = base_model(context, data, torch.float32)
    before = frozen_sha256(base)
    model = with_lora(base, 0)
    model.get_parameter("lm.base_model.model.model.norm.weight").requires_grad_(True)
    engine = fine_tuning_engine(context, options, model, FP32)
    engine.train_step(batch)
    row = adapter_rows(context, options, data, engine, before)[0]
    with pytest.raises(RowError, match="sha256 unchanged"):
        row.validate()


def test_steps_that_only_measure_leave_no_trace(context, options, data, batch):
    model = with_lora(base_model(context, data, torch.float32), 0)
    engine, before = fine_tuning_engine(context, options, model, FP32), [p.clone() for p in model.parameters()]
    with restored_adapters(model):
        engine.train_step(batch)
        assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "rows, message", [(640, None), (300, "the model's embedding has 300 rows"), (4000, "this model has another tokenizer")]
)
def test_real_weights_come_with_their_tokenizer_which_must_fit(context, rows, message):
    folder = cache_root() / "llama"
    load_llama("random_llama_d64_l2", vocab_size=rows).save_pretrained(folder)
    train_tokenizer(load_instructions("synthetic").as_corpus())._bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    real = replace(context, data_source="cache", sizes=context.sizes | {"real_weights": True})
    rows_of_tasks = load_instructions("synthetic")
    (cache_root() / "instructions").mkdir()
    tasks = [vars(row) for row in rows_of_tasks.train + rows_of_tasks.held_out]
    (cache_root() / "instructions/instructions.json").write_text(json.dumps(tasks))
    found = LlamaLoraOptions.of(real).data(real)
    assert (found.model, found.weights) == ("llama", folder)
    assert "real weights" in forecast(real)[0].basis
    if message is None:
        assert base_model(real, found, torch.float32).config.vocab_size == 640
    else:
        with pytest.raises(HyperionError, match=message):
            base_model(real, found, torch.float32)
