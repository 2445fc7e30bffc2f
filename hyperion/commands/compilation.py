"""The command of phase2_development/compilation_optimization.py: measure the modes of torch.compile and write one table."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hyperion.book.plots import draw, plots_of
from hyperion.chapter import Context, default_profile, experiment_named, load_profile, run_information
from hyperion.checkpoints.weights import read_weights
from hyperion.commands.console import existing_folder, one_of, run_app
from hyperion.errors import LARGEST_SEED, HyperionError
from hyperion.experiments.compilation.compilation import CompilationOptions
from hyperion.experiments.compilation.compilation_models import IMAGENET_STEM, ModelSpec, fit_to_weights, weight_faults
from hyperion.experiments.compilation.figures import compilation_csv, compilation_json, compilation_table
from hyperion.figures.material import Material
from hyperion.hardware import detect
from hyperion.measure.steps.compilation import EAGER, MODES
from hyperion.results import Run, new_run_folder
from hyperion.results.files import make_folder, write_atomically
from hyperion.terminal import run_command, say

PROGRAM = "compilation_optimization"
CHAPTER, EXPERIMENT = "07_compilation_optimization", "compilation"
DTYPES = ("fp32", "bf16", "fp16")
FEWEST_SAMPLES = 50
IMAGES, LANGUAGE = {"batch": 32}, {"batch": 8, "sequence_length": 128, "vocabulary": 50257}
_COLUMNS = ["model", "variant", "dtype", "time_ms", "speedup", "mem_gb", "compile_s", "graph_breaks", "reps", "reason"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True, kw_only=True)
class CompilationRequest:
    """The models and modes to measure, and the folder for the results.

    Args:
        base_dir: folder that contains results/.
        dtype: number format of weights and arithmetic.
        repeat: number of samples per mode.
        checkpoint: file or folder with weights to load. None means random weights.
        models: names of the models. An empty tuple means all models of the profile.
        modes: names of the modes. An empty tuple means all modes. `eager` is always measured.
        batch: number of examples per call. None means the number in the published benchmark.
        seed: seed of all random numbers.
    """

    base_dir: Path = Path(".")
    dtype: str = "fp32"
    repeat: int = FEWEST_SAMPLES
    checkpoint: Path | None = None
    models: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    batch: int | None = None
    seed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0, or 2 if an option, a file or the machine cannot be used."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_command(lambda: run_app(app, f"{PROGRAM}.py", given), PROGRAM)


@app.command()
def compilation(
    base_dir: Annotated[
        Path, typer.Option("--base_dir", callback=existing_folder, help="Folder in which results/ is created.")
    ] = Path("."),
    dtype: Annotated[
        str, typer.Option(callback=one_of(DTYPES), help=f"Number format of weights and arithmetic: {', '.join(DTYPES)}.")
    ] = "fp32",
    repeat: Annotated[
        int, typer.Option(min=1, help=f"Number of samples of each mode, at least {FEWEST_SAMPLES}.")
    ] = FEWEST_SAMPLES,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights to load: a safetensors file, a file with a state dict, or a checkpoint folder.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Model to measure, may be repeated: {IMAGENET_STEM}, resnet18, resnet18_w8, lm_…."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE", callback=one_of(MODES), help=f"Mode to measure, may be repeated, all by default: {', '.join(MODES)}."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Number of examples of a call.", show_default="as in the published benchmark")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of all random numbers.")] = 0,
) -> None:
    """Measure the speed-up of torch.compile. Each mode (eager, default, max-autotune, reduce-overhead) has its own process.

    The folder <base_dir>/results/benchmarks/compilation/ gets compilation.csv, compilation.json, compilation.txt and two
    pictures. The rows from which they are made are stored in a run folder under <base_dir>/results/, with samples, checks and
    environment. Without --model, the published models are measured on a GPU, and tiny models with other names on a CPU. Chapter
    07_compilation_optimization explains the method.
    """
    options = CompilationRequest(
        base_dir=base_dir,
        dtype=dtype,
        repeat=repeat,
        checkpoint=checkpoint,
        models=tuple(model or ()),
        modes=tuple(mode or ()),
        batch=batch,
        seed=seed,
    )
    specs = specifications(options)
    run = measure(options, specs)
    paths = write_results(run, base_dir / "results" / "benchmarks" / "compilation")
    say(compilation_table(run.rows())[_COLUMNS].map(_as_text).to_string(index=False))
    say("\n".join([f"rows: {run.folder}", *(f"wrote {path}" for path in paths)]))


def specifications(options: CompilationRequest) -> list[ModelSpec]:
    """Return the specifications of the models to measure. A checkpoint restricts them to models that its weights fit.

    Raises:
        HyperionError: a model is unknown, or the checkpoint cannot be read or does not match the weights of any model.
    """
    requested: dict[str, Any] = {"dtype": options.dtype, "batch": options.batch}
    requested["modes"] = [mode for mode in MODES if mode == EAGER or mode in (options.modes or MODES)]
    named = [(IMAGES if name.startswith("resnet18") else LANGUAGE) | {"model": name} for name in options.models]
    given = {name: value for name, value in requested.items() if value}
    bases = named or [spec.model_dump(exclude_defaults=True) for spec in profile_options().models]
    specs = [ModelSpec.model_validate(base | given, strict=False) for base in bases]
    if options.checkpoint is None:
        for spec in specs:
            weight_faults(spec, {})  # builds the model without memory, so that a wrong name is rejected before any measurement
        return specs
    weights = read_weights(options.checkpoint.resolve())
    say(f"{weights.path}: {len(weights.tensors)} tensors, sha256 {weights.sha256}")
    origin = {"checkpoint": str(weights.path), "weights": f"{weights.path.name}, sha256 {weights.sha256[:16]}"}
    specs = [fit_to_weights(spec, weights.tensors).model_copy(update=origin) for spec in specs]
    reasons = {spec.model: reason[0] for spec in specs if (reason := weight_faults(spec, weights.tensors))}
    for model, reason in reasons.items():
        say(f"{model} is left out: {reason}")
    if len(reasons) == len(specs):
        listed = "; ".join(f"{model}: {reason}" for model, reason in reasons.items())
        remedy = "use --model to name the model from which the checkpoint was saved"
        raise HyperionError(f"the checkpoint fits none of the models: {listed}", where=weights.path, next_step=remedy)
    return [spec for spec in specs if spec.model not in reasons]


def profile_options() -> CompilationOptions:
    """Return the options of the experiment `compilation` in the default profile of this machine."""
    return CompilationOptions.parse(load_profile(default_profile(detect().kind)).sizes(EXPERIMENT), EXPERIMENT)


def measure(options: CompilationRequest, specs: list[ModelSpec]) -> Run:
    """Measure every mode of every model, and return a new run with the rows and samples."""
    samples = max(options.repeat, FEWEST_SAMPLES)
    if samples > options.repeat:
        say(f"--repeat {options.repeat} is too small: {samples} samples are taken, which is the smallest number for a speed-up")
    sizes = profile_options().model_copy(update={"models": tuple(specs), "samples": samples})
    run = Run.create(new_run_folder(EXPERIMENT, options.base_dir / "results"), run_information("script", "none", options.seed))
    with tempfile.TemporaryDirectory() as workspace:
        context = Context(
            notebook=CHAPTER,
            experiment=EXPERIMENT,
            sizes=sizes.model_dump(mode="json", exclude_defaults=True),
            seed=options.seed,
            workspace=Path(workspace),
        )
        result = experiment_named(EXPERIMENT).run(context, lambda done, total, note: say(f"[{done}/{total}] {note}"))
    run.record(CHAPTER, EXPERIMENT, result.rows, result.samples, input_hash="script")
    return run


def write_results(run: Run, folder: Path) -> list[Path]:
    """Write the table as CSV, JSON and text, and the pictures, all from the rows of the run. Return their paths."""
    rows, material = run.rows(), Material(run)
    contents = {
        "compilation.csv": compilation_csv(rows).encode(),
        "compilation.json": compilation_json(rows).encode(),
        "compilation.txt": (compilation_table(rows).map(_as_text).to_string(index=False) + "\n").encode(),
    }
    pictures = {f"{plot.name}.png": draw(plot.name, material) for plot in plots_of(EXPERIMENT)}
    contents |= {name: picture for name, picture in pictures.items() if picture}
    make_folder(folder)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _as_text(cell: object) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
