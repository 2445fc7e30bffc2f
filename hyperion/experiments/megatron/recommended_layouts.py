"""Are the layouts of the guide possible, and are they necessary?

The guide recommends a layout for five sizes of models. A planner rejects what cannot be divided or does not fit, and finds the
layout with the fewest ranks of a replica. Nothing is measured here: the parameters of a rank come from the formula that
`documented_shapes` checks.
"""

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result, Table
from hyperion.chapter.rows import checked
from hyperion.errors import HyperionError
from hyperion.hardware.specs import load_specifications
from hyperion.models.llama import LlamaShape, llama_parameter_count
from hyperion.parallel.megatron.layouts import MegatronLayout, rank_parameters
from hyperion.parallel.megatron.planner import mixed_precision_bytes, smallest_layout, why_rejected

GUIDE, SMALLEST, POSSIBLE = "layout of the guide", "smallest layout", "layouts of the guide that are possible"


class Recommendation(Table):
    """One line of the guide's table.

    Args:
        name: size of the model, as in the guide.
        like: name of the Llama whose shape stands for this size.
        width, layers, heads, key_value_heads, mlp_width: shape of this Llama.
        ranks, tensor, pipeline: the recommended layout. The rest of the ranks are replicas.
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
        recommendations: the guide's table.
    """

    device: str
    vocabulary: int
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
        return found[0] * 2**30


def forecast(context: Context) -> list[Forecast]:
    """Predict that all layouts of the guide are possible."""
    options = RecommendedLayoutsOptions.of(context)
    params = {"what": POSSIBLE, "device": options.device}
    return [Forecast(GUIDE, "count", len(options.recommendations), "the guide recommends them", params=params)]


def run(context: Context, report: Report) -> Result:
    """Return for each model the bytes of the guide's layout or why it is rejected, and the bytes of the smallest layout."""
    options = RecommendedLayoutsOptions.of(context)
    memory, rows, possible = options.memory_bytes(), [], 0
    for one in options.recommendations:
        shape = one.shape(options.vocabulary)
        of_guide = MegatronLayout(one.tensor, one.pipeline)
        reason = why_rejected(shape, of_guide, one.ranks, memory)
        possible += not reason
        rows.append(_row(context, options, one, GUIDE, of_guide, f"rejected: {reason}" if reason else ""))
        smallest = smallest_layout(shape, one.ranks, memory)
        none = f"rejected: no layout of {one.ranks} ranks fits"
        rows.append(_row(context, options, one, SMALLEST, smallest or MegatronLayout(), "" if smallest else none))
    params = {"what": POSSIBLE, "device": options.device}
    rows.append(context.row(GUIDE, "count", possible, params=params))
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=RecommendedLayoutsOptions)


def _row(
    context: Context, options: RecommendedLayoutsOptions, one: Recommendation, what: str, layout: MegatronLayout, reason: str
):
    params = {"what": what, "like": one.like, "ranks": one.ranks, "device": options.device}
    if reason:
        return context.absent_row(one.name, "model_state_bytes", reason, dtype="bf16", params=params)
    shape = one.shape(options.vocabulary)
    # All ranks of a replica together have each matrix once, and each norm once for each rank that shares the matrices.
    norms = shape.hidden_size * (2 * shape.num_hidden_layers + 1)
    everywhere = layout.tensor * sum(rank_parameters(shape, layout, stage) for stage in range(layout.pipeline))
    expected = llama_parameter_count(shape) + (layout.tensor - 1) * norms
    check = checked("parameters of the model, summed over the ranks of a replica", abs(everywhere / expected - 1), 1e-12)
    value = mixed_precision_bytes(shape, layout, one.ranks)
    params["layout"] = layout.name(one.ranks)
    return context.row(one.name, "model_state_bytes", value, dtype="bf16", params=params, **check)
