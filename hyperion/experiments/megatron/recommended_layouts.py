"""Are the layouts that the guide recommends possible, and would smaller ones be enough?

The guide recommends a layout for five sizes of models. A planner rejects a layout if the model cannot be divided that way or does
not fit into memory. It also finds the layout with the fewest ranks per replica. Full recomputation is used only if nothing fits
without it. Nothing is measured here. The number of parameters of a rank comes from the formula that `documented_shapes` checks,
and the size of the activations comes from a published formula.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import checked
from hyperion.errors import HyperionError
from hyperion.hardware.specs import load_specifications
from hyperion.models.llama import LlamaShape, llama_parameter_count
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters
from hyperion.parallel.megatron.planner import Batch, mixed_precision_bytes, smallest_layout, training_bytes, why_rejected
from hyperion.results import Row
from hyperion.units import GIB

GUIDE, SMALLEST, POSSIBLE = "layout of the guide", "smallest layout", "layouts of the guide that are possible"


class Recommendation(Table):
    """One line of the guide's table.

    Args:
        name: size of the model, as in the guide.
        like: name of the Llama whose shape stands for this size.
        width, layers, heads, key_value_heads, mlp_width: shape of this Llama.
        ranks, tensor, pipeline: the recommended layout: number of ranks, tensor-parallel ranks, and stages. The number of
            replicas is ranks / (tensor · pipeline).
    """

    name: str
    like: str
    width: int
    layers: int
    heads: int
    key_value_heads: int
    mlp_width: int
    ranks: int
    tensor: int
    pipeline: int

    def shape(self, vocabulary: int) -> LlamaShape:
        """Return the shape of the Llama."""
        return LlamaShape(self.width, self.layers, self.heads, self.key_value_heads, self.mlp_width, vocabulary)


class RecommendedLayoutsOptions(Options):
    """Options of `recommended_layouts`.

    Args:
        device: name of a device in the data sheets.
        vocabulary: number of tokens.
        sequence_length, micro_batch_size: size of a micro-batch, for its activations.
        recommendations: the guide's table.
    """

    device: str
    vocabulary: int
    sequence_length: int
    micro_batch_size: int
    recommendations: tuple[Recommendation, ...]

    def memory_bytes(self) -> float:
        """Return the memory of the device.

        Raises:
            HyperionError: the device has no data sheet.
        """
        found = [entry.memory_gib for entry in load_specifications().device if entry.name == self.device]
        if not found:
            raise HyperionError(
                f"no device is named {self.device!r}",
                where="option device of recommended_layouts",
                next_step="choose the name of a device in hyperion/hardware/specs.toml",
            )
        return found[0] * GIB


def forecast(context: Context) -> list[Forecast]:
    """Predict that all layouts of the guide are possible."""
    options = RecommendedLayoutsOptions.of(context)
    params = {"what": POSSIBLE, "device": options.device}
    return [Forecast(GUIDE, "count", len(options.recommendations), "the guide recommends them", params=params)]


def run(context: Context, report: Report) -> Result:
    """Return, for each model, the bytes that the guide's layout and the smallest layout need on the fullest rank.

    If a layout is rejected, its rows contain the reason instead.
    """
    options = RecommendedLayoutsOptions.of(context)
    memory, rows, possible = options.memory_bytes(), [], 0
    stored, recomputed = (Batch(options.sequence_length, options.micro_batch_size, recompute) for recompute in (False, True))
    for one in options.recommendations:
        shape, of_guide = one.shape(options.vocabulary), MegatronLayout(one.tensor, one.pipeline)
        batch = recomputed if why_rejected(shape, of_guide, one.ranks, memory, stored) else stored
        reason = why_rejected(shape, of_guide, one.ranks, memory, batch)
        possible += not reason
        rows += _rows(context, options, one, GUIDE, of_guide, batch, f"rejected: {reason}" if reason else "")
        batch = stored if smallest_layout(shape, one.ranks, memory, stored) else recomputed
        smallest = smallest_layout(shape, one.ranks, memory, batch)
        none = f"rejected: no layout of {one.ranks} ranks fits"
        rows += _rows(context, options, one, SMALLEST, smallest or MegatronLayout(), batch, "" if smallest else none)
    params = {"what": POSSIBLE, "device": options.device}
    rows.append(context.row(GUIDE, "count", possible, params=params))
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=RecommendedLayoutsOptions)


def _rows(
    context: Context,
    options: RecommendedLayoutsOptions,
    one: Recommendation,
    what: str,
    layout: MegatronLayout,
    batch: Batch,
    reason: str,
) -> list[Row]:
    """Return two rows for a layout: the bytes of the state, and of state and activations together, or why it is rejected."""
    params = {"what": what, "like": one.like, "ranks": one.ranks, "device": options.device}
    recomputation = {"recomputation": "full" if batch.recompute else "none"}
    size = {"sequence_length": batch.sequence_length, "micro_batch_size": batch.micro_batch_size} | recomputation
    if reason:
        absent = (("model_state_bytes", params), ("training_bytes", params | size))
        return [context.absent_row(one.name, metric, reason, dtype="bf16", params=its) for metric, its in absent]
    shape = one.shape(options.vocabulary)
    # The ranks of a replica together hold each matrix once. They hold each norm once per tensor-parallel rank.
    norms = shape.hidden_size * (2 * shape.num_hidden_layers + 1)
    everywhere = layout.tensor * sum(rank_parameters(shape, layout, stage) for stage in range(layout.pipeline))
    expected = llama_parameter_count(shape) + (layout.tensor - 1) * norms
    check = checked("parameters of the model, summed over the ranks of a replica", abs(everywhere / expected - 1), 1e-12)
    state, whole = mixed_precision_bytes(shape, layout, one.ranks), training_bytes(shape, layout, one.ranks, batch)
    params["layout"] = layout.name(one.ranks)
    return [
        context.row(one.name, "model_state_bytes", state, dtype="bf16", params=params, **check),
        context.row(one.name, "training_bytes", whole, dtype="bf16", params=params | size),
    ]
