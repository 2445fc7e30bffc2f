"""The parity ladder: run the same training several times, add one change each time, and compare the losses.

A training run of the ladder is called a rung. Each rung adds one change to the previous one. The rungs are: float32 on one
device, the same run again, accumulation over micro-batches, bfloat16, activation checkpointing, compiled blocks, and a run that
is interrupted and resumed. If a change affects rounding, its losses have a tolerance. For all other changes the losses must be
equal.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.data.batches import LanguageBatches
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.models import TransformerConfig, TransformerLM, layout_of
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.results import Row
from hyperion.training import LanguageEngine, Precision, TrainingPlan, WarmupCosine, adamw, seed_everything, train
from hyperion.workloads import datasets
from hyperion.workloads.twins import SCATTER_BF16, with_unequal_rows

FIRST = "fp32"
# Relative tolerance for the losses of identical training runs on a GPU, where the order of some sums depends on which thread
# finishes first.
_UNORDERED = 2e-3
_MOST_GRAPHS = 32  # recompile limit: each block is compiled separately, but all blocks share one forward function


class ParityLadderOptions(Options):
    """Options for the `parity_ladder` experiment.

    Args:
        tokens: number of tokens to use, from the beginning of the text.
        sequence_length: number of tokens in a sequence.
        batch_size: number of sequences in a batch.
        micro_batches: number of parts into which a batch is split, in the rungs that accumulate gradients.
        width: width of the Transformer.
        heads: number of attention heads.
        layers: number of blocks.
        steps: number of optimizer steps.
        learning_rate: peak learning rate, reached at the end of the warm-up, which lasts a tenth of the steps.
        compiler: backend of torch.compile. "aot_eager" captures the same graphs as "inductor" but generates no kernels.
    """

    tokens: int
    sequence_length: int
    batch_size: int
    micro_batches: int
    width: int
    heads: int
    layers: int
    steps: int
    learning_rate: float
    compiler: Literal["eager", "aot_eager", "inductor"]


@dataclass(frozen=True)
class ParityRung:
    """One rung of the parity ladder: a version of the training run that adds one change to the previous rung.

    Attributes:
        name: name of the rung.
        dtype: number format of the training run.
        micro_batches: number of parts into which each batch is split.
        checkpointing: activation-checkpointing policy, as in `ParallelPlan`.
        compiled: whether each block is compiled.
        resumed: whether the run is interrupted and resumed from a checkpoint.
        tolerance: largest allowed relative difference between the losses of this rung and the previous one at the same step. 0 if
            the losses must be equal.
        unit: unit roundoff of the number format, used to predict the difference of the losses. 0 if the change does not affect
            rounding.
        why: reason for the tolerance.
    """

    name: str
    dtype: str = "fp32"
    micro_batches: int = 1
    checkpointing: str = "none"
    compiled: bool = False
    resumed: bool = False
    tolerance: float = 0.0
    unit: float = 0.0
    why: str = ""


def rungs(micro_batches: int) -> list[ParityRung]:
    """Return all rungs (versions of the training run) in order. The first is the plain float32 run."""
    plain = ParityRung(FIRST)
    again = replace(plain, name="again", why="the same operations in the same order")
    parts = replace(
        plain,
        name="accumulated",
        micro_batches=micro_batches,
        tolerance=1e-4,
        unit=2.0**-24,
        why="the same terms are added in another order and rounded to float32",
    )
    half = replace(
        parts,
        name="bf16",
        dtype="bf16",
        tolerance=3e-2,
        unit=2.0**-8,
        why="the operands of matrix products are rounded to 8 significant bits",
    )
    checkpointed = replace(
        half,
        name="checkpointed",
        checkpointing="every block",
        tolerance=0.0,
        unit=0.0,
        why="activations are recomputed by the same operations",
    )
    compiled = replace(
        checkpointed,
        name="compiled",
        compiled=True,
        tolerance=1e-2,
        unit=2.0**-8,
        why="fused operations do not round the results between them",
    )
    resumed = replace(
        compiled,
        name="resumed",
        resumed=True,
        tolerance=0.0,
        unit=0.0,
        why="the checkpoint contains everything that the next step depends on",
    )
    return [plain, again, parts, half, checkpointed, compiled, resumed]


def forecast(context: Context) -> list[Forecast]:
    """Predict the relative difference between the losses of successive rungs (versions of the training run).

    If a change does not affect rounding, the predicted difference is 0. Otherwise it is the unit roundoff of the format, divided
    by the square root of the number of tokens in a batch: the rounding errors of the tokens are independent and average out. The
    prediction is at least 2^-24, because the loss itself is rounded to float32.
    """
    options = ParityLadderOptions.of(context)
    tokens = options.batch_size * options.sequence_length

    def difference(rung: ParityRung) -> float:
        return max(2.0**-24, rung.unit / tokens**0.5) if rung.unit else 0.0

    return [
        Forecast(
            rung.name,
            "relative_difference",
            difference(rung),
            f"{rung.why}: {f'{rung.unit:.2g} divided by the square root of {tokens} tokens' if rung.unit else 'no difference'}",
            dtype=rung.dtype,
            params=_params(options, rung),
        )
        for rung in rungs(options.micro_batches)[1:]
    ]


def run(context: Context, report: Report) -> Result:
    """Train every rung (version of the training run) in one process.

    All rungs start from the same weights and see the same batches.
    """
    # A checkpoint of an earlier attempt would make the interrupted run resume at the wrong step.
    shutil.rmtree(context.workspace, ignore_errors=True)
    options = ParityLadderOptions.of(context)
    ladder = rungs(options.micro_batches)
    tokens, source = _tokens(context, options)
    curves, rows = {}, []
    for number, rung in enumerate(ladder):
        reason = _why_absent(context, options, rung)
        if not reason:

            def report_rung(done: int, total: int, note: str, number: int = number, name: str = rung.name) -> None:
                report(number * options.steps + done, len(ladder) * options.steps, f"{name}: {note}")

            curves[rung.name] = _losses(context, options, rung, tokens, report_rung)
        if number:
            rows += _rows(context, options, rung, curves, reason, source)
    steps = range(1, options.steps + 1)
    frames = [pd.DataFrame({"rung": name, "step": steps, "loss": losses}) for name, losses in curves.items()]
    return Result(rows, pd.concat(frames, ignore_index=True), source)


EXPERIMENT = Experiment(forecast, run, options=ParityLadderOptions, isolated=True, data=datasets.TEXT)


def _tokens(context: Context, options: ParityLadderOptions) -> tuple[np.ndarray, str]:
    """Return (token ids of the beginning of the corpus, data source). The ids are renumbered to keep the vocabulary small."""
    corpus, _, prepared = datasets.text(context)
    first = np.asarray(prepared.tokens["train"][: options.tokens])
    # The inverse indices are the ids renumbered from 0 without gaps.
    return np.unique(first, return_inverse=True)[1], corpus.source


def _why_absent(context: Context, options: ParityLadderOptions, rung: ParityRung) -> str:
    """Return the reason why this rung cannot run on this device, or an empty string if it can."""
    possible, how = context.device.supports(rung.dtype)
    if not possible:
        return f"unsupported: {how}"
    return missing_compiler(context.device) if rung.compiled and options.compiler == "inductor" else ""


def _losses(context: Context, options: ParityLadderOptions, rung: ParityRung, tokens: np.ndarray, report: Report) -> list[float]:
    # Imported here, because it takes a second, and every `make reproduce` imports this module to check the sizes of a profile.
    import torch._dynamo

    def train_until(until: int, seed: int, folder: Path | None) -> list[float]:
        seed_everything(seed, deterministic=context.device.kind != "cpu")
        # Operators without a deterministic implementation warn and run anyway.
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=True)
        torch._dynamo.reset()  # otherwise compiled code would keep the previous rung's model in memory
        engine, where = _engine(context, options, rung, tokens), context.device.torch_device
        batches = LanguageBatches(tokens, options.sequence_length, options.batch_size, context.seed, where)
        # If a block is recompiled too often, the compiler silently falls back to eager mode. With this setting it raises.
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, fail_on_recompile_limit_hit=True):
            return train(engine, _UnequalRows(batches), TrainingPlan(steps=until), folder=folder, report=report).losses

    if not rung.resumed:
        return train_until(options.steps, context.seed, None)
    folder = context.workspace / "interrupted"
    train_until(options.steps // 2, context.seed, folder)
    return train_until(options.steps, context.seed + 1, folder)  # another seed: the checkpoint must replace these weights


class _UnequalRows:
    """A resumable loader whose rows have different numbers of targets, so that micro-batches have different weights."""

    def __init__(self, batches: LanguageBatches):
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (with_unequal_rows(batch, 0, len(batch[1])) for batch in self._batches)

    def state_dict(self) -> dict:
        return self._batches.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self._batches.load_state_dict(state)


def _engine(context: Context, options: ParityLadderOptions, rung: ParityRung, tokens: np.ndarray) -> LanguageEngine:
    vocabulary = int(tokens.max()) + 1
    config = TransformerConfig(vocabulary, options.sequence_length, options.width, options.heads, options.layers)
    model = parallelize(TransformerLM(config), ParallelPlan(checkpointing=rung.checkpointing), world())
    if rung.compiled:
        for name in layout_of(model).blocks:
            block = model.get_submodule(name)
            block.forward = torch.compile(block.forward, backend=options.compiler)
    schedule = WarmupCosine(options.learning_rate, max(1, options.steps // 10), options.steps)
    precision, optimizer = Precision(rung.dtype, "a rung of the ladder"), adamw(model, options.learning_rate)
    return LanguageEngine(model, optimizer, schedule, precision, context.device, micro_batches=rung.micro_batches)


def _rows(
    context: Context, options: ParityLadderOptions, rung: ParityRung, curves: dict[str, list[float]], reason: str, source: str
) -> list[Row]:
    """Return the rows that compare the losses of a rung with those of the previous rung and of the first rung."""
    params = _params(options, rung)
    if reason:
        return [context.absent_row(rung.name, "relative_difference", reason, dtype=rung.dtype, params=params)]
    before = list(curves)[-2]  # the last earlier rung that can run on this device
    exact = rung.tolerance == 0
    tolerance = _UNORDERED if exact and context.device.kind != "cpu" else rung.tolerance
    # The difference from the first rung may be as large as the sum of all rungs' tolerances.
    total = sum(other.tolerance for other in rungs(options.micro_batches))
    allowed = {before: tolerance, FIRST: total if before != FIRST else tolerance}
    rows = []
    for other in dict.fromkeys((before, FIRST)):
        difference = float(np.max(np.abs(np.array(curves[rung.name]) / np.array(curves[other]) - 1)))
        rows.append(
            context.error_row(
                rung.name,
                "relative_difference",
                difference,
                f"losses of the rung {other!r}, step by step; {SCATTER_BF16}",
                allowed[other],
                dtype=rung.dtype,
                params=params if other == before else params | {"beside": other},
                n=options.steps,
                data_source=source,
            )
        )
    return rows


def _params(options: ParityLadderOptions, rung: ParityRung) -> dict:
    params = {"what": "training loss", "beside": "the rung before", "steps": options.steps, "micro_batches": rung.micro_batches}
    return params | ({"compiler": options.compiler} if rung.compiled else {})
