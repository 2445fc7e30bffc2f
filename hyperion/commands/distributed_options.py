"""Read and check the options of run_distributed.py, and convert them to recipes of training runs."""

import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from pydantic import Field

from hyperion.chapter.profiles import default_profile, lineage
from hyperion.commands.console import UsageError, existing_folder, one_of
from hyperion.data.store.sources import SOURCES
from hyperion.data.text.tokenizer import GPT2_VOCABULARY
from hyperion.errors import HyperionError, not_none, require_seed
from hyperion.forms import read_form
from hyperion.hardware import Device
from hyperion.models import local_llama, random_llama_shape
from hyperion.paths import expanded, results_folder
from hyperion.results import Run, find_run, is_run
from hyperion.training import choose_precision
from hyperion.workloads.fine_tuning import FULL, LORA, RANK, require_llama, state_bytes
from hyperion.workloads.recipes import Recipe, Strategy, Task

COMMAND = "run_distributed"
LANGUAGE = {"language_ddp": "ddp", "language_fsdp": "fsdp"}
TRAININGS = (*LANGUAGE, "cifar", "llama")
ALL, SCALING = "all", "scaling"
MODELS = (*TRAININGS, ALL, SCALING)
EPOCHS = 5
_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
_OF_TRAININGS = ("epochs", "steps", "batch_size", "strategy")
_STRATEGY = {"cifar": "ddp", "llama": "fsdp"}
_SIZES = Path(__file__).with_name("distributed_sizes.toml")


class OptionError(HyperionError):
    """Raised if an option is invalid, if options contradict each other, or if this machine cannot do what they request."""


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise typer.BadParameter(f"{text!r} is not a whole number above 0")
    return value


def _existing(text: str) -> str:
    """Return the absolute path if `text` is a folder. Return any other text unchanged."""
    path = expanded(text)
    return str(path.resolve()) if path.is_dir() else text


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Command-line options of run_distributed.py, which are JSON-serializable.

    Typer makes the command line from the fields of this class. An option that was not given is None, except `lora`, which is
    False. `base_dir` is an absolute path.
    """

    model: Annotated[
        str | None,
        typer.Option(
            callback=one_of(MODELS),
            help=f"What to train: {', '.join(MODELS)}. `all` trains the first four in one launch. `scaling` measures "
            "the scaling of chapter 2.8 on 1, 2, 4 … devices.",
            show_default=TRAININGS[0],
        ),
    ] = None
    epochs: Annotated[
        int | None, typer.Option(parser=_count, help="Number of passes over the data.", show_default=str(EPOCHS))
    ] = None
    steps: Annotated[int | None, typer.Option(parser=_count, help="Number of optimizer steps, instead of --epochs.")] = None
    base_dir: Annotated[
        str | None,
        typer.Option(
            "--base_dir",
            parser=lambda text: str(existing_folder(text)),
            help="Folder in which results/ is created.",
            show_default="the repository, or HYPERION_RESULTS",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch_size",
            parser=_count,
            help="Number of examples in a step, on all ranks together.",
            show_default="depends on model and device",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            callback=one_of(_PRECISIONS),
            help=f"Number format: {', '.join(_PRECISIONS)}. auto is bf16 if the matrix units support it, else fp32.",
            show_default="auto",
        ),
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(
            callback=one_of(("ddp", "fsdp")),
            help="Parallelism of cifar or llama: ddp or fsdp.",
            show_default="cifar: ddp, llama: fsdp",
        ),
    ] = None
    lora: Annotated[bool, typer.Option("--lora", help=f"llama only: train LoRA adapters of rank {RANK} on frozen weights.")] = (
        False
    )
    model_id: Annotated[
        str | None,
        typer.Option(
            "--model_id",
            parser=_existing,
            help="llama only: a folder with weights, the id of a model on the hub, or the name of a random configuration.",
            show_default="the folder llama/ of the mirror or the cache, else random weights",
        ),
    ] = None
    scaling_gpus: Annotated[
        str | None,
        typer.Option("--scaling_gpus", help="scaling only: numbers of devices, as 1,2,4.", show_default="1, 2, 4 … and all"),
    ] = None
    data_source: Annotated[
        str | None,
        typer.Option(
            "--data_source",
            callback=one_of(SOURCES),
            help=f"{', '.join(SOURCES)}. auto takes the first available of mirror, cache, download and, on a CPU, synthetic.",
            show_default="auto",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.", show_default="0")] = None
    # --resume exists because torchrun reads --run as an abbreviation of its own option --run-path, even after the program's name.
    run: Annotated[
        str | None,
        typer.Option(
            "--resume",
            "--run",
            help="Continue a run: its folder, or its name under results/. The other options need not be repeated. With "
            "torchrun, use --resume and not --run.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the command runs on.

    Args:
        device: the device of this process.
        devices: number of devices of the machine. On a CPU, number of ranks that share the CPU.
        ranks: number of ranks that train together.
        launched: whether torchrun started this process as one of the ranks.
    """

    device: Device
    devices: int
    ranks: int
    launched: bool


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """The work that checked options describe.

    Args:
        options: the options, with defaults for all options that were not given.
        recipes: one recipe for each training run. Empty for scaling.
        counts: numbers of devices to measure, for scaling. Empty otherwise.
        results: folder of all runs.
        run: folder of the run to resume; None to start a new run.
        notes: lines of text to print before the start.
    """

    options: CommandOptions
    recipes: tuple[Recipe, ...] = ()
    counts: tuple[int, ...] = ()
    results: Path
    run: Path | None = None
    notes: tuple[str, ...] = ()


def parsed(given: Sequence[str] | None, description: str) -> CommandOptions:
    """Read a command line.

    Raises:
        OptionError: an option is unknown or has an invalid value. The error is not printed here, because only rank 0 must print
            it.
        SystemExit: after `--help`.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help="\b\n" + description.replace("\n\n", "\n\n\b\n"))(CommandOptions)
    command = typer.main.get_command(app)
    try:
        with command.make_context(f"{COMMAND}.py", list(sys.argv[1:] if given is None else given)) as context:
            return command.invoke(context)
    except typer.Exit as ending:
        raise SystemExit(ending.exit_code) from None
    except UsageError as error:
        raise refused(error.format_message(), f"see {COMMAND}.py --help") from error


def checked(options: CommandOptions, machine: Machine) -> TrainingRequest:
    """Check the options and return the request that they describe. All ranks return the same request.

    Raises:
        HyperionError: the options contradict each other, or this machine, the data or the weights do not allow them.
    """
    results = _results(options)
    run = None if options.run is None else _run_folder(options.run, results)
    options = with_defaults(options) if run is None else _resumed(options, run)
    require_sense(options)
    choose_precision(machine.device, options.precision or "auto")
    if options.model == SCALING:
        if machine.launched:
            counts = f" --scaling_gpus {options.scaling_gpus}" if options.scaling_gpus else ""
            raise refused(
                "--model scaling does not work with torchrun, because it makes one launch for each number of devices",
                f"start it without torchrun: python phase2_development/{COMMAND}.py --model scaling{counts}",
            )
        counts = _counts(options.scaling_gpus, machine)
        return TrainingRequest(options=options, results=results, run=run, counts=counts)
    notes: list[str] = []
    if run is None:
        names = TRAININGS if options.model == ALL else (options.model or TRAININGS[0],)
        recipes = [_recipe(name, options, machine, notes) for name in names]
    else:
        recipes = [Recipe(**settings) for settings in _command(run)["recipes"]]
    for recipe in recipes:
        _require_possible(recipe, machine)
    return TrainingRequest(options=options, results=results, run=run, recipes=tuple(recipes), notes=tuple(notes))


def with_defaults(options: CommandOptions) -> CommandOptions:
    """Return the options with defaults for all options that were not given."""
    defaults = {"model": TRAININGS[0], "precision": "auto", "data_source": "auto", "seed": 0}
    if options.model != SCALING and options.steps is None:
        defaults["epochs"] = EPOCHS
    return replace(options, **{name: value for name, value in defaults.items() if getattr(options, name) is None})


def require_sense(options: CommandOptions) -> None:
    """Check that the options do not contradict each other. This check does not depend on the machine.

    Raises:
        OptionError: two options contradict each other. The message names the options and the remedy.
        HyperionError: the seed is out of range.
    """
    require_seed(0 if options.seed is None else options.seed)
    model = options.model
    trains_llama = model in ("llama", ALL)
    if options.lora and not trains_llama:
        raise refused(
            f"--lora does not work with --model {model}, because only the Llama is trained with adapters",
            "use --model llama, or leave --lora out",
        )
    if options.model_id is not None and not trains_llama:
        raise refused(
            f"--model_id {options.model_id} does not work with --model {model}, because --model_id names the weights of a Llama",
            "use --model llama, or leave --model_id out",
        )
    own = LANGUAGE.get(model or "")
    if options.strategy is not None and own not in (None, options.strategy):
        raise refused(
            f"--strategy {options.strategy} contradicts --model {model}",
            f"use --model language_{options.strategy}, and leave --strategy out",
        )
    if options.scaling_gpus is not None and model != SCALING:
        raise refused(
            f"--scaling_gpus does not work with --model {model}, because a training runs on the ranks that torchrun starts",
            "use --model scaling, or start torchrun with --nproc_per_node",
        )
    if options.epochs is not None and options.steps is not None:
        raise refused("--epochs and --steps are both given", "give only one of them; --steps is for a short test")
    if model == SCALING:
        said = [name for name in _OF_TRAININGS if getattr(options, name) not in (None, False)]
        if said:
            raise refused(
                f"--{said[0]} does not work with --model scaling, because the profile defines the sizes of the timed steps",
                f"leave --{said[0]} out",
            )


def _counts(text: str | None, machine: Machine) -> tuple[int, ...]:
    """Return the requested numbers of devices in ascending order. The default is 1, 2, 4, … and the number of all devices."""
    if text is None:
        powers = [1 << power for power in range(machine.devices.bit_length()) if 1 << power <= machine.devices]
        return tuple(dict.fromkeys([*powers, machine.devices]))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise refused(f"--scaling_gpus {text!r} is not a list of numbers above 0", "write the list as 1,2,4")
    counts = sorted({int(part) for part in parts})
    if counts[-1] > machine.devices:
        raise refused(
            f"--scaling_gpus {text} is too large: this machine has {machine.devices} devices"
            + (" (ranks that share the CPU)" if machine.device.kind == "cpu" else ""),
            f"use numbers up to {machine.devices}",
        )
    return tuple(counts)


@dataclass(frozen=True, kw_only=True)
class TrainingSizes:
    """Sizes of a task of this command in a profile.

    Args:
        models: names of the models, of which the first that fits into the memory is trained.
        batch_size: number of examples in one optimizer step, on all ranks together.
        learning_rates: peak learning rate for training all parameters ("full") and for training adapters ("lora").
        weight_decay: weight decay of the optimizer.
        checkpoint_every: number of steps between two checkpoints.
        evaluation_batches: number of held-out batches of an evaluation. None uses all batches.
        sequence_length: number of tokens in one example (language, llama).
        width: number of channels of the first stage (images).
    """

    models: Annotated[list[str], Field(min_length=1)]
    batch_size: int
    learning_rates: dict[Literal["full", "lora"], float]
    weight_decay: float
    checkpoint_every: int
    evaluation_batches: int | None = None
    sequence_length: int = 0
    width: int = 64


def training_sizes(profile: str, task: str) -> TrainingSizes:
    """Return the sizes of a task in a profile. The profile inherits sizes from its ancestors.

    Args:
        profile: name of a profile.
        task: "language", "images" or "llama".

    Raises:
        FieldError: a size is unknown, missing or invalid.
    """
    by_profile, sizes = tomllib.loads(_SIZES.read_text(encoding="utf-8")), {}
    for ancestor in lineage(profile):
        sizes |= by_profile.get(ancestor, {}).get(task, {})
    return read_form(TrainingSizes, sizes, f"{_SIZES.name}: {task}")


def _recipe(name: str, options: CommandOptions, machine: Machine, notes: list[str]) -> Recipe:
    """Return the recipe of one training run. Its sizes come from the profile, unless an option changes them."""
    task: Task = "language" if name in LANGUAGE else "images" if name == "cifar" else "llama"
    sizes = training_sizes(default_profile(machine.device.kind), task)
    strategy = cast(Strategy, LANGUAGE.get(name) or options.strategy or _STRATEGY[name])
    model = _llama(options, machine, sizes.models, strategy, notes) if task == "llama" else sizes.models[0]
    lora = options.lora and task == "llama"
    batch = sizes.batch_size
    if options.batch_size is None and batch % machine.ranks:
        rounded = -(-batch // machine.ranks) * machine.ranks
        notes.append(
            f"{name}: the batch size is {rounded} instead of {batch}, because {machine.ranks} ranks do not divide {batch}"
        )
        batch = rounded
    return Recipe(
        task=task,
        model=model,
        strategy=strategy,
        precision=options.precision or "auto",
        batch_size=options.batch_size or batch,
        learning_rate=sizes.learning_rates["lora" if lora else "full"],
        weight_decay=sizes.weight_decay,
        steps=options.steps,
        epochs=options.epochs,
        sequence_length=sizes.sequence_length,
        width=sizes.width,
        lora=lora,
        evaluation_batches=sizes.evaluation_batches,
        checkpoint_every=sizes.checkpoint_every,
    )


def _llama(options: CommandOptions, machine: Machine, configurations: list[str], strategy: str, notes: list[str]) -> str:
    """Return the name or the folder of the Llama weights.

    If --model_id is given, it names the weights. Otherwise, the weights in the mirror or the cache are used. If neither contains
    weights, the result names random weights of the first configuration that fits into the memory.
    """
    if options.model_id is not None:
        return options.model_id
    folder = local_llama(options.data_source or "auto")
    if folder is not None:
        notes.append(f"LLAMA  real weights from {folder.resolve()}")
        return str(folder.resolve())
    method, sharers = (LORA if options.lora else FULL), machine.ranks if strategy == "fsdp" else 1

    def fits(name: str) -> bool:
        # The instruction rows are tokenized with the tokenizer of GPT-2.
        state = state_bytes(random_llama_shape(name, GPT2_VOCABULARY), method, "fp32")
        return state / sharers < not_none(machine.device.memory_bytes) / 2  # the other half is for activations and logits

    name = next(filter(fits, configurations), configurations[-1])
    notes.append(
        f"LLAMA  RANDOM WEIGHTS: {name}. The mirror and the cache have no folder llama/, and --model_id is not given. Times and "
        "memory are the same as for pretrained weights of this shape. The loss is not comparable to that of a pretrained Llama."
    )
    return name


def _require_possible(recipe: Recipe, machine: Machine) -> None:
    """Raise an error if this machine or the weights do not allow the training run."""
    choose_precision(machine.device, recipe.precision)
    if recipe.batch_size % machine.ranks:
        raise refused(
            f"{machine.ranks} ranks do not divide a batch of {recipe.batch_size}",
            f"set --batch_size to a multiple of {machine.ranks}, or start another number of ranks",
        )
    if recipe.task == "llama":
        require_llama(recipe.model)


def _results(options: CommandOptions) -> Path:
    """Return the folder of all runs. Raise an error if the folder cannot be created or written."""
    folder = results_folder() if options.base_dir is None else Path(options.base_dir) / "results"
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise OptionError(
            f"{folder} cannot be written",
            where=existing,
            next_step="make the folder writable, or use another folder with --base_dir",
        )
    return folder


def _run_folder(name: str, results: Path) -> Path:
    folder = results / name
    return folder.resolve() if is_run(folder) else find_run(name)


def _command(run: Path) -> dict:
    """Return the entry "command" of a run's run.json.

    Raises:
        HyperionError: this command did not start the run, or the run contains no training run of this command.
    """
    command = Run.open(run).information().get("command")
    if command is None or not command["recipes"]:
        raise OptionError(
            f"the run has no training of {COMMAND}.py", where=run, next_step="use another run, or leave --resume out"
        )
    return command


def _resumed(options: CommandOptions, run: Path) -> CommandOptions:
    """Return the options with which the run was started.

    Raises:
        HyperionError: an option that is given now has another value.
    """
    began = CommandOptions(**_command(run)["options"])
    for name in (field.name for field in fields(CommandOptions) if field.name != "run"):
        now, then = getattr(options, name), getattr(began, name)
        if now is not None and now is not False and now != then:  # 0 is a value, although it equals False
            before = "without this option" if then is None or then is False else f"with {then}"
            raise OptionError(
                f"--{name} {now} is given now, but the run was started {before}",
                where=run,
                next_step=f"leave --{name} out, or leave --resume out for a new run",
            )
    return began


def refused(what: str, next_step: str) -> OptionError:
    return OptionError(what, where=f"options of {COMMAND}.py", next_step=next_step)
