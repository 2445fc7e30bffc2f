"""What two ranks do for the parallel tests; the tests judge what comes back."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from hyperion.errors import HyperionError
from hyperion.models import Layout, TransformerLM, resnet18
from hyperion.parallel import (
    ParallelPlan,
    assert_ranks_agree,
    average_statistics,
    fsdp_units,
    full_parameter_bytes,
    local_parameter_bytes,
    parallelize,
)
from hyperion.parallel.collectives import assert_same_shapes
from hyperion.processes import world
from hyperion.training import (
    LanguageEngine,
    Precision,
    adamw,
    add_lora,
    evaluate_images,
    evaluate_language,
    trainable_parameter_count,
)
from tests.parallel import small

PLANS = {
    "alone": None,
    "ddp": ParallelPlan("ddp"),
    "fsdp": ParallelPlan("fsdp"),
    "ddp, checkpointed": ParallelPlan("ddp", checkpointing="every block"),
    "fsdp, checkpointed, kept": ParallelPlan("fsdp", checkpointing="every block", reshard_after_forward=False),
}
IMAGE_PLANS = ("alone", "ddp", "fsdp, checkpointed, kept")


def everything() -> dict:
    """The answers of all parts, JSON-able."""
    torch.set_num_threads(1)
    return {
        "language": {name: language(plan) for name, plan in PLANS.items()},
        "uneven": {name: uneven(PLANS[name]) for name in ("alone", "ddp", "fsdp")},
        "images": {name: images(PLANS[name]) for name in IMAGE_PLANS},
        "fp16": {name: fp16(PLANS[name]) for name in ("alone", "ddp", "fsdp")},
        "bf16": bf16(),
        "lora": {name: lora(PLANS[name]) for name in ("alone", "ddp", "fsdp")},
        "lora bf16": lora(PLANS["fsdp, checkpointed, kept"], torch.bfloat16),
        "communication": communication(),
        "own group": own_group(),
        "agreement": agreement(),
        "buffers": buffers(),
        "averages": averages(),
        "accumulation": {name: accumulation(PLANS[name]) for name in ("ddp", "fsdp")},
        "refusals": refusals(),
    }


def _curve(engine, batches) -> list[list[float]]:
    """[loss, gradient norm, items, loss of this rank, its items] of each step."""
    curve = []
    for batch in batches:
        step = engine.train_step(batch)
        curve.append([float(v) for v in (step.loss, step.gradient_norm, step.items, step.rank_loss, step.rank_items)])
    return curve


def _full(model) -> dict[str, torch.Tensor]:
    """The whole state by the names of the plain model, on every rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def language(plan) -> dict:
    """Training and evaluation of a Transformer."""
    engine, batches = small.language_engine(plan), small.language_batches(plan)
    curve = _curve(engine, (batches.next_batch() for _ in range(small.STEPS)))
    evaluation = engine.evaluate(small.language_validation())
    held = local_parameter_bytes(engine.model)
    plain = TransformerLM(small.CONFIG)
    plain.load_state_dict(_full(engine.model))
    again = evaluate_language(plain, small.language_validation(), engine.precision, engine.device)
    curve += _curve(engine, [batches.next_batch()])
    assert_ranks_agree(engine.model)
    return {
        "curve": curve,
        "evaluation": evaluation,
        "loss in a plain model": again.loss,
        "seen": engine.tokens_seen,
        "units": fsdp_units(engine.model),
        "state": batches.state_dict(),
        "held": held,
        "whole": full_parameter_bytes(engine.model),
    }


def uneven(plan) -> list[list[float]]:
    """Ranks with different numbers of targets."""
    return _curve(small.language_engine(plan), (small.uneven(plan, step) for step in range(4)))


def images(plan) -> dict:
    """Training and evaluation of a ResNet."""
    engine, batches = small.image_engine(plan), small.image_batches(plan)
    curve = _curve(engine, (batches.next_batch() for _ in range(small.IMAGE_STEPS)))
    evaluation = engine.evaluate(small.image_validation())
    state, plain = _full(engine.model), small.image_model()
    plain.load_state_dict(state)
    again = evaluate_images(plain, small.image_validation(), engine.precision, engine.device)
    return {
        "curve": curve,
        "evaluation": evaluation,
        "loss in a plain model": again.loss,
        "steps counted": int(state["norm1.num_batches_tracked"]),
        "units": fsdp_units(engine.model),
        "running": torch.cat([value for name, value in state.items() if "running" in name]).tolist(),
    }


def fp16(plan) -> dict:
    """Loss scaling, with a scale so large that the first gradients overflow."""
    engine, batches = small.language_engine(plan, precision="fp16"), small.language_batches(plan)
    engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 2.0**22})
    curve = _curve(engine, (batches.next_batch() for _ in range(8)))
    return {"curve": curve, "scale": engine.scaler.scale, "skipped": engine.scaler.skipped_steps}


def bf16() -> dict:
    """FSDP that gathers in bf16 and keeps float32 shards."""
    plan = ParallelPlan("fsdp", param_dtype="bf16")
    engine, batches = small.language_engine(plan), small.language_batches(plan)
    curve = _curve(engine, (batches.next_batch() for _ in range(5)))
    # The gradient of each weight is 256 on rank 0 and 1 on rank 1. bf16 represents both, but not their sum.
    layer = parallelize(_OneLayer(), plan, world())
    layer(torch.full((1, 4), 1.0 if world().rank else 256.0)).sum().backward()
    gradients = {value for p in layer.parameters() for value in p.grad.full_tensor().flatten().tolist()}
    return {"curve": curve, "shards": sorted({str(p.dtype) for p in engine.model.parameters()}), "gradients": sorted(gradients)}


class _OneLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2, bias=False)

    def layout(self) -> Layout:
        return Layout(stem=(), blocks=("layer",), head=())

    def forward(self, x):
        return self.layer(x)


def lora(plan, dtype: torch.dtype = torch.float32) -> dict:
    """Frozen base and trainable adapters in one unit; the adapters are float32 whatever the base is."""
    here = small.here_or_alone(plan)
    model = add_lora(small.tiny_llama(seed=here.rank).to(dtype), rank=4, alpha=8)
    if plan is not None:
        model = parallelize(model, plan, here)
    before = _frozen(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(5):
        tokens = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(step))
        own = tokens.chunk(here.size)[here.rank]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / here.size
        if here.size > 1:
            dist.all_reduce(mean)
        losses.append(float(mean))
    after = _frozen(model)
    return {
        "losses": losses,
        "trainable": trainable_parameter_count(model),
        "units": fsdp_units(model),
        "names": sorted(_full(model)),
        "base stands still": all(torch.equal(before[name], after[name]) for name in before),
    }


def _frozen(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in _full(model).items() if "lora" not in name}


def communication() -> dict[str, int]:
    """Collectives of one FSDP step by kind."""
    engine, batches = small.language_engine(PLANS["fsdp"]), small.language_batches(PLANS["fsdp"])
    engine.train_step(batches.next_batch())
    with CommDebugMode() as mode:
        engine.train_step(batches.next_batch())
    return {str(kind).rpartition(".")[2]: count for kind, count in mode.get_comm_counts().items()}


def own_group() -> dict[str, list[float]]:
    """Losses of a model of this rank alone, with its own weights: plain, and distributed over a group of one."""
    here, losses = world().alone(), {}
    for name in ("alone", "ddp", "fsdp"):
        torch.manual_seed(10 + world().rank)
        model = TransformerLM(small.CONFIG)
        if PLANS[name] is not None:
            model = parallelize(model, PLANS[name], here)
        engine = LanguageEngine(model, adamw(model, 1e-2), lambda step: 1e-2, Precision("fp32", "test"), here.device, world=here)
        batches = small.language_batches(None)
        losses[name] = [float(engine.train_step(batches.next_batch()).loss) for _ in range(5)]
    return losses


def agreement() -> dict[str, str]:
    """Faults on one rank, as raised on every rank."""
    model = small.language_engine(PLANS["ddp"]).model
    found = {"clean": _error(lambda: assert_ranks_agree(model))}
    if world().rank == 1:
        with torch.no_grad():
            model.module.blocks[1].mlp.up.weight[3, 5] += 1e-6
            model.module.final_norm.bias[0] = 1.0
    found["values"] = _error(lambda: assert_ranks_agree(model))
    other = torch.nn.Linear(3, 4 + world().rank)
    found["shapes"] = _error(lambda: assert_ranks_agree(other))
    other = torch.nn.Linear(3, 4, dtype=torch.bfloat16 if world().rank else torch.float32)
    found["dtypes"] = _error(lambda: assert_same_shapes(other))  # only this check: a broadcast of both would hang
    return found


def buffers() -> list[float]:
    """A buffer that differed by rank before the model was sharded. DDP would copy it itself."""
    model = TransformerLM(small.CONFIG)
    model.register_buffer("own", torch.full((3,), 7.0 + world().rank))
    return parallelize(model, PLANS["fsdp"], world()).own.tolist()


def averages() -> list[list[float]]:
    """Running mean and variance of a BatchNorm after the averaging; before it they are 1 and 2, and 3 and 6."""
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean.fill_(1.0 + 2 * world().rank)
    norm.running_var.fill_(2.0 + 4 * world().rank)
    model = DistributedDataParallel(torch.nn.Sequential(norm), broadcast_buffers=False)
    average_statistics(model)
    return [norm.running_mean.tolist(), norm.running_var.tolist()]


def accumulation(plan) -> list[int]:
    """Collectives that reduce gradients in a step of one part, and in a step of four."""
    counts = []
    for parts in (1, 4):
        engine, batches = small.language_engine(plan), small.language_batches(plan)
        engine.micro_batches = parts
        engine.train_step(batches.next_batch())
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            engine.train_step(batches.next_batch())
        reduced = ("gloo:all_reduce", "c10d::allreduce_") if plan.strategy == "ddp" else ("c10d::_reduce_scatter_base_",)
        counts.append(sum(event.count for event in profiler.key_averages() if event.key in reduced))
    return counts


def refusals() -> dict[str, str]:
    """Plans that do not suit."""
    model, bare = TransformerLM(small.CONFIG), torch.nn.Sequential(torch.nn.ReLU())
    bare.layout = lambda: Layout(stem=(), blocks=("0",), head=())
    return {
        "single": _error(lambda: parallelize(model, ParallelPlan(), world())),
        "nothing": _error(lambda: parallelize(bare, ParallelPlan("fsdp"), world())),
        "norms": _error(lambda: parallelize(resnet18(width=8), ParallelPlan("fsdp", param_dtype="bf16"), world())),
        "world": _error(lambda: parallelize(model, ParallelPlan("ddp"), small.ALONE)),
        "engine": _error(_engine_of_a_plain_model),
    }


def _engine_of_a_plain_model() -> None:
    engine = small.language_engine(None)
    type(engine)(engine.model, engine.optimizer, engine.schedule, engine.precision, engine.device)


def _error(work) -> str:
    try:
        work()
    except HyperionError as error:
        return str(error)
    return ""
