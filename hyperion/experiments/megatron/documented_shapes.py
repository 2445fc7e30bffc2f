"""Do the shapes that the guide documents need the memory that a formula predicts?

The guide has four shapes: on one GPU, with two replicas, with two tensor-parallel ranks, and with two stages. Here the numbers of
layers and heads are those of the guide, but width and length are divided by `divisor`. Each rank trains for one step. Then it
counts the bytes of its parameters, its gradients and its moments of Adam.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result, Table
from hyperion.chapter.rows import checked
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.experiments.megatron.bytes_of_text import VOCABULARY
from hyperion.experiments.megatron.megatron_parity import LayoutTable, why_not
from hyperion.models.llama import LlamaShape
from hyperion.parallel.megatron.layouts import rank_state_bytes
from hyperion.parallel.megatron.release import adapted_copy, use_adapted
from hyperion.processes import world

TOLERANCE = 0.15


class DocumentedShape(Table):
    """A shape of the guide.

    Args:
        name: name of the row.
        layers, width, heads, sequence_length: as in the guide.
        micro_batch_size: sequences of a micro-batch.
        layout: layout of a replica. Its micro-batches are fewer than in the guide, because they do not change the bytes.
        replicas: smallest number of replicas. If there are more ranks, there are more replicas.
    """

    name: str
    layers: int
    width: int
    heads: int
    sequence_length: int
    micro_batch_size: int
    layout: LayoutTable
    replicas: int = 1

    @property
    def least_ranks(self) -> int:
        """The smallest number of ranks that can train this shape."""
        return self.layout.tensor * self.layout.pipeline * self.replicas

    def shape(self, divisor: int) -> LlamaShape:
        """Return the shape of a Llama with an MLP of about the same size as four times the width."""
        width = self.width // divisor
        return LlamaShape(width, self.layers, self.heads, self.heads, 16 * round(width / 6), VOCABULARY)


class DocumentedShapesOptions(RankOptions):
    """Options of `documented_shapes`.

    Args:
        shapes: the shapes of the guide.
        divisor: number by which width and length are divided.
    """

    shapes: tuple[DocumentedShape, ...]
    divisor: int


def forecast(context: Context) -> list[Forecast]:
    """Predict 16 bytes for each parameter of rank 0: 4 for its value, 4 for its gradient, and 8 for its moments."""
    options = DocumentedShapesOptions.of(context)
    ranks, basis = _ranks(context, options), "rank 0: 4 + 4 + 8 bytes for each of its parameters"
    return [
        Forecast(
            one.name,
            "model_state_bytes",
            rank_state_bytes(one.shape(options.divisor), one.layout.layout(), 0, ranks),
            basis,
            dtype="fp32",
            params=_params(options, one, 0, ranks),
            each_rank=True,
        )
        for one in options.shapes
        if one.least_ranks <= ranks
    ]


def run(context: Context, report: Report) -> Result:
    """Start the ranks once, and train for one step with each shape."""
    options = DocumentedShapesOptions.of(context)
    ranks = _ranks(context, options)
    rows = []
    for one in options.shapes:
        if reason := why_not(ranks, one.least_ranks):
            params = _params(options, one, 0, ranks)
            rows.append(context.absent_row(one.name, "model_state_bytes", reason, dtype="fp32", params=params))
    if len(rows) == len(options.shapes):
        return Result(rows, pd.DataFrame())
    adapted_copy()
    return Result(rows + merged(run_on_ranks(context, report, step_on_rank, ranks=ranks)).rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=DocumentedShapesOptions)


def step_on_rank(context: Context, report: Report) -> Result:
    """On one rank, train for one step with each shape that these ranks can run, and count the bytes of its state."""
    options = DocumentedShapesOptions.of(context)
    use_adapted()
    from hyperion.parallel.megatron import gpt

    rows, ranks, device = [], world().size, context.device.torch_device
    for done, one in enumerate(options.shapes):
        layout = one.layout.layout()
        if one.least_ranks > ranks:
            continue
        report(done, len(options.shapes), one.name)
        shape, length = one.shape(options.divisor), one.sequence_length // options.divisor
        replicas = ranks // (layout.tensor * layout.pipeline)
        with gpt.model_parallel(layout):
            model = gpt.build_gpt(shape, layout, length).to(device)
            trainer = gpt.MegatronTrainer(model, layout, gpt.Adam(1e-4))
            size = replicas * layout.micro_batches * one.micro_batch_size
            torch.manual_seed(context.seed)
            trainer.step(torch.randint(VOCABULARY, (size, length + 1)).to(device))
            found = sum(parameter.nbytes for parameter in model.parameters()) + trainer.state_bytes()
            found += sum(buffer.grad_data.nbytes for buffer in trainer.wrapped.buffers)
        stage = world().rank // (ranks // layout.pipeline)
        expected = rank_state_bytes(shape, layout, stage, ranks)
        params = _params(options, one, stage, ranks)
        check = checked("16 bytes for each parameter of the rank", abs(found / expected - 1), TOLERANCE)
        rows.append(context.row(one.name, "model_state_bytes", found, dtype="fp32", rank=world().rank, params=params, **check))
    return Result(rows, pd.DataFrame())


def _ranks(context: Context, options: DocumentedShapesOptions) -> int:
    return min(options.ranks, options.device_count(context))


def _params(options: DocumentedShapesOptions, one: DocumentedShape, stage: int, ranks: int) -> dict:
    return {
        "ranks": ranks,
        "layers": one.layers,
        "width": one.width // options.divisor,
        "heads": one.heads,
        "sequence_length": one.sequence_length // options.divisor,
        "stage": stage,
    }
