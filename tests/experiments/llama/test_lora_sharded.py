"""LoRA under FSDP2 on two ranks: losses of one device, layers as units, adapters for one process."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from hyperion.chapter.context import Context
from hyperion.checkpoints import CheckpointError, checkpoint_path
from hyperion.experiments.llama.lora_sharded import VARIANT, LoraShardedOptions, _layout_rows, forecast, run
from hyperion.processes import process_group
from hyperion.results import RowError
from hyperion.training import Precision, frozen_sha256, load_adapter
from hyperion.workloads.fine_tuning import base_model, fine_tuning_engine, with_lora

# Two ranks on the CPU; on GPUs, of which there may be one, the chapter itself shows it.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these two ranks compute on the CPU")

SIZES = {
    "model": "random_llama_d64_l2",
    "parity_model": "random_llama_d64_l2",
    "real_weights": False,
    "sequence_length": 48,
    "batch_size": 4,
    "held_out_rows": 8,
    "steps": 20,
    "learning_rate": 1e-2,
    "precision": "fp32",
    "steady_time_limit_s": 0.1,
    "ranks": 2,
    "timeout_s": 300,
}


def context_in(folder) -> Context:
    return Context(
        notebook="06_llama_lora", experiment="lora_sharded", sizes=dict(SIZES), data_source="synthetic", workspace=folder
    )


@pytest.fixture(scope="module")
def done(ranks_stay, tmp_path_factory):
    """The experiment's context and result."""
    torch.set_num_threads(1)
    context = context_in(tmp_path_factory.mktemp("sharded"))
    return context, run(context, lambda *progress: None)


def value(result, metric, what, rank=None):
    return next(row.value for row in result.rows if (row.metric, row.params.get("what"), row.rank) == (metric, what, rank))


@pytest.mark.process
def test_two_ranks_train_as_one_device_does_layer_by_layer(done):
    context, result = done
    for row in result.rows:
        row.validate()
    assert value(result, "relative_difference", "training loss") < 1e-5
    assert value(result, "count", "FSDP units") == forecast(context)[0].estimate == 3
    # What a rank holds is foretold of each of them, the losses of all together.
    assert {f.metric: f.each_rank for f in forecast(context)} == {"count": False, "relative_difference": False, "share": True}
    for rank in range(2):
        assert value(result, "share", "parameter bytes held", rank) == pytest.approx(0.5, rel=0.01)
        assert value(result, "relative_difference", "base weights after training", rank) == 0
    steps = result.samples[result.samples["kind"] == "step"]
    assert len(steps) == 20 and steps["sharded"].iloc[-1] < steps["sharded"].iloc[0]


@pytest.mark.process
def test_one_process_loads_the_adapters_of_the_ranks_and_no_other_base_may(done):
    context, result = done
    assert value(result, "relative_difference", "logits, adapter loaded by one process") < 1e-5
    path = checkpoint_path(context.workspace / "adapters", 20)
    assert sorted(file.name for file in path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
        "manifest.json",
    ]
    options = LoraShardedOptions.of(context)
    model = with_lora(base_model(context, options.data(context), torch.float32), 0)
    load_adapter(model, path, frozen_sha256(model))
    with torch.no_grad():
        model.get_parameter("lm.base_model.model.model.norm.weight").add_(0.1)
    with pytest.raises(CheckpointError, match="was trained on weights with sha256"):
        load_adapter(model, path, frozen_sha256(model))


def test_a_wrapper_that_finds_no_layer_is_caught(tmp_path):
    context = context_in(tmp_path)
    options = LoraShardedOptions.of(context)
    data = options.data(context)
    with process_group(backend="gloo") as here:
        model = with_lora(base_model(context, data, torch.float32), 0)
        fully_shard(model)  # the root alone: one unit, the whole model gathered at once
        engine = fine_tuning_engine(context, options, model, Precision("fp32", "test"), world=here)
        row = next(row for row in _layout_rows(context, data, engine) if row.metric == "count")
    assert (row.variant, row.value) == (VARIANT, 1)
    with pytest.raises(RowError, match="decoder layers and the root"):
        row.validate()
