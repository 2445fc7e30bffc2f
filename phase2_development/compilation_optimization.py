"""Measure what torch.compile brings: eager, default, max-autotune and reduce-overhead, each alone in its process.

    python compilation_optimization.py --base_dir . --dtype bf16 --repeat 50

Writes <base_dir>/results/benchmarks/compilation/: compilation.csv and .json (the same lines), .txt, and two pictures; the
rows behind them, with samples, checks and environment, go to a run folder of their own under <base_dir>/results/.
Without --model a GPU gets the published models and a CPU tiny ones, under names that say so.
The chapter 07_compilation_optimization teaches what is measured here and how.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the library beside this folder, from any directory

from hyperion.book.plots import draw, plots_of
from hyperion.chapter import Context, default_profile, experiment_named, load_profile, run_information
from hyperion.checkpoints.weights import read_weights
from hyperion.errors import HyperionError, require_seed
from hyperion.experiments.compilation.compilation import CompilationOptions
from hyperion.experiments.compilation.compilation_models import IMAGENET_STEM, ModelSpec, fit_to_weights, weight_faults
from hyperion.experiments.compilation.compilation_table import compilation_csv, compilation_json, compilation_table
from hyperion.figures.material import Material
from hyperion.hardware import detect
from hyperion.measure.steps.compilation import EAGER, MODES
from hyperion.results import Run, new_run_folder
from hyperion.results.files import make_folder, write_atomically

CHAPTER, EXPERIMENT = "07_compilation_optimization", "compilation"
FEWEST_SAMPLES = 50
IMAGES, LANGUAGE = {"batch": 32}, {"batch": 8, "sequence_length": 128, "vocabulary": 50257}
SHOWN = ["model", "variant", "dtype", "time_ms", "speedup", "mem_gb", "compile_s", "graph_breaks", "reps", "reason"]


def main(given: Sequence[str] | None = None) -> int:
    """Measure, write, print. Returns the exit code: 0, or 2 with the reason when something can be put right."""
    arguments = parsed(given)
    try:
        specs = specifications(arguments)
        run = measure(arguments, specs)
        written = write_results(run, arguments.base_dir / "results" / "benchmarks" / "compilation")
    except HyperionError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    print(compilation_table(run.rows())[SHOWN].map(_shown).to_string(index=False))
    print(f"rows: {run.folder}\n" + "\n".join(f"wrote {path}" for path in written))
    return 0


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; what is invalid ends the call with the reason and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_dir", type=_folder, default=".", help="folder under which results/ lies")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of weights and arithmetic")
    parser.add_argument("--repeat", type=_count, default=FEWEST_SAMPLES, help=f"samples a mode, {FEWEST_SAMPLES} or more")
    parser.add_argument("--checkpoint", type=Path, help="weights to load: safetensors, a state dict, a checkpoint folder")
    parser.add_argument("--model", action="append", help=f"may be repeated: {IMAGENET_STEM}, resnet18, resnet18_w8, lm_…")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be repeated; all unless given, eager always")
    parser.add_argument("--batch", type=_count, help="the published one unless given")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(given)


def specifications(arguments: argparse.Namespace) -> list[ModelSpec]:
    """Return the models and modes to measure; with a checkpoint only the models that its weights fit.

    Raises:
        HyperionError: a seed out of range, a model that there is not, an unreadable checkpoint, or one that fits no model.
    """
    require_seed(arguments.seed)
    asked = {"dtype": arguments.dtype, "batch": arguments.batch}
    asked |= {"modes": [mode for mode in MODES if mode == EAGER or mode in (arguments.mode or MODES)]}
    named = [(IMAGES if name.startswith("resnet18") else LANGUAGE) | {"model": name} for name in arguments.model or ()]
    profile = [spec.model_dump(exclude_defaults=True) for spec in profile_options().models]
    given = {name: value for name, value in asked.items() if value}
    specs = [ModelSpec.model_validate(spec | given, strict=False) for spec in named or profile]
    if arguments.checkpoint is None:
        for spec in specs:
            weight_faults(spec, {})  # builds it without storage: an unknown name is refused before any measurement
        return specs
    weights = read_weights(arguments.checkpoint.resolve())
    print(f"{weights.path}: {len(weights.tensors)} tensors, sha256 {weights.sha256}")
    origin = {"checkpoint": str(weights.path), "weights": f"{weights.path.name}, sha256 {weights.sha256[:16]}"}
    faults = {}
    fitting = []
    for spec in [fit_to_weights(spec, weights.tensors).model_copy(update=origin) for spec in specs]:
        if found := weight_faults(spec, weights.tensors):
            faults[spec.model] = found[0]
            print(f"{spec.model} is skipped: {found[0]}")
        else:
            fitting.append(spec)
    if not fitting:
        reasons = "; ".join(f"{model}: {fault}" for model, fault in faults.items())
        remedy = "name the model it was saved from with --model"
        raise HyperionError(f"the checkpoint fits none of the models: {reasons}", where=weights.path, next_step=remedy)
    return fitting


def profile_options() -> CompilationOptions:
    """Return the options of the chapter on this kind of device."""
    return CompilationOptions.parse(load_profile(default_profile(detect().kind)).sizes(EXPERIMENT), EXPERIMENT)


def measure(arguments: argparse.Namespace, specs: list[ModelSpec]) -> Run:
    """Measure every mode and return the run."""
    samples = max(arguments.repeat, FEWEST_SAMPLES)
    if samples > arguments.repeat:
        print(f"--repeat {arguments.repeat}: {samples} samples are taken, the fewest that a speed-up is reported from")
    options = profile_options().model_copy(update={"models": tuple(specs), "samples": samples})
    sizes = options.model_dump(mode="json", exclude_defaults=True)
    run = Run.create(
        new_run_folder(EXPERIMENT, arguments.base_dir / "results"), run_information("script", "none", arguments.seed)
    )
    with tempfile.TemporaryDirectory() as workspace:
        context = Context(notebook=CHAPTER, experiment=EXPERIMENT, sizes=sizes, seed=arguments.seed, workspace=Path(workspace))
        result = experiment_named(EXPERIMENT).run(
            context, lambda done, total, note: print(f"[{done}/{total}] {note}", flush=True)
        )
    run.record(CHAPTER, EXPERIMENT, result.rows, result.samples, input_hash="script")
    return run


def write_results(run: Run, folder: Path) -> list[Path]:
    """The flat table as CSV, JSON and text, and the pictures, all made from the run's rows."""
    rows, material = run.rows(), Material(run)
    contents = {
        "compilation.csv": compilation_csv(rows).encode(),
        "compilation.json": compilation_json(rows).encode(),
        "compilation.txt": (compilation_table(rows).map(_shown).to_string(index=False) + "\n").encode(),
    }
    pictures = {f"{plot.name}.png": draw(plot.name, material) for plot in plots_of(EXPERIMENT)}
    contents |= {name: picture for name, picture in pictures.items() if picture}
    make_folder(folder)
    for name, content in contents.items():
        write_atomically(folder / name, content)
    return [folder / name for name in contents]


def _shown(cell) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _folder(text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder: make it, or name another")
    return path


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
