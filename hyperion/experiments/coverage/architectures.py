"""Which architectures of transformers run on this device, and are their results correct?

Each architecture is built from its configuration class with a few thousand random weights, without a download. Its float32 logits
and gradients are compared with the same model in float64 on the CPU. Generation with a cache must choose the same tokens as plain
forward passes over the whole sequence. If an architecture fails, its rows contain the reason.
"""

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.experiments.coverage.architecture_checks import TinyModel, check_derivatives, check_generation, check_gradients
from hyperion.experiments.coverage.architecture_configs import ARCHITECTURES
from hyperion.measure import FORMATS
from hyperion.measure.clock.verify import matmul_precision
from hyperion.results import Row

METRIC = "error_over_tolerance"
ALL = "all architectures"
PASSED = "pass forward, backward and, where the class can, generate"


class ArchitecturesOptions(Options):
    """Options for the `architectures` experiment.

    Args:
        names: names of the architectures, or an empty tuple for all of them.
        new_tokens: number of tokens to generate.
        probes: number of float64 references with randomly changed inputs. This number is computed twice: for changes as large
            as the unit roundoff of float32, and for changes as large as that of float64. See `rounding`.
        seeds: number of models with different random weights for each architecture.
    """

    names: tuple[str, ...] = ()
    new_tokens: int
    probes: int
    seeds: int = 1


def forecast(context: Context) -> list[Forecast]:
    """Predict that all architectures pass."""
    names = ArchitecturesOptions.of(context).names or tuple(ARCHITECTURES)
    basis = "each architecture consists of operators that PyTorch has on every device"
    params = {"what": PASSED}
    return [Forecast(ALL, "count", float(len(names)), basis, "fp32", params)]


def run(context: Context, report: Report) -> Result:
    """Check each architecture.

    If a step fails, or if the model class does not support it, its row contains the reason instead of a value.
    """
    import transformers  # here, because it is slow to import

    options = ArchitecturesOptions.of(context)
    names = options.names or tuple(ARCHITECTURES)
    rows: list[Row] = []
    passed = 0
    transformers.logging.set_verbosity_error()  # hide warnings that default special tokens are outside the tiny vocabulary
    with matmul_precision(FORMATS["fp32"]):
        for done, name in enumerate(names):
            report(done, len(names), name)
            found = [row for number in range(options.seeds) for row in _check(context, options, name, context.seed + number)]
            passed += all(row.without_failed_value().value is not None or _is_absent_step(row) for row in found)
            rows += found
    rows.append(context.row(ALL, "count", passed, dtype="fp32", params={"what": PASSED}))
    rows.append(context.row(ALL, "count", len(names) - passed, dtype="fp32", params={"what": "fail in a step"}))
    report(len(names), len(names), "done")
    return Result(rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run, options=ArchitecturesOptions, isolated=True)

# The check of generation is repeated with other random weights until the generated tokens depend on the context. This is the
# largest number of models that it tries.
_WEIGHTS = 4
NO_GENERATION = "not applicable: the class has no generation"


def _is_absent_step(row: Row) -> bool:
    return row.value_reason.startswith(NO_GENERATION)


def _check(context: Context, options: ArchitecturesOptions, name: str, seed: int) -> list[Row]:
    """Return the rows of one model. If a step raises an error, its row contains the error, and the later steps still run."""
    family = ARCHITECTURES[name].family
    common = {"family": family, "seed": seed}
    rows: list[Row] = []

    def attempt(step: str, check) -> None:
        try:
            rows.extend(check())
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]
            rows.append(context.absent_row(name, METRIC, reason, dtype="fp32", params=common | {"step": step}))

    def error_row(step: str, ratio: float, **more) -> Row:
        return context.error_row(name, METRIC, ratio, "float64", 1.0, dtype="fp32", params=common | {"step": step} | more)

    def count_row(what: str, value: int, check: dict, **more) -> Row:
        return context.row(name, "count", value, dtype="fp32", params=common | {"what": what} | more, **check)

    def derivatives(tiny: TinyModel) -> list[Row]:
        ratios = check_derivatives(tiny, seed, options.probes)
        return [error_row(step, ratio) for step, ratio in ratios.items()]

    def gradients(tiny: TinyModel) -> list[Row]:
        found = check_gradients(tiny)
        check = checked(f"parameters with a gradient that is not finite {found.bad or ''}".strip(), len(found.bad), 0)
        missing = "; ".join(f"{parameter}: {reason}" for parameter, reason in found.missing.items())
        return [count_row("parameter tensors with a finite gradient", found.finite, check, without=missing)]

    def generation(tiny: TinyModel) -> list[Row]:
        if not tiny.model.can_generate():
            reason = f"{NO_GENERATION} ({family})"
            return [context.absent_row(name, METRIC, reason, dtype="fp32", params=common | {"step": "generate"})]
        found = check_generation(tiny, options.new_tokens, seed, options.probes)
        for number in range(1, _WEIGHTS):
            if not found.need_context:
                # With other weights, the tokens may depend on the context.
                other = TinyModel.build(name, torch.device(context.device.torch_device), seed + 1000 * number)
                found = check_generation(other, options.new_tokens, seed, options.probes)
        if not found.need_context:
            raise RuntimeError("the last token alone gives the same tokens, so a wrong cache is not noticed")
        check = checked("tokens that plain forward passes do not choose", found.wrong, 0)
        counted = {"ties": found.ties, "need the context": found.need_context}
        return [error_row("generate", found.ratio), count_row("generated tokens", found.tokens, check, **counted)]

    built: list[TinyModel] = []

    def build() -> list[Row]:
        built.append(TinyModel.build(name, torch.device(context.device.torch_device), seed))
        attention = str(built[0].model.config._attn_implementation)
        parameters = sum(parameter.numel() for parameter in built[0].model.parameters())
        return [count_row("parameters", parameters, {}, attention=attention)]

    attempt("build", build)
    for tiny in built:
        attempt("forward and backward", lambda tiny=tiny: derivatives(tiny))
        attempt("gradients", lambda tiny=tiny: gradients(tiny))
        attempt("generate", lambda tiny=tiny: generation(tiny))
    return rows
