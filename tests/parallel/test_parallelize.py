"""A model distributed over two ranks trains as on one device."""

import copy
import functools
import json
import math
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from hyperion.errors import HyperionError
from hyperion.models import Layout, TransformerLM, resnet18
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.parallel.parallelize import BUDGET, CHECKPOINTING, NONE
from tests.parallel import small
from tests.parallel.on_ranks import IMAGE_PLANS, PLANS

SHARED = [name for name in PLANS if name != "alone"]
SHARED_IMAGES = [name for name in IMAGE_PLANS if name != "alone"]


def relative(curve, reference, column: int) -> float:
    """Largest relative difference of a column of two curves."""
    found, expected = (np.array(values)[:, column] for values in (curve, reference))
    return float(np.max(np.abs(found - expected) / np.abs(expected)))


@pytest.mark.process
@pytest.mark.parametrize("plan", SHARED)
def test_a_transformer_trains_as_on_one_device(answers, plan):
    found, alone = answers[0]["language"][plan], answers[0]["language"]["alone"]
    assert len(found["curve"]) > 20
    assert relative(found["curve"], alone["curve"], 0) < 5e-6, "loss"
    assert relative(found["curve"], alone["curve"], 1) < 1e-3, "gradient norm, which clips every step"
    assert min(norm for _, norm, *_ in alone["curve"]) > 0.5
    assert relative(found["curve"], alone["curve"], 2) == 0 and found["seen"] == alone["seen"], "items"
    assert found["state"] == alone["state"], "the loader's state knows no ranks"
    parts = np.array([answer["language"][plan]["curve"] for answer in answers])
    np.testing.assert_allclose(parts[:, :, 3].mean(axis=0), parts[0, :, 0], rtol=1e-6)
    assert (parts[:, :, 4].sum(axis=0) == parts[0, :, 2]).all()


@pytest.mark.process
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_ranks_with_different_numbers_of_tokens_make_one_devices_step(answers, plan):
    alone = answers[0]["uneven"]["alone"]
    curves = [answer["uneven"][plan] for answer in answers]
    for curve in curves:
        assert relative(curve, alone, 0) < 1e-6 and relative(curve, alone, 1) < 1e-4
        assert [step[2] for step in curve] == [64, 72, 80, 88]
    assert [[step[4] for step in curve] for curve in curves] == [[0, 8, 16, 24], [64] * 4]
    assert curves[0][0][3] == 0.0 and math.isfinite(curves[0][0][0]), "a rank without any target"


@pytest.mark.process
@pytest.mark.parametrize("plan", SHARED_IMAGES)
def test_a_resnet_trains_as_on_one_device_that_normalises_by_parts(answers, plan):
    found, alone = answers[0]["images"][plan], answers[0]["images"]["alone"]
    assert relative(found["curve"], alone["curve"], 0) < 1e-6
    assert relative(found["curve"], alone["curve"], 1) < 1e-6
    assert found["steps counted"] == small.IMAGE_STEPS, "checkpointing does not count a batch twice"


@pytest.mark.process
def test_running_statistics_are_the_same_with_and_without_checkpointing_and_on_all_ranks(answers):
    ddp, checkpointed = (answers[0]["images"][plan]["running"] for plan in SHARED_IMAGES)
    np.testing.assert_allclose(checkpointed, ddp, rtol=1e-9, atol=1e-12)
    assert answers[1]["images"]["ddp"]["running"] == ddp


@pytest.mark.process
@pytest.mark.parametrize(("task", "plan"), [*(("language", p) for p in SHARED), *(("images", p) for p in SHARED_IMAGES)])
def test_evaluation_over_ranks_is_that_of_one_device(answers, task, plan):
    found = answers[0][task][plan]
    assert found["evaluation"]["loss"] == pytest.approx(found["loss in a plain model"], rel=1e-6)
    assert answers[1][task][plan]["evaluation"] == found["evaluation"]
    if task == "language":
        assert found["evaluation"]["tokens"] == 300
        assert found["evaluation"]["loss"] == pytest.approx(answers[0][task]["alone"]["evaluation"]["loss"], rel=1e-5)
    else:
        assert found["evaluation"]["images"] == 50


@pytest.mark.process
def test_fsdp_gathers_block_by_block_and_holds_half(answers):
    for answer in answers:
        ddp, fsdp = answer["language"]["ddp"], answer["language"]["fsdp"]
        assert fsdp["units"] == ["", "blocks.0", "blocks.1", "blocks.2"] and ddp["units"] == []
        assert ddp["held"] == ddp["whole"] == fsdp["whole"] == small.CONFIG.parameter_count * 4
        assert fsdp["held"] == pytest.approx(fsdp["whole"] / 2, rel=0.02)
        assert len(answer["images"]["fsdp, checkpointed, kept"]["units"]) == 9


@pytest.mark.process
def test_a_step_of_fsdp_sums_twice_beside_what_it_must(answers):
    # Four units are gathered in the forward pass, and all but the last block and the root again in the backward pass.
    assert answers[0]["communication"] == {"allreduce_": 2, "_allgather_base_": 6, "_reduce_scatter_base_": 4}


@pytest.mark.process
def test_in_a_group_of_its_own_a_rank_trains_as_if_there_were_no_others(answers):
    mine, theirs = (answer["own group"] for answer in answers)
    assert abs(mine["alone"][0] - theirs["alone"][0]) > 1e-4
    for found in (mine, theirs):
        np.testing.assert_allclose(found["ddp"], found["alone"], rtol=1e-6)
        np.testing.assert_allclose(found["fsdp"], found["alone"], rtol=1e-6)


@pytest.mark.process
def test_all_ranks_skip_the_step_that_overflows_in_fp16(answers):
    alone = answers[0]["fp16"]["alone"]
    assert alone["skipped"] > 0
    for answer in answers:
        for plan in ("ddp", "fsdp"):
            found = answer["fp16"][plan]
            assert (found["skipped"], found["scale"]) == (alone["skipped"], alone["scale"])
            assert relative(found["curve"], alone["curve"], 0) < 1e-3


@pytest.mark.process
def test_fsdp_in_bf16_keeps_float32_shards(answers):
    found, alone = answers[0]["bf16"], answers[0]["language"]["alone"]["curve"][:5]
    assert found["shards"] == ["torch.float32"]
    assert 0 < relative(found["curve"], alone, 0) < 2e-3


@pytest.mark.process
def test_fsdp_in_bf16_adds_gradients_in_float32(answers):
    assert [answer["bf16"]["gradients"] for answer in answers] == [[128.5]] * 2  # bf16 would give 128 or 129


@pytest.mark.process
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_lora_on_ranks_is_lora_on_one_device(answers, plan):
    found, alone = answers[0]["lora"][plan], answers[0]["lora"]["alone"]
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-5)
    assert found["trainable"] == alone["trainable"] and found["names"] == alone["names"]
    assert found["base stands still"]


@pytest.mark.process
def test_adapters_in_float32_share_a_unit_with_a_base_in_bf16(answers):
    found = answers[0]["lora bf16"]
    layers = "base_model.model.model.layers"
    assert found["units"] == answers[0]["lora"]["fsdp"]["units"] == ["", f"{layers}.0", f"{layers}.1"]
    np.testing.assert_allclose(found["losses"], answers[0]["lora"]["alone"]["losses"], rtol=1e-2)
    assert found["base stands still"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("single", "strategy 'single' on 2 ranks"),
        ("nothing", "over the 1 blocks of Sequential would shard nothing"),
        ("norms", "BatchNorm weights would be bf16"),
        ("world", "needs a process group of size 1, but this process is in a group of 2"),
        ("engine", "2 ranks share each batch, but this TransformerLM is distributed over 1"),
    ],
)
def test_what_does_not_suit_the_ranks_is_refused(answers, case, message):
    assert all(message in answer["refusals"][case] for answer in answers)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_without_a_process_group_there_is_one_device_only(strategy):
    with pytest.raises(HyperionError, match="needs a process group of size 1, but this process is in a group of 0"):
        parallelize(TransformerLM(small.CONFIG), ParallelPlan(strategy), small.ALONE)


def _steps(model: nn.Module, batches) -> torch.Tensor:
    """The gradients of one step after another, as one vector; what is dropped is the same each time."""
    torch.manual_seed(1)
    for inputs, targets in batches:
        loss = model(inputs, targets).sum() if isinstance(model, TransformerLM) else model(inputs)[targets >= 0].sum()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


POLICIES = [{"checkpointing": how} for how in CHECKPOINTING if how not in (NONE, BUDGET)]
POLICIES.append({"checkpointing": BUDGET, "checkpointed_blocks": 2})


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy["checkpointing"])
@pytest.mark.parametrize(
    "make",
    [lambda: TransformerLM(small.CONFIG), lambda: TransformerLM(replace(small.CONFIG, dropout=0.3)), lambda: resnet18(width=4)],
    ids=["lm", "lm with dropout", "resnet"],
)
def test_checkpointed_blocks_give_the_same_gradients_statistics_and_names(make, policy):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    is_lm, double = isinstance(make(), TransformerLM), torch.float64
    inputs = torch.randint(50, (4, 8), generator=generator)
    if not is_lm:
        inputs = torch.randn(4, 3, 32, 32, generator=generator, dtype=double)
    batches = [(inputs, torch.randint(50, (4, 8) if is_lm else (4,), generator=generator))] * 2
    torch.manual_seed(0)
    plain = make().to(double)
    torch.manual_seed(0)
    checkpointed = parallelize(make().to(double), ParallelPlan(**policy), small.ALONE)
    assert torch.equal(_steps(checkpointed, batches), _steps(plain, batches))
    assert list(checkpointed.state_dict()) == list(plain.state_dict()) == list(get_model_state_dict(checkpointed))
    for mine, theirs in zip(checkpointed.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})


def test_each_policy_does_again_what_it_says():
    """Three blocks, each with six products, one attention and one GELU; early stop leaves out a block's last product."""
    torch.set_num_threads(1)
    done = {}
    for policy in [{}, *POLICIES]:
        model = parallelize(TransformerLM(small.CONFIG), ParallelPlan(**policy), small.ALONE)
        with _Operations() as operations:
            _steps(model, [small.uneven(None, 3)])
        counts = operations.counts
        attention = "_scaled_dot_product_flash_attention_for_cpu"
        done[policy.get("checkpointing")] = counts["addmm"], counts[attention], counts["gelu"]
    plain = done.pop(None)
    again = {how: tuple(more - once for more, once in zip(counts, plain, strict=True)) for how, counts in done.items()}
    assert again == {"every block": (15, 3, 3), "selective": (0, 0, 3), "budget": (10, 2, 2)}


class _Counting(nn.Module):
    """A block whose result depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(self.linear(x) * self.calls)


class _Averaging(nn.Module):
    """A block with a running mean of its own, which no library knows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.flatten(0, -2).mean(0), 0.5)
        return torch.sin(self.linear(x))


class _InPlace(nn.Module):
    """A block that adds to its own input in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.sin(self.linear(x.detach().mul_(2))) + x


class _OfBlocks(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList([block])

    def forward(self, x):
        y = self.blocks[0](self.stem(x))
        return (y[0] if isinstance(y, tuple) else y).sin().sum()

    def layout(self):
        return Layout(stem=("stem",), blocks=("blocks.0",), head=(), tied=())


_NUMBERS, _TORCHS = "is wrong: its L2 norm is .* and the L2 norm of the difference", "cannot recompute a block: .*inplace"
WRONG_WHEN_COMPUTED_AGAIN = [("selective", lambda: nn.GRU(8, 8, batch_first=True), _NUMBERS)]
for _policy in ("every block", "selective"):
    WRONG_WHEN_COMPUTED_AGAIN += [(_policy, _Counting, _NUMBERS), (_policy, _Averaging, _NUMBERS)]
    WRONG_WHEN_COMPUTED_AGAIN += [(_policy, _InPlace, _TORCHS)]


@pytest.mark.parametrize(("policy", "block", "reason"), WRONG_WHEN_COMPUTED_AGAIN)
def test_a_block_that_cannot_be_computed_again_is_refused_with_the_numbers(policy, block, reason):
    torch.manual_seed(0)
    model = parallelize(_OfBlocks(block()), ParallelPlan(checkpointing=policy), small.ALONE)
    with pytest.raises(HyperionError, match=reason) as caught:
        model(torch.randn(4, 6, 8)).backward()
    assert repr(policy) in caught.value.what and "'none'" in caught.value.next_step


@pytest.mark.parametrize("policy", ["every block", "selective"])
@pytest.mark.parametrize(
    "block", [lambda: nn.LSTM(8, 8, batch_first=True), lambda: nn.RNN(8, 8, batch_first=True), lambda: nn.Linear(8, 8)]
)
def test_a_checkpointed_block_is_refused_or_right(policy, block):
    torch.manual_seed(0)
    x, plain = torch.randn(4, 6, 8), _OfBlocks(block())
    checkpointed = parallelize(copy.deepcopy(plain), ParallelPlan(checkpointing=policy), small.ALONE)
    plain(x).backward()
    if policy == "selective" and isinstance(plain.blocks[0], nn.RNN):
        with pytest.raises(HyperionError, match="cannot recompute a block: .*mutated"):
            checkpointed(x).backward()
        return
    checkpointed(x).backward()
    for mine, theirs in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_comparison_of_checkpointed_blocks_changes_nothing_and_is_made_once():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Dropout(0.5))
    plain = _OfBlocks(block)
    checkpointed = parallelize(copy.deepcopy(plain), ParallelPlan(checkpointing="every block"), small.ALONE)
    calls = []
    checkpointed.blocks[0][0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(4, 6, 8)
    after = []
    for model in (plain, checkpointed):
        torch.manual_seed(1)
        after.append((model(x).item(), torch.rand(3).tolist(), *[b.tolist() for b in model.buffers()]))
    assert after[0] == after[1]
    assert all(parameter.grad is None for parameter in checkpointed.parameters())
    first = len(calls)
    checkpointed(x).backward()
    assert (first, len(calls) - first) == (4, 2)  # compared: three and the step's own; then forward pass and recomputation


@pytest.mark.slow
def test_a_checkpointed_llama_fills_no_cache_twice():
    model, tokens = small.tiny_llama(), torch.arange(12).view(2, 6)
    expected = model(input_ids=tokens, labels=tokens).loss
    model = parallelize(model, ParallelPlan(checkpointing="every block"), small.ALONE)
    model.train()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)


@pytest.mark.slow
def test_compiled_blocks_share_one_graph_and_keep_their_names(monkeypatch):
    from torch._dynamo.utils import counters

    # Traced and differentiated as ever, but not turned into C++, which takes half a minute.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = TransformerLM(small.CONFIG)
    torch.manual_seed(0)
    plan = ParallelPlan(compile_blocks=True, checkpointing="every block")
    compiled = parallelize(TransformerLM(small.CONFIG), plan, small.ALONE)
    batches = [small.uneven(None, 3)]
    counters.clear()
    torch.testing.assert_close(_steps(compiled, batches), _steps(plain, batches), rtol=1e-3, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero3"}, "strategy is 'zero3'"),
        ({"strategy": "fsdp", "param_dtype": "fp8"}, "param_dtype is 'fp8'"),
        ({"strategy": "ddp", "param_dtype": "bf16"}, "belong to strategy 'fsdp', not to 'ddp'"),
        ({"reshard_after_forward": False}, "belong to strategy 'fsdp', not to 'single'"),
        ({"checkpointing": "all"}, "checkpointing is 'all'"),
        ({"checkpointing": "budget"}, "checkpointed_blocks is None, which is not possible with checkpointing 'budget'"),
        (
            {"checkpointing": "selective", "checkpointed_blocks": 3},
            "checkpointed_blocks is 3, which is not possible with checkpointing 'selective'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(HyperionError, match=message):
        ParallelPlan(**options)


def test_a_plan_travels_as_json():
    plan = ParallelPlan("fsdp", "bf16", "budget", 3, True, False)
    assert ParallelPlan(**json.loads(json.dumps(asdict(plan)))) == plan


@pytest.mark.process
def test_equal_ranks_pass(answers):
    assert [answer["agreement"]["clean"] for answer in answers] == ["", ""]


@pytest.mark.process
def test_a_value_changed_on_one_rank_is_named_on_all(answers):
    for answer in answers:
        error = answer["agreement"]["values"]
        assert "parameter blocks.1.mlp.up.weight of rank 1 differs from that of rank 0; 2 of 52 parameters differ" in error


@pytest.mark.process
def test_models_of_other_shapes_are_told_apart_before_anything_hangs(answers):
    expected = "parameter names, shapes or dtypes of rank 1 differ from those of rank 0"
    assert all(expected in answer["agreement"]["shapes"] for answer in answers)
    assert all(expected in answer["agreement"]["dtypes"] for answer in answers)


@pytest.mark.process
def test_every_rank_gets_the_buffers_of_rank_0(answers):
    assert [answer["buffers"] for answer in answers] == [[7.0] * 3] * 2


@pytest.mark.process
def test_running_statistics_are_averaged_over_the_ranks(answers):
    assert [answer["averages"] for answer in answers] == [[[2.0, 2.0], [4.0, 4.0]]] * 2


@pytest.mark.process
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_a_batch_in_four_parts_exchanges_gradients_as_often_as_a_whole_one(answers, plan):
    for answer in answers:
        whole, parts = answer["accumulation"][plan]
        assert parts == whole > 0
