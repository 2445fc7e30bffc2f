"""Arguments that make no sense, and batches, loaders and models of another form: refused with a remedy, before a step."""

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyperion.checkpoints import CheckpointError, checkpoint_path, newest_good, saving, write_state
from hyperion.checkpoints.weights import read_weights
from hyperion.data.batches import LanguageBatches
from hyperion.data.images.device_images import ImageBatches
from hyperion.data.packing import IGNORE_INDEX
from hyperion.errors import HyperionError
from hyperion.experiments.baselines.plain_loops import PlainImageLoop
from hyperion.hardware import detect_cpu
from hyperion.models import TransformerConfig, resnet18
from hyperion.parallel import ParallelPlan
from hyperion.training import (
    ImageEngine,
    LanguageEngine,
    Precision,
    TrainingPlan,
    WarmupCosine,
    adamw,
    choose_precision,
    evaluate_images,
    evaluate_language,
    seed_everything,
    sgd_nesterov,
    train,
)
from hyperion.training.recipe import seed_rank
from tests.checkpoints.single import load, load_latest, save
from tests.training.small import small_batches, small_engine, small_validation

CPU, FP32 = detect_cpu(), Precision("fp32", "test")
TOKENS = torch.randint(19, (4, 8), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3
BYTES = np.random.default_rng(0).integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
HALF = ([0.5] * 3, [0.25] * 3)


class Bigram(nn.Module):
    """A language model whose loss for given targets is what `reduce` makes of it."""

    def __init__(self, reduce):
        super().__init__()
        self.embedding, self.reduce = nn.Embedding(19, 19), reduce

    def forward(self, inputs_BT, targets_BT):
        logits_BTV = self.embedding(inputs_BT)
        nll = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").view_as(targets_BT)
        return self.reduce(nll, logits_BTV)


def bigram_engine(reduce=lambda nll, logits: nll, **options):
    model = Bigram(reduce)
    return LanguageEngine(model, adamw(model, 1e-3), lambda step: 1e-3, FP32, CPU, **options)


def bigram_parts():
    model = Bigram(lambda nll, logits: nll)
    return model, adamw(model, 1e-3), lambda step: 1e-3


def image_engine(**options):
    torch.manual_seed(0)
    model = resnet18(num_classes=3, width=4)
    return ImageEngine(model, sgd_nesterov(model, 0.1), lambda step: 0.1, FP32, CPU, **options)


UNCHANGED = (0.0,) * 3, (1.0,) * 3  # normalisation that changes no pixel


def plain_loop(images, labels=None):
    labels = np.arange(12) % 10 if labels is None else labels
    return PlainImageLoop(resnet18(width=4), images, labels, UNCHANGED, (), 4, 0.1, FP32, CPU, compiled=False)


def image_batches(**changes):
    given = {"images": BYTES, "labels": np.arange(12) % 10, "batch_size": 4, "normalisation": HALF}
    return ImageBatches(**given | changes)


def saved(folder, step=1, keep=2):
    with saving(folder, step, keep) as new:
        write_state(new, {"x": torch.ones(2)})


BAD_SETTINGS = {
    "keep 0": (lambda f: saved(f, keep=0), "keep is 0"),
    "keep of text": (lambda f: saved(f, keep="2"), "keep is '2'"),
    "keep of bool": (lambda f: saved(f, keep=True), "keep is True"),
    "negative step": (lambda f: saved(f, step=-1), "step is -1"),
    "fractional step": (lambda f: saved(f, step=1.5), "step is 1.5"),
    "step of text": (lambda f: save(f, "3", {}), "step is '3'"),
    "state with a set": (lambda f: save(f, 3, {"x": {1, 2}}), "set .* cannot be stored"),
    "state with NaN": (lambda f: save(f, 3, {"x": math.nan}), "nan cannot be stored"),
    "state with a number as key": (lambda f: save(f, 3, {1: 2}), "key 1 cannot be stored"),
    "state of two tensors of one path": (lambda f: save(f, 3, {"a/b": LABELS, "a": {"b": LABELS}}), "two tensors have the path"),
    "no folder of a checkpoint": (lambda f: load(f / "absent"), "manifest cannot be read"),
    "no weights": (lambda f: read_weights(f / "absent"), "no such file"),
    "a file for a folder of checkpoints": (lambda f: load_latest(file_in(f)), "cannot be listed"),
    "TrainingPlan of nothing": (lambda f: TrainingPlan(), "give either epochs or steps"),
    "TrainingPlan of both": (lambda f: TrainingPlan(epochs=1, steps=1), "give either epochs or steps"),
    "TrainingPlan of 0 steps": (lambda f: TrainingPlan(steps=0), "steps is 0"),
    "TrainingPlan of half an epoch": (lambda f: TrainingPlan(epochs=0.5), "epochs is 0.5"),
    "TrainingPlan of text": (lambda f: TrainingPlan(steps="9"), "steps is '9'"),
    "TrainingPlan of NaN": (lambda f: TrainingPlan(steps=math.nan), "steps is nan"),
    "TrainingPlan that keeps nothing": (lambda f: TrainingPlan(steps=1, keep=0), "keep is 0"),
    "TrainingPlan with checkpoints every -1": (lambda f: TrainingPlan(steps=1, checkpoint_every=-1), "checkpoint_every is -1"),
    "checkpoints without a folder": (
        lambda f: train(small_engine(), small_batches(), TrainingPlan(steps=1, checkpoint_every=1)),
        "saves a checkpoint every 1 steps, but there is no folder",
    ),
    "a number for a folder": (lambda f: train(small_engine(), small_batches(), TrainingPlan(steps=1), folder=3), "folder is 3"),
    "warm-up longer than the run": (lambda f: WarmupCosine(1e-3, 10, 10), "warmup_steps is 10"),
    "negative warm-up": (lambda f: WarmupCosine(1e-3, -1, 10), "warmup_steps is -1"),
    "warm-up of text": (lambda f: WarmupCosine(1e-3, "1", 10), "warmup_steps is '1'"),
    "negative peak": (lambda f: WarmupCosine(-1e-3, 1, 10), "peak is -0.001"),
    "peak of NaN": (lambda f: WarmupCosine(math.nan, 1, 10), "peak is nan"),
    "infinite peak": (lambda f: WarmupCosine(math.inf, 1, 10), "peak is inf"),
    "final fraction above 1": (lambda f: WarmupCosine(1e-3, 1, 10, 1.5), "final_fraction is 1.5"),
    "step 0 of a schedule": (lambda f: WarmupCosine(1e-3, 1, 10)(0), "step is 0"),
    "negative learning rate": (lambda f: adamw(resnet18(width=4), -1.0), "learning_rate is -1"),
    "learning rate of NaN": (lambda f: sgd_nesterov(resnet18(width=4), math.nan), "learning_rate is nan"),
    "negative decay": (lambda f: adamw(resnet18(width=4), 1.0, weight_decay=-0.1), "weight_decay is -0.1"),
    "momentum 1": (lambda f: sgd_nesterov(resnet18(width=4), 0.1, momentum=1.0), "momentum is 1"),
    "momentum 0 of Nesterov": (lambda f: sgd_nesterov(resnet18(width=4), 0.1, momentum=0.0), "momentum is 0"),
    "beta 1": (lambda f: adamw(resnet18(width=4), 0.1, betas=(0.9, 1.0)), "beta is 1.0"),
    "negative epsilon": (lambda f: adamw(resnet18(width=4), 0.1, eps=-1e-8), "eps is -1e-08"),
    "nothing to train": (lambda f: adamw(resnet18(width=4).requires_grad_(False), 0.1), "no parameter"),
    "negative seed": (lambda f: seed_everything(-1), "seed is -1"),
    "seed of 2^32": (lambda f: seed_everything(2**32), "seed is 4294967296"),
    "seed of text": (lambda f: seed_everything("1"), "seed is '1'"),
    "fractional seed": (lambda f: seed_everything(1.0), "seed is 1.0"),
    "negative seed of a rank": (lambda f: seed_rank(-1, 0, 0), "seed is -1"),
    "negative rank": (lambda f: seed_rank(0, 0, -1), "rank is -1"),
    "strategy": (lambda f: ParallelPlan("fsdp2"), "strategy is 'fsdp2'"),
    "strategy of a list": (lambda f: ParallelPlan(["ddp"]), "strategy is"),
    "checkpointing": (lambda f: ParallelPlan(checkpointing=True), "checkpointing is True"),
    "budget without blocks": (lambda f: ParallelPlan(checkpointing="budget"), "checkpointed_blocks is None"),
    "budget of -1": (lambda f: ParallelPlan(checkpointing="budget", checkpointed_blocks=-1), "checkpointed_blocks is -1"),
    "budget of text": (lambda f: ParallelPlan(checkpointing="budget", checkpointed_blocks="2"), "checkpointed_blocks is '2'"),
    "compile_blocks of text": (lambda f: ParallelPlan(compile_blocks="no"), "compile_blocks is 'no'"),
    "reshard of text": (lambda f: ParallelPlan("fsdp", reshard_after_forward="no"), "reshard_after_forward is 'no'"),
    "bf16 shards of DDP": (lambda f: ParallelPlan("ddp", param_dtype="bf16"), "belong to strategy 'fsdp'"),
    "precision on no device": (lambda f: choose_precision("npu"), "'npu' is not a device"),
    "a text for a precision": (lambda f: LanguageEngine(*bigram_parts(), "fp32", CPU), "the precision is 'fp32'"),
    "a number for a plan": (lambda f: train(small_engine(), small_batches(), 60), "the plan is 60"),
    "schedule of NaN at step 2": (
        lambda f: train(scheduled(lambda step: 1e-3 if step < 2 else math.nan), small_batches(), TrainingPlan(steps=3)),
        "learning rate nan for step 2",
    ),
    "validation of None": (
        lambda f: train(small_engine(), small_batches(), TrainingPlan(steps=1), validation=lambda: None),
        "validation returned None, which is no iterable",
    ),
    "evaluation without a loss": (lambda f: evaluated({"accuracy": 0.5}), "evaluate returned {'accuracy': 0.5}"),
    "evaluation of None": (lambda f: evaluated(None), "evaluate returned None"),
    "text of few tokens": (
        lambda f: LanguageBatches(np.zeros(50, np.int64), 64, 8),
        r"tokens of shape \(50,\) have no window of 65",
    ),
    "rows of tokens": (lambda f: LanguageBatches(np.zeros((50, 9), np.int64), 4, 8), r"tokens of shape \(50, 9\)"),
    "a batch of none": (lambda f: LanguageBatches(np.zeros(500, np.int64), 4, 0), "the batch size is 0"),
    "precision": (lambda f: choose_precision(CPU, "fp64"), "no training precision is named 'fp64'"),
    "Precision by hand": (lambda f: Precision("float32", "by hand"), "dtype is 'float32'"),
    "width 0": (lambda f: TransformerConfig(8, 8, 0, 1, 1), "width is 0"),
    "width of text": (lambda f: TransformerConfig(8, 8, "8", 1, 1), "width is '8'"),
    "layers of 1.5": (lambda f: TransformerConfig(8, 8, 8, 1, 1.5), "layers is 1.5"),
    "dropout of NaN": (lambda f: TransformerConfig(8, 8, 8, 1, 1, math.nan), "dropout is nan"),
    "classes 0": (lambda f: resnet18(0), "0"),
    "schedule that is a number": (lambda f: bigram_scheduled(1e-3), "the schedule is 0.001"),
    "schedule of a negative rate": (lambda f: bigram_scheduled(lambda step: -1.0), "learning rate -1.0"),
    "schedule of a tensor": (lambda f: bigram_scheduled(lambda step: torch.ones(())), "learning rate tensor"),
    "clip_norm 0": (lambda f: bigram_engine(clip_norm=0.0), "clip_norm is 0"),
    "clip_norm None": (lambda f: bigram_engine(clip_norm=None), "clip_norm is None"),
    "clip_norm NaN": (lambda f: bigram_engine(clip_norm=math.nan), "clip_norm is nan"),
    "micro_batches 0": (lambda f: bigram_engine(micro_batches=0), "micro_batches is 0"),
    "micro_batches of half": (lambda f: bigram_engine(micro_batches=1.5), "micro_batches is 1.5"),
    "label_smoothing 1": (lambda f: image_engine(label_smoothing=1.0), "label_smoothing is 1.0"),
    "label_smoothing of text": (lambda f: image_engine(label_smoothing="0.1"), "label_smoothing is '0.1'"),
    "float images": (lambda f: image_batches(images=BYTES / 255), "images are float64 .*expected uint8"),
    "normalised images": (lambda f: image_batches(images=(BYTES / 127.5 - 1).astype(np.float32)), "images are float32"),
    "HWC images": (lambda f: image_batches(images=BYTES.transpose(0, 2, 3, 1)), r"\[12, 32, 32, 3\], expected"),
    "one-hot labels of images": (lambda f: image_batches(labels=np.eye(12)), "labels are float64"),
    "statistics of bytes": (lambda f: image_batches(normalisation=([127.0] * 3, [60.0] * 3)), "normalisation has means"),
    "one channel of statistics": (lambda f: image_batches(normalisation=([0.5], [0.5])), "normalisation has means"),
    "deviation 0": (lambda f: image_batches(normalisation=([0.5] * 3, [0.0] * 3)), "deviations"),
    "float images in the plain loop": (lambda f: plain_loop(BYTES / 255), "images are float64"),
    "HWC images in the plain loop": (lambda f: plain_loop(BYTES.transpose(0, 2, 3, 1)), "32, 32, 3"),
    "labels of the plain loop": (lambda f: plain_loop(BYTES, np.ones(12)), "labels are float64"),
}


def scheduled(schedule):
    engine = small_engine()
    engine.schedule = schedule
    return engine


def evaluated(outcome):
    engine = small_engine()
    engine.evaluate = lambda batches: outcome
    return train(engine, small_batches(), TrainingPlan(steps=1), validation=small_validation)


def file_in(folder):
    (folder / "file").write_text("a file")
    return folder / "file"


def bigram_scheduled(schedule):
    model = Bigram(lambda nll, logits: nll)
    return LanguageEngine(model, adamw(model, 1e-3), schedule, FP32, CPU)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_a_setting_that_makes_no_sense_is_refused_with_the_value_and_a_remedy(case, tmp_path):
    call, reason = BAD_SETTINGS[case]
    with pytest.raises(HyperionError, match=reason) as caught:
        call(tmp_path)
    assert caught.value.where is not None and caught.value.next_step
    assert {path.name for path in tmp_path.iterdir()} <= {"file"}


LANGUAGE_BATCHES = {
    "one tensor": (TOKENS, "the batch is a Tensor"),
    "three tensors": ((TOKENS, TOKENS, TOKENS), "the batch is a tuple"),
    "a dictionary": ({"input_ids": TOKENS}, "the batch is a dict"),
    "arrays": ((TOKENS.numpy(), TOKENS.numpy()), "the batch is a tuple"),
    "float ids": ((TOKENS.float(), TOKENS), "inputs float32"),
    "int16 ids": ((TOKENS.short(), TOKENS), "inputs int16"),
    "int32 targets": ((TOKENS, TOKENS.int()), "targets int32"),
    "targets one shorter": ((TOKENS, TOKENS[:, 1:]), r"inputs int64 \[4, 8\] and targets int64 \[4, 7\]"),
    "one sequence": ((TOKENS[0], TOKENS[0]), r"int64 \[8\]"),
    "an id above the vocabulary": ((TOKENS + 1, TOKENS), "ids of the inputs are from .* to 19, outside 0 .. 18"),
    "a target above the vocabulary": ((TOKENS, TOKENS + 1), "ids of the targets are from"),
    "a negative id": ((TOKENS - 1, TOKENS), "ids of the inputs are from -1"),
    "another mark for what is not scored": ((TOKENS, TOKENS.masked_fill(TOKENS == 3, -1)), "targets are from -1"),
    "an empty batch": ((TOKENS[:0], TOKENS[:0]), "a tensor of the batch is empty: int64 \\[0, 8\\]"),
    "a batch on another device": ((TOKENS.to("meta"), TOKENS.to("meta")), "the batch is on meta"),
}


@pytest.mark.parametrize("case", LANGUAGE_BATCHES)
def test_a_batch_of_text_in_another_form_is_refused_before_the_first_step(case):
    batch, reason = LANGUAGE_BATCHES[case]
    engine = small_engine()
    before = [parameter.clone() for parameter in engine.model.parameters()]
    with pytest.raises(HyperionError, match=reason) as caught:
        engine.train_step(batch)
    assert caught.value.next_step and engine.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_targets_that_are_not_scored_are_in_form():
    engine = small_engine()
    engine.train_step((TOKENS, TOKENS.masked_fill(TOKENS < 9, IGNORE_INDEX)))
    assert engine.steps == 1


LOSSES = {
    "mean": lambda nll, logits: nll.mean(),
    "sum": lambda nll, logits: nll.sum(),
    "flat": lambda nll, logits: nll.flatten(),
    "one a sequence": lambda nll, logits: nll.mean(dim=1),
    "logits": lambda nll, logits: logits,
    "a tuple": lambda nll, logits: (nll.mean(), logits),
    "whole numbers": lambda nll, logits: nll.long(),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_not_one_number_a_token_is_refused_in_training_and_evaluation(case):
    engine = bigram_engine(LOSSES[case])
    with pytest.raises(HyperionError, match=r"the model returned .* for targets \[4, 8\]") as caught:
        engine.train_step((TOKENS, TOKENS))
    assert "reduction='none'" in caught.value.next_step
    with pytest.raises(HyperionError, match="the model returned"):
        evaluate_language(engine.model, [(TOKENS, TOKENS)], FP32, CPU)


IMAGE_BATCHES = {
    "HWC": ((IMAGES.permute(0, 2, 3, 1), LABELS), r"\[6, 16, 16, 3\], but the model takes \[B, 3, Y, X\]"),
    "one image": ((IMAGES[0], LABELS[:3]), r"float32 \[3, 16, 16\]"),
    "bytes": (((IMAGES * 10).byte(), LABELS), "images are uint8 .*not a floating-point"),
    "bytes as floats": ((torch.arange(6 * 3 * 256.0).view(6, 3, 16, 16) % 256, LABELS), "from 0 to 255"),
    "one-hot labels": ((IMAGES, F.one_hot(LABELS, 3).float()), r"labels float32 \[6, 3\]"),
    "float labels": ((IMAGES, LABELS.float()), "labels float32"),
    "int32 labels": ((IMAGES, LABELS.int()), "labels int32"),
    "one label less": ((IMAGES, LABELS[1:]), r"labels int64 \[5\] for images"),
    "a column of labels": ((IMAGES, LABELS[:, None]), r"labels int64 \[6, 1\]"),
    "a class too many": ((IMAGES, LABELS + 1), r"returned float32 \[6, 3\], but labels go up to 3"),
    "the label -100": ((IMAGES, LABELS.masked_fill(LABELS == 0, -100)), "a label is -100"),
    "labels first": ((LABELS, IMAGES), r"images int64 \[6\]"),
}


@pytest.mark.parametrize("case", IMAGE_BATCHES)
def test_a_batch_of_images_in_another_form_is_refused_before_the_first_update(case):
    batch, reason = IMAGE_BATCHES[case]
    engine = image_engine()
    before = [parameter.clone() for parameter in engine.model.parameters()]
    with pytest.raises(HyperionError, match=reason) as caught:
        engine.train_step(batch)
    assert caught.value.next_step and engine.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


@pytest.mark.parametrize("labels", [LABELS.float(), F.one_hot(LABELS, 3), LABELS[1:]])
def test_labels_in_another_form_are_refused_in_evaluation(labels):
    with pytest.raises(HyperionError, match="labels are .* for logits"):
        evaluate_images(image_engine().model, [(IMAGES, labels)], FP32, CPU)


class Untouched:
    """A loader that must not be asked for a batch: the error must come earlier."""

    def __init__(self, **methods):
        self.batches = small_batches()
        for name, value in methods.items():
            setattr(self, name, value)

    def __len__(self):
        return 7

    def __iter__(self):
        raise AssertionError("a batch was asked for")


class Resumable(Untouched):
    def state_dict(self):
        return self.batches.state_dict()

    def load_state_dict(self, state):
        self.batches.load_state_dict(state)


class Empty(Resumable):
    def __len__(self):
        return 0


NEEDED_AT_THE_END = {
    "a DataLoader": (lambda: torch.utils.data.DataLoader([1, 2]), {}, "DataLoader, has no state_dict"),
    "a loader that cannot resume": (lambda: Untouched(state_dict=dict), {}, "has no load_state_dict"),
    "a list of batches": (lambda: [(TOKENS, TOKENS)], {}, "list, has no state_dict"),
    "a generator": (lambda: iter([(TOKENS, TOKENS)]), {}, "has no __len__"),
    "a loader whose state is no JSON": (
        lambda: Resumable(state_dict=lambda: {"sampler": object()}),
        {},
        "object .* cannot be stored",
    ),
    "a loader without a batch": (Empty, {}, "the loader has no batch"),
    "a loader for validation": (Resumable, {"validation": small_batches()}, "validation is a LanguageBatches"),
    "a number as callback": (Resumable, {"on_epoch": [3]}, "on_epoch is a int"),
    "a report that is no function": (Resumable, {"report": "print"}, "report is a str"),
}


@pytest.mark.parametrize("case", NEEDED_AT_THE_END)
def test_what_is_needed_at_the_end_is_asked_for_before_the_first_step(case, tmp_path):
    make, options, reason = NEEDED_AT_THE_END[case]
    engine = small_engine()
    with pytest.raises(HyperionError, match=reason) as caught:
        train(engine, make(), TrainingPlan(steps=3), folder=tmp_path, **options)
    assert engine.steps == 0 and caught.value.next_step


def test_the_remedy_for_a_loader_that_cannot_resume_can_be_imported(tmp_path):
    with pytest.raises(HyperionError) as caught:
        train(small_engine(), torch.utils.data.DataLoader([1, 2]), TrainingPlan(steps=3), folder=tmp_path)
    assert "torchdata.stateful_dataloader.StatefulDataLoader" in caught.value.next_step
    assert "pip install torchdata" in caught.value.next_step
    for loader in (LanguageBatches, ImageBatches):
        assert f"{loader.__module__}.{loader.__name__}" in caught.value.next_step


@pytest.mark.parametrize("lacking", ["evaluate", "save", "load"])
def test_an_engine_that_cannot_end_does_not_begin(lacking, tmp_path):
    engine = small_engine()
    setattr(engine, lacking, None)
    with pytest.raises(HyperionError, match=f"LanguageEngine, has no {lacking}"):
        train(engine, Resumable(), TrainingPlan(steps=3), folder=tmp_path)


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path):
    with pytest.raises(CheckpointError, match="cannot write checkpoints"):
        train(small_engine(), Resumable(), TrainingPlan(steps=3), folder=file_in(tmp_path))
    (tmp_path / "read only").mkdir(mode=0o500)
    if os.geteuid():  # root may write anywhere
        with pytest.raises(CheckpointError, match="cannot write checkpoints"):
            train(small_engine(), Resumable(), TrainingPlan(steps=3), folder=tmp_path / "read only")


def test_a_loader_that_cannot_resume_trains_where_nothing_is_saved():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TOKENS, TOKENS), batch_size=2)
    assert len(train(small_engine(), loader, TrainingPlan(epochs=2), validation=small_validation).losses) == 4


def test_an_error_of_the_callers_own_code_is_not_taken_for_a_bad_checkpoint(tmp_path):
    saved(tmp_path)

    def read(path):
        return len(3)

    with pytest.raises(TypeError, match="has no len"):
        newest_good(tmp_path, read)
    assert checkpoint_path(tmp_path, 1).is_dir()
