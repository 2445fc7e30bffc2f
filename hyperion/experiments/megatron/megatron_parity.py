"""Does megatron-core train with the same losses and gradient norms as a plain loop, in each of its layouts?

All layouts start from the weights of the same Llama and get the same tokens. A plain loop on one device is the reference.
"""

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.experiments.megatron.bytes_of_text import DATA, VOCABULARY, batches, documents
from hyperion.models.llama import LlamaLM, build_random_llama, random_llama_shape
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters
from hyperion.parallel.megatron.release import adapted_copy, use_adapted, why_unavailable
from hyperion.processes import world

LOSS, NORM, STATE = "training loss", "gradient norm before clipping", "bytes of the optimizer"
TOLERANCE = 1e-4
_WEIGHT_DECAY, _CLIP = 0.1, 1.0


class LayoutTable(Table):
    """A layout of ranks. The fields are those of `MegatronLayout`."""

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    distributed_optimizer: bool = False
    micro_batches: int = 1

    def layout(self) -> MegatronLayout:
        """Return the layout."""
        return MegatronLayout(**self.model_dump())


class ToyOptions(Options):
    """Options for a short training run of a Llama with random initial weights, shared by several experiments of this chapter.

    Args:
        model: name of the model configuration.
        sequence_length: number of input tokens in a sequence.
        batch_size: number of sequences per step, on all ranks together.
        steps: number of optimizer steps.
        learning_rate: learning rate of all steps.
    """

    model: str
    sequence_length: int
    batch_size: int
    steps: int
    learning_rate: float


class MegatronParityOptions(RankOptions, ToyOptions):
    """Options of `megatron_parity`.

    Args:
        layouts: the layouts that are compared with one device.
    """

    layouts: tuple[LayoutTable, ...]

    def names(self, ranks: int) -> list[str]:
        """Return the name of each layout on this number of ranks."""
        return [table.layout().name(ranks) for table in self.layouts]


def why_not(ranks: int, needed: int) -> str:
    """Return why a layout cannot run, or "": megatron-core is missing, or there are too few devices.

    Args:
        ranks: number of ranks that this machine can start.
        needed: smallest number of ranks of the layout.
    """
    return why_unavailable() or (f"unavailable: needs {needed} devices, this machine has {ranks}" if ranks < needed else "")


def forecast(context: Context) -> list[Forecast]:
    """Predict the difference of the losses (one float32 rounding error per step), and a rank's share of the optimizer state."""
    options = MegatronParityOptions.of(context)
    ranks = options.rank_count(context, options.batch_size)
    steps = options.steps
    basis = f"each of {steps} steps adds one rounding error of float32, because sums have another order: {steps} x 2^-24"
    params = _params(context, options, LOSS)
    names = options.names(ranks)
    losses = [Forecast(name, "relative_difference", steps * 2.0**-24, basis, dtype="fp32", params=params) for name in names]
    shares = [
        Forecast(
            name,
            "share",
            _promised_share(table.layout(), ranks),
            "replicas divide the moments of Adam only with the distributed optimizer",
            dtype="fp32",
            params=_params(context, options, STATE),
            each_rank=True,
        )
        for name, table in zip(names, options.layouts, strict=True)
    ]
    return losses + shares


def run(context: Context, report: Report) -> Result:
    """Start the ranks once, and train with all layouts, one after another."""
    options = MegatronParityOptions.of(context)
    ranks = options.rank_count(context, options.batch_size)
    rows = []
    for name, table in zip(options.names(ranks), options.layouts, strict=True):
        if reason := why_not(ranks, table.tensor * table.pipeline):
            params = _params(context, options, LOSS)
            rows.append(context.absent_row(name, "relative_difference", reason, dtype="fp32", params=params))
    if len(rows) == len(options.layouts):
        return Result(rows, pd.DataFrame())
    adapted_copy()  # before the ranks start, because each of them would create it
    results = run_on_ranks(context, report, train_on_rank, ranks=ranks)
    return Result(rows + merged(results).rows, results[0].samples, results[0].source)


EXPERIMENT = Experiment(forecast, run, data=DATA, options=MegatronParityOptions)


def train_on_rank(context: Context, report: Report) -> Result:
    """On one rank, train with the plain loop and then with each layout. Return the rows, and the losses as samples."""
    options = MegatronParityOptions.of(context)
    use_adapted()
    lines, source = documents(context)
    stream = np.concatenate(lines)
    tokens = batches(stream, options.steps, options.batch_size, options.sequence_length, context.seed)
    tokens = tokens.to(context.device.torch_device)
    expected, expected_norms = plain_losses(context, options, tokens)
    rows, curves = [], [_curve("plain loop", expected, expected_norms)]
    ranks = world().size
    layouts = [table.layout() for table in options.layouts if table.tensor * table.pipeline <= ranks]
    for done, layout in enumerate(layouts):
        name = layout.name(ranks)
        report(done, len(layouts), name)
        losses, norms, state = train_with(context, options, layout, tokens)
        curves.append(_curve(name, losses, norms))
        columns = {"dtype": "fp32", "data_source": source}
        stage = world().rank // (ranks // layout.pipeline)  # megatron-core numbers the ranks stage by stage
        share = state / (8 * rank_parameters(random_llama_shape(options.model, VOCABULARY), layout, stage))
        promised = _promised_share(layout, ranks)
        check = checked("share that the layout promises", abs(share / promised - 1), 0.02)
        params = _params(context, options, STATE)
        rows.append(context.row(name, "share", share, params=params, rank=world().rank, **columns, **check))
        if world().rank == 0:
            for what, values, reference in ((LOSS, losses, expected), (NORM, norms, expected_norms)):
                error = float(np.max(np.abs(np.array(values) / np.array(reference) - 1)))
                params = _params(context, options, what)
                text = f"{what} of the plain loop on one device, step by step"
                rows.append(context.error_row(name, "relative_difference", error, text, TOLERANCE, params=params, **columns))
    return Result(rows, pd.concat(curves, ignore_index=True), source)


def initial_llama(context: Context, model: str) -> nn.Module:
    """Return transformers' Llama with random weights on the CPU. They are the same on every rank."""
    torch.manual_seed(context.seed)
    return build_random_llama(model, VOCABULARY)


def plain_losses(context: Context, options: ToyOptions, tokens_SBT: Tensor) -> tuple[list[float], list[float]]:
    """Train with a plain loop on this device. Return the loss and the gradient norm of each step.

    Args:
        context: context of the experiment.
        options: sizes of the training.
        tokens_SBT: a batch of tokens for each step.
    """
    model = LlamaLM(initial_llama(context, options.model)).to(tokens_SBT.device)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))
    losses, norms = [], []
    for tokens_BT in tokens_SBT:
        optimizer.zero_grad()
        loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:].contiguous()).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def train_with(
    context: Context, options: ToyOptions, layout: MegatronLayout, tokens_SBT: Tensor
) -> tuple[list[float], list[float], int]:
    """Train with megatron-core on all ranks. Return losses, gradient norms, and the bytes of Adam's moments on this rank."""
    from hyperion.parallel.megatron import gpt

    with gpt.model_parallel(layout):
        shape = random_llama_shape(options.model, VOCABULARY)
        model = gpt.build_gpt(shape, layout, options.sequence_length)
        gpt.load_llama_weights(model, initial_llama(context, options.model).state_dict(), shape, layout)
        trainer = gpt.MegatronTrainer(
            model.to(tokens_SBT.device), layout, gpt.Adam(options.learning_rate, _WEIGHT_DECAY, clip_norm=_CLIP)
        )
        losses, norms = [], []
        for tokens_BT in tokens_SBT:
            loss, norm = trainer.step(tokens_BT)
            losses.append(mean_over_ranks(loss, tokens_BT.device))
            norms.append(norm)
        return losses, norms, trainer.state_bytes()


def mean_over_ranks(loss: float | None, device: torch.device) -> float:
    """Return the mean of the losses over all ranks that have one. It is not weighted, because replicas have equal parts."""
    total = torch.tensor([loss or 0.0, float(loss is not None)], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _promised_share(layout: MegatronLayout, ranks: int) -> float:
    return layout.tensor * layout.pipeline / ranks if layout.distributed_optimizer else 1.0


def _curve(name: str, losses: list[float], norms: list[float]) -> pd.DataFrame:
    return pd.DataFrame({"layout": name, "step": range(1, len(losses) + 1), "loss": losses, "norm": norms})


def _params(context: Context, options: MegatronParityOptions, what: str) -> dict:
    return {
        "what": what,
        "model": options.model,
        "ranks": options.rank_count(context, options.batch_size),
        "steps": options.steps,
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
    }
