"""What two ranks check together: each calls `main(FOLDER)` under torchrun's variables.

Each check's outcome goes to FOLDER/checks-<rank>.json. After a failure the rank ends, since the others may wait for it.
One launch does all, because starting two ranks costs more than any check.
"""

import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hyperion.checkpoints import (
    CheckpointError,
    agreed,
    checkpoint_path,
    export_model,
    on_rank_0,
    read_state,
    saving,
    write_sharded,
)
from hyperion.data.batches import LanguageBatches
from hyperion.data.images.device_images import ImageBatches
from hyperion.errors import HyperionError
from hyperion.models import TransformerConfig, TransformerLM, resnet18
from hyperion.parallel import DesyncError, ParallelPlan, parallelize
from hyperion.processes import process_group, world
from hyperion.training import (
    ImageEngine,
    Interrupted,
    LanguageEngine,
    NonFiniteError,
    TrainingPlan,
    WarmupCosine,
    adamw,
    choose_precision,
    mean_over_ranks,
    seed_everything,
    sgd_nesterov,
    train,
)
from hyperion.training.rank_data import require_own_parts
from tests.training.small import STEPS, TOKENS, DropoutLM, Slow, small_validation

SAVED_AT, NEXT = 9, 5
PLAN = TrainingPlan(steps=STEPS, checkpoint_every=SAVED_AT)
UNSAVED = TrainingPlan(steps=STEPS)


def engine_of(strategy: str, seed: int = 0, kind: type[TransformerLM] = TransformerLM, **changes) -> LanguageEngine:
    """The engine of the small run, distributed over the ranks."""
    seed_everything(seed)
    here = world()
    model = kind(TransformerConfig(vocab_size=19, context=8, width=16, heads=2, layers=2))
    model = parallelize(model, ParallelPlan(strategy=strategy), here)
    precision, schedule = choose_precision(here.device), WarmupCosine(3e-3, 4, STEPS)
    return LanguageEngine(model, adamw(model, 3e-3), schedule, precision, here.device, **changes)


def batches_of(kind: type[LanguageBatches] = LanguageBatches) -> LanguageBatches:
    """Seven batches an epoch, this rank's part of each."""
    here = world()
    return kind(TOKENS, sequence_length=8, batch_size=10, seed=3, rank=here.rank, ranks=here.size)


def dropout_run(folder: Path | None, seed: int = 0, batches=None):
    return train(
        engine_of("fsdp", seed, DropoutLM),
        batches or batches_of(),
        PLAN if folder else UNSAVED,
        validation=small_validation,
        folder=folder,
    )


class Crash(Exception):
    pass


class Crashing(LanguageBatches):
    """Fails after eleven batches, the way a crash does: nothing is saved."""

    taken = 0

    def next_batch(self):
        self.taken += 1
        if self.taken == 12:
            raise Crash
        return super().next_batch()


def check_resume_is_bit_for_bit(place: Path) -> None:
    whole = dropout_run(None)
    with pytest.raises(Crash):
        dropout_run(place / "crashed", batches=batches_of(Crashing))
    resumed = dropout_run(place / "crashed", seed=5)
    assert resumed.resumed_at == [9]
    assert resumed.losses == whole.losses
    assert [r.loss for r in resumed.rank_epochs] == [r.loss for r in whole.rank_epochs]
    assert [r.evaluation for r in resumed.epochs] == [r.evaluation for r in whole.epochs]


def check_records_of_ranks_add_up(place: Path) -> None:
    seen = []
    history = train(engine_of("ddp"), batches_of(), TrainingPlan(epochs=2), on_epoch=[seen.append])
    assert [(r.epoch, r.rank) for r in history.rank_epochs] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for epoch, parts in zip(history.epochs, (history.rank_epochs[:2], history.rank_epochs[2:]), strict=True):
        assert parts[0].loss != parts[1].loss
        assert epoch.loss == pytest.approx(mean_over_ranks(parts), rel=1e-6)
        assert epoch.items == sum(part.items for part in parts) == 7 * 80
        assert epoch.time_s == max(part.time_s for part in parts)
        assert epoch.rank is None and epoch.steps == parts[0].steps == 7
    assert seen == (history.epochs if world().rank == 0 else [])
    histories: list = [None, None]
    dist.all_gather_object(histories, history)
    assert histories[0] == histories[1]


def check_layouts_exchange_checkpoints(place: Path) -> None:
    expected = json.loads((place / "single.json").read_text())
    for strategy in ("fsdp", "ddp"):
        with pytest.raises(Crash):
            train(engine_of(strategy), batches_of(Crashing), PLAN, folder=place / strategy)
    for source, strategy in (("single", "fsdp"), ("single", "ddp"), ("fsdp", "ddp"), ("ddp", "fsdp")):
        folder = copy_of(place / source, place / f"{source}-to-{strategy}")
        history = train(engine_of(strategy, seed=4), batches_of(), TrainingPlan(steps=SAVED_AT + NEXT), folder=folder)
        assert history.resumed_at == [SAVED_AT]
        assert history.losses == pytest.approx(expected[: SAVED_AT + NEXT], abs=1e-5), (source, strategy)


def check_accumulated_steps_are_those_of_whole_batches(place: Path) -> None:
    expected = json.loads((place / "single.json").read_text())
    for strategy in ("ddp", "fsdp"):
        history = train(engine_of(strategy, micro_batches=2), batches_of(), TrainingPlan(steps=NEXT))  # of five examples: 3 and 2
        assert history.losses == pytest.approx(expected[:NEXT], abs=1e-5), strategy


def check_a_truncated_shard_is_refused_by_all(place: Path) -> None:
    folder = place / "truncated"
    first = train(engine_of("fsdp"), batches_of(), TrainingPlan(steps=6, checkpoint_every=3), folder=folder)
    bad = sorted((checkpoint_path(folder, 6) / "engine").glob("*.safetensors"))[1]
    on_rank_0(lambda: bad.write_bytes(bad.read_bytes()[:-9]))
    engine = engine_of("fsdp", seed=2)
    again = train(engine, batches_of(), TrainingPlan(steps=6, checkpoint_every=3), folder=folder)
    assert again.resumed_at == [3] and again.losses == first.losses
    for step in (3, 6):
        shard = sorted((checkpoint_path(folder, step) / "engine").glob("*.safetensors"))[0]
        on_rank_0(lambda shard=shard: shard.write_bytes(shard.read_bytes()[:-9]))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints can be used") as caught:
        train(engine_of("fsdp"), batches_of(), TrainingPlan(steps=6), folder=folder)
    assert str(caught.value.where) == str(shard)


def check_a_full_disk_on_one_rank_aborts_all(place: Path) -> None:
    folder, engine, batches = place / "full", engine_of("fsdp"), batches_of()
    first = train(engine, batches, TrainingPlan(steps=3), folder=folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    with pytest.raises(CheckpointError, match="rank 1 of 2: cannot write the tensors: File too large") as caught:
        train(engine_of("fsdp", seed=1), batches_of(), TrainingPlan(steps=4), folder=folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "choose another checkpoint folder" in caught.value.next_step
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    again = train(engine_of("fsdp", seed=1), batches_of(), TrainingPlan(steps=4), folder=folder)
    assert again.resumed_at == [3] and again.losses[:3] == first.losses


def check_an_error_of_one_rank_is_raised_on_all(place: Path) -> None:
    rank = world().rank
    with pytest.raises(CheckpointError, match="rank 1 of 2: ZeroDivisionError: "):
        agreed(lambda: 1 // (1 - rank))
    with pytest.raises(CheckpointError, match="the same everywhere") as caught:
        agreed(lambda: fail("the same everywhere"))
    assert "rank" not in caught.value.what
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        on_rank_0((place / "absent").read_text)
    with pytest.raises(CheckpointError, match="rank 1 of 2: ValueError: mine"), saving(place / "one", 1) as new:
        (new / str(rank)).write_text("x")
        if rank == 1:
            raise ValueError("mine")
    with pytest.raises(CheckpointError, match="does not see the folder"), saving(place / f"own-{rank}", 1):
        pass
    with pytest.raises(CheckpointError, match="rank 1 of 2: early"), saving(place / "one", 1) as new:
        if rank == 1:
            fail("early")  # while rank 0 goes on to what both do together
        write_sharded(new, {"x": torch.ones(2)})
    dist.barrier()
    assert list((place / "one").iterdir()) == []


def check_nan_on_one_rank_stops_all(place: Path) -> None:
    class Poisoned(LanguageBatches):
        def next_batch(self):
            inputs, targets = super().next_batch()
            if self.position == 5 and self.rank == 1:
                engine.model.register_forward_hook(lambda module, args, output: output * float("nan"))
            return inputs, targets

    engine = engine_of("ddp")
    with pytest.raises(NonFiniteError, match="step 5 on rank 1: loss nan") as caught:
        train(engine, batches_of(Poisoned), TrainingPlan(steps=9, checkpoint_every=2), folder=place / "nan")
    evidence = read_state(Path(caught.value.where).parent)
    own = batches_of()
    own.rank = 1
    batch = [own.next_batch() for _ in range(5)][-1]
    assert evidence["step"] == 5 and evidence["rank"] == 1
    assert all(torch.equal(a, b) for a, b in zip(evidence["batch"], batch, strict=True))
    assert train(engine_of("ddp"), batches_of(), TrainingPlan(steps=5), folder=place / "nan").resumed_at == [4]


def check_a_replica_that_diverges_stops_all(place: Path) -> None:
    class Diverging(LanguageBatches):
        def next_batch(self):
            if self.position == 5 and self.rank == 1:
                with torch.no_grad():
                    next(engine.model.parameters()).view(-1)[0] += 1e-6
            return super().next_batch()

    def trained(plan: TrainingPlan, folder: Path | None = None):
        nonlocal engine
        engine = engine_of("ddp")
        return train(engine, batches_of(Diverging), plan, folder=folder)

    engine = None
    with pytest.raises(DesyncError, match="^after step 8, .* of rank 1 differs .*; all parameters were equal after step 4"):
        trained(TrainingPlan(steps=9, compare_ranks_every=4))
    with pytest.raises(DesyncError, match="after step 6, .* were equal after step 3"):
        trained(TrainingPlan(steps=9, checkpoint_every=3), place / "diverged")
    assert [path.name for path in sorted((place / "diverged").glob("step-*"))] == ["step-00000003"]
    with pytest.raises(DesyncError, match="after step 9, "):
        trained(TrainingPlan(steps=9))


def check_running_statistics_are_saved_alike(place: Path) -> None:
    def image_engine(seed: int) -> ImageEngine:
        seed_everything(seed)
        model = parallelize(resnet18(width=4), ParallelPlan(strategy="ddp"), world())
        precision, schedule = choose_precision(world().device), WarmupCosine(0.1, 2, 10)
        return ImageEngine(model, sgd_nesterov(model, 0.1), schedule, precision, world().device)

    def image_batches() -> ImageBatches:
        images, rank = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8), world().rank
        return ImageBatches(images, np.arange(40) % 10, 10, ([0.5] * 3, [0.25] * 3), seed=1, rank=rank, ranks=2)

    engine = image_engine(0)
    first = train(engine, image_batches(), TrainingPlan(steps=2, checkpoint_every=1), folder=place / "images")
    statistics = [buffer for name, buffer in engine.model.named_buffers() if "running" in name]
    for statistic in statistics:
        other = statistic.clone()
        dist.broadcast(other, src=0)
        assert torch.equal(statistic, other)
    on_rank_0(lambda: shutil.rmtree(checkpoint_path(place / "images", 2)))
    resumed = image_engine(1)
    assert train(resumed, image_batches(), TrainingPlan(steps=2), folder=place / "images").losses == first.losses
    for ours, theirs in zip(resumed.model.parameters(), engine.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def check_sigterm_during_an_evaluation_stops_all(place: Path) -> None:
    def interrupted_validation():
        if world().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return small_validation()

    folder, plan = place / "evaluation", TrainingPlan(steps=8)
    with pytest.raises(Interrupted, match="after step 7 of 8"):
        train(engine_of("fsdp"), batches_of(), plan, validation=interrupted_validation, folder=folder)
    history = train(engine_of("fsdp", seed=1), batches_of(), plan, validation=small_validation, folder=folder)
    assert history.resumed_at == [7]
    assert [record.evaluation["tokens"] for record in history.epochs] == [100, 100]


def check_ranks_with_the_same_batch_are_refused(place: Path) -> None:
    whole = LanguageBatches(TOKENS, sequence_length=8, batch_size=10, seed=3)
    engine = engine_of("ddp")
    with pytest.raises(HyperionError, match="ranks 0 and 1 got the same batch") as caught:
        train(engine, whole, UNSAVED)
    assert engine.steps == 0 and caught.value.where == "step 1" and "rows[rank::size]" in caught.value.next_step


def check_every_second_row_of_a_batch_is_an_own_part(place: Path) -> None:
    here, labels = world(), torch.arange(8)
    require_own_parts({"y": labels[here.rank :: here.size]}, "step 1")  # rows[rank::size] of labels is not contiguous
    with pytest.raises(HyperionError, match="ranks 0 and 1 got the same batch"):
        require_own_parts({"y": labels[:: here.size]}, "step 1")


def check_loaders_of_different_lengths_are_refused(place: Path) -> None:
    here, engine = world(), engine_of("ddp")
    tokens = TOKENS[: len(TOKENS) - 200 * here.rank]
    loader = LanguageBatches(tokens, sequence_length=8, batch_size=10, seed=3, rank=here.rank, ranks=here.size)
    with pytest.raises(HyperionError, match="the loader has different numbers of batches: 7 on rank 0, [45] on rank 1"):
        train(engine, loader, UNSAVED)
    assert engine.steps == 0
    plan, held_out = TrainingPlan(steps=1), list(small_validation())
    with pytest.raises(HyperionError, match="the validation loader has different numbers of batches: .* on rank 1"):
        train(engine_of("ddp"), batches_of(), plan, validation=lambda: held_out[here.rank :])


def check_ranks_with_different_held_out_data_are_refused(place: Path) -> None:
    rank, plan, held_out = world().rank, TrainingPlan(steps=1), list(small_validation())
    with pytest.raises(HyperionError, match="ranks 0 and 1 got different batches"):
        train(engine_of("ddp"), batches_of(), plan, validation=lambda: held_out[rank : rank + 1])
    engine = engine_of("ddp")
    engine.evaluate = lambda batches: {"loss": float(len(list(batches)) + rank)}
    with pytest.raises(HyperionError, match=f"returned the loss {len(held_out)} on rank 0, but {len(held_out) + 1} on rank 1"):
        train(engine, batches_of(), plan, validation=lambda: held_out)


class WithIdleLayers(TransformerLM):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.idle = torch.nn.Linear(2, 2)


def check_a_parameter_without_gradient_is_named_under_ddp_and_allowed_under_fsdp(place: Path) -> None:
    for micro_batches in (1, 2):
        with pytest.raises(HyperionError, match=r"does not depend on 2 parameters: idle.weight, idle.bias; DDP") as caught:
            train(engine_of("ddp", kind=WithIdleLayers, micro_batches=micro_batches), batches_of(), UNSAVED)
        assert caught.value.where == "LanguageEngine, step 1" and "'fsdp'" in caught.value.next_step
    assert len(train(engine_of("fsdp", kind=WithIdleLayers), batches_of(), TrainingPlan(steps=2)).losses) == 2


def check_weights_that_fsdp_cannot_tie_are_named(place: Path) -> None:
    config = TransformerConfig(vocab_size=19, context=8, width=16, heads=2, layers=2)
    for other in ("blocks.1.mlp_norm", "final_norm"):
        model = TransformerLM(config)
        model.get_submodule(other).weight = model.blocks[0].mlp_norm.weight
        with pytest.raises(HyperionError, match=f"blocks.0.mlp_norm.weight and {other}.weight are the same parameter"):
            parallelize(model, ParallelPlan(strategy="fsdp"), world())


def check_an_export_is_the_whole_model(place: Path) -> None:
    engine = engine_of("fsdp")
    engine.train_step(batches_of().next_batch())
    path = export_model(engine.model, place / "model.safetensors")
    dist.barrier()
    exported = load_file(path)
    names = {name: tensor.full_tensor() for name, tensor in engine.model.state_dict().items()}
    assert set(exported) == set(names)
    assert all(torch.equal(exported[name], tensor) for name, tensor in names.items())
    with pytest.raises(CheckpointError, match="cannot export the model"):
        export_model(engine.model, path / "below a file")


def fail(what: str) -> None:
    raise CheckpointError(what)


def copy_of(folder: Path, target: Path) -> Path:
    on_rank_0(lambda: shutil.copytree(folder, target) and None)
    return target


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def main(place: Path) -> None:
    """Run all checks in order; then train slowly until a SIGTERM comes, and end the way a job's worker does."""
    torch.set_num_threads(1)
    signal.alarm(900)  # only against a hang: on a busy machine the checks take minutes
    done: dict[str, str] = {}
    file = place / f"checks-{os.environ['RANK']}.json"
    with process_group(timeout_s=300.0, backend="gloo"):
        for check in CHECKS:
            try:
                check(place)
                done[check.__name__] = "passed"
            except BaseException:
                done[check.__name__] = traceback.format_exc()
            file.write_text(json.dumps(done))
            if done[check.__name__] != "passed":
                os._exit(1)
        try:
            train(engine_of("fsdp"), batches_of(Slow), PLAN, folder=place / "terminated")
        except HyperionError as error:
            print(error)
            sys.exit(error.exit_code)
