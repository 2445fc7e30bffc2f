"""The parity ladder: the same tokens trained plainly, then with one thing more at a time, and what each changes in the loss.

Each rung stands on the one before: float32 on one device, the same again, batches in parts, bfloat16, activation
checkpointing, compiled blocks, and at last a run that was interrupted and resumed. What may change the numbers has a
tolerance that follows from its rounding; what may not has none.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch._dynamo

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.variants import Report
from hyperion.data.batches.loaders import LanguageBatches
from hyperion.measure.steps.compilation import missing_compiler
from hyperion.models import TransformerConfig, TransformerLM, layout_of
from hyperion.parallel import ParallelPlan, parallelize
from hyperion.processes import world
from hyperion.results import Row
from hyperion.training import LanguageEngine, Plan, Precision, WarmupCosine, adamw, seed_everything, train
from hyperion.workloads import datasets
from hyperion.workloads.twins import SCATTER_BF16

FIRST = "fp32"
# On a GPU some sums are formed in the order in which threads arrive: as far apart as two runs of one rung may be.
_UNORDERED = 2e-3
_MOST_GRAPHS = 32  # of one function: every block is one more kind of itself


@dataclass(frozen=True)
class Rung:
    """One way to make the same training.

    Attributes:
        micro_batches: parts that each batch is taken in.
        tolerance: largest relative difference of a loss from the rung before; 0 for none at all.
        unit: of rounding, that the forecast counts with; 0 where nothing is rounded otherwise.
        why: what the tolerance follows from.
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


def rungs(sizes: dict) -> list[Rung]:
    """The ladder, from the bottom."""
    plain = Rung(FIRST)
    again = replace(plain, name="again", why="the same operations in the same order")
    parts = replace(
        plain,
        name="accumulated",
        micro_batches=sizes["micro_batches"],
        tolerance=1e-4,
        unit=2.0**-24,
        why="the same sums in another order, rounded to float32",
    )
    half = replace(parts, name="bf16", dtype="bf16", tolerance=3e-2, unit=2.0**-8, why="products of operands rounded to 8 bits")
    kept = replace(
        half,
        name="checkpointed",
        checkpointing="every block",
        tolerance=0.0,
        unit=0.0,
        why="activations computed again by the same operations",
    )
    compiled = replace(
        kept,
        name="compiled",
        compiled=True,
        tolerance=1e-2,
        unit=2.0**-8,
        why="fused operations leave out the roundings between them",
    )
    resumed = replace(
        compiled, name="resumed", resumed=True, tolerance=0.0, unit=0.0, why="all that the next step depends on was saved"
    )
    return [plain, again, parts, half, kept, compiled, resumed]


def forecast(context: Context) -> list[Forecast]:
    """How far each rung is from the one before: nothing, or what is left of its unit of rounding when the roundings of a
    batch's tokens, each its own, average out; but the loss itself is rounded to float32.
    """
    tokens = context.sizes["batch_size"] * context.sizes["sequence_length"]

    def moved(rung: Rung) -> float:
        return max(2.0**-24, rung.unit / tokens**0.5) if rung.unit else 0.0

    return [
        Forecast(
            variant=rung.name,
            metric="relative_difference",
            estimate=moved(rung),
            dtype=rung.dtype,
            basis=f"{rung.why}: {f'{rung.unit:.2g} over the root of {tokens} tokens' if rung.unit else 'no difference'}",
            params=_params(context, rung),
        )
        for rung in rungs(context.sizes)[1:]
    ]


def run(context: Context, report: Report) -> Result:
    """Climb the ladder in one process; each rung begins with the same weights and gets the same batches."""
    shutil.rmtree(context.workspace, ignore_errors=True)
    ladder, sizes = rungs(context.sizes), context.sizes
    tokens, source = _tokens(context)
    curves, rows = {}, []
    for number, rung in enumerate(ladder):
        reason = _why_not(context, rung)
        if not reason:
            curves[rung.name] = _losses(context, rung, tokens, number, report)
        if number:
            rows += _rows(context, rung, curves, reason, source)
    steps = range(1, sizes["steps"] + 1)
    frames = [pd.DataFrame({"rung": name, "step": steps, "loss": losses}) for name, losses in curves.items()]
    return Result(rows, pd.concat(frames, ignore_index=True), source)


EXPERIMENT = Experiment(forecast, run, isolated=True, data=datasets.TEXT)


def _tokens(context: Context) -> tuple[np.ndarray, str]:
    """The first tokens of the corpus, numbered anew so that a small model has a vocabulary of those that occur."""
    corpus, _, prepared = datasets.text(context)
    first = np.asarray(prepared.tokens["train"][: context.sizes["tokens"]])
    return np.unique(first, return_inverse=True)[1], corpus.source


def _why_not(context: Context, rung: Rung) -> str:
    """Why a rung cannot be climbed here, "" where it can."""
    possible, how = context.device.supports(rung.dtype)
    if not possible:
        return f"unsupported: {how}"
    return missing_compiler(context.device) if rung.compiled and context.sizes["compiler"] == "inductor" else ""


def _losses(context: Context, rung: Rung, tokens: np.ndarray, number: int, report: Report) -> list[float]:
    steps = context.sizes["steps"]

    def trained(until: int, seed: int, folder: Path | None) -> list[float]:
        seed_everything(seed, deterministic=context.device.kind != "cpu")
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=True)
        torch._dynamo.reset()  # what was compiled refers to the model of the rung before
        engine, batches, told = (_engine(context, rung, tokens), _batches(context, tokens), _told(report, rung, number, context))
        # Where a block is compiled too often the compiler would quietly run it as it is.
        with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS, fail_on_recompile_limit_hit=True):
            return train(engine, batches, Plan(steps=until), folder=folder, report=told).losses

    if not rung.resumed:
        return trained(steps, context.seed, None)
    folder = context.workspace / "interrupted"
    trained(steps // 2, context.seed, folder)
    return trained(steps, context.seed + 1, folder)  # with other weights, which the checkpoint replaces


def _told(report: Report, rung: Rung, number: int, context: Context) -> Callable[[int, int, str], object]:
    whole = len(rungs(context.sizes)) * context.sizes["steps"]
    return lambda done, total, note: report(number * context.sizes["steps"] + done, whole, f"{rung.name}: {note}")


def _engine(context: Context, rung: Rung, tokens: np.ndarray) -> LanguageEngine:
    sizes, device = context.sizes, context.device
    config = TransformerConfig(int(tokens.max()) + 1, sizes["sequence_length"], sizes["width"], sizes["heads"], sizes["layers"])
    model = parallelize(TransformerLM(config), ParallelPlan(checkpointing=rung.checkpointing), world())
    if rung.compiled:
        for name in layout_of(model).blocks:
            block = model.get_submodule(name)
            block.forward = torch.compile(block.forward, backend=sizes["compiler"])
    schedule = WarmupCosine(sizes["learning_rate"], max(1, sizes["steps"] // 10), sizes["steps"])
    precision = Precision(rung.dtype, "a rung of the ladder")
    optimizer = adamw(model, sizes["learning_rate"])
    return LanguageEngine(model, optimizer, schedule, precision, device, micro_batches=rung.micro_batches)


def _batches(context: Context, tokens: np.ndarray) -> LanguageBatches:
    sizes = context.sizes
    return LanguageBatches(tokens, sizes["sequence_length"], sizes["batch_size"], context.seed, context.device.torch_device)


def _rows(context: Context, rung: Rung, curves: dict[str, list[float]], reason: str, source: str) -> list[Row]:
    """How far its losses are from those of the rung before, and from the first."""
    if reason:
        return [
            context.row(
                rung.name, "relative_difference", None, dtype=rung.dtype, params=_params(context, rung), value_reason=reason
            )
        ]
    before = list(curves)[-2]  # the last one that could be climbed
    exact = rung.tolerance == 0
    tolerance = _UNORDERED if exact and context.device.kind != "cpu" else rung.tolerance
    # From the first rung on all tolerances may have added up.
    allowed = {before: tolerance, FIRST: sum(r.tolerance for r in rungs(context.sizes)) if before != FIRST else tolerance}
    rows = []
    for beside in dict.fromkeys((before, FIRST)):
        difference = float(np.max(np.abs(np.array(curves[rung.name]) / np.array(curves[beside]) - 1)))
        rows.append(
            context.row(
                rung.name,
                "relative_difference",
                difference,
                dtype=rung.dtype,
                params=_params(context, rung) if beside == before else _params(context, rung) | {"beside": beside},
                n=context.sizes["steps"],
                check=f"losses of the rung {beside!r}, step by step; {SCATTER_BF16}",
                check_error=difference,
                check_tolerance=allowed[beside],
                data_source=source,
            )
        )
    return rows


def _params(context: Context, rung: Rung) -> dict:
    sizes = context.sizes
    params = {"what": "training loss", "beside": "the rung before", "steps": sizes["steps"], "micro_batches": rung.micro_batches}
    return params | ({"compiler": sizes["compiler"]} if rung.compiled else {})
