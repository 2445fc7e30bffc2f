"""The options of run_distributed.py: read them, check them against each other and this machine, and make recipes of them."""

import os
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from hyperion.chapter.profiles import default_profile, lineage
from hyperion.commands.console import UsageError, one_of
from hyperion.data.store.sources import SOURCES
from hyperion.errors import HyperionError, not_none, require_seed
from hyperion.hardware import Device
from hyperion.models import local_llama, random_llama_shape
from hyperion.paths import expanded, results_folder
from hyperion.results import Run, find_run
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
_GPT2_VOCABULARY = 50257  # the instruction rows are tokenized with the tokenizer of GPT-2
_SIZES = Path(__file__).with_name("distributed_sizes.toml")


class OptionError(HyperionError):
    """Options that mean nothing, contradict each other, or ask for what this machine cannot do."""


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise typer.BadParameter(f"{text!r} is no whole number above 0")
    return value


def _folder(text: str) -> str:
    path = expanded(text).resolve()
    if not path.is_dir():
        raise typer.BadParameter(f"{text!r} is no folder: make it, or name another")
    return str(path)


def _existing(text: str) -> str:
    """Return a folder's absolute path, and any other name unchanged."""
    path = expanded(text)
    return str(path.resolve()) if path.is_dir() else text


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options of the command; None (False for lora) where they were not given. JSON-able.

    Typer makes the command line from the fields. `base_dir` is an absolute path.
    """

    model: Annotated[
        str | None,
        typer.Option(
            callback=one_of(MODELS),
            help=f"What to train: {', '.join(MODELS)}. `all`: the first four in one launch; `scaling`: chapter 2.8 on 1, 2, 4 … "
            "devices.",
            show_default=TRAININGS[0],
        ),
    ] = None
    epochs: Annotated[int | None, typer.Option(parser=_count, help="Passes over the data.", show_default=str(EPOCHS))] = None
    steps: Annotated[int | None, typer.Option(parser=_count, help="Optimizer steps instead of epochs.")] = None
    base_dir: Annotated[
        str | None,
        typer.Option(
            "--base_dir", parser=_folder, help="Folder of results/.", show_default="the repository, or HYPERION_RESULTS"
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch_size", parser=_count, help="Examples of a step, of all ranks together.", show_default="by model and device"
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            callback=one_of(_PRECISIONS),
            help=f"{', '.join(_PRECISIONS)}. auto: bf16 where matrix units support it, else fp32.",
            show_default="auto",
        ),
    ] = None
    strategy: Annotated[
        str | None,
        typer.Option(callback=one_of(("ddp", "fsdp")), help="How the ranks share cifar (ddp) or llama (fsdp): ddp, fsdp."),
    ] = None
    lora: Annotated[bool, typer.Option("--lora", help=f"llama: train adapters of rank {RANK} on frozen weights.")] = False
    model_id: Annotated[
        str | None,
        typer.Option(
            "--model_id",
            parser=_existing,
            help="llama: a folder of weights, an id on the hub, or a random configuration.",
            show_default="the folder llama/ of the mirror or the cache, else random weights",
        ),
    ] = None
    scaling_gpus: Annotated[
        str | None,
        typer.Option("--scaling_gpus", help="scaling: numbers of devices, as 1,2,4.", show_default="1, 2, 4 … and all"),
    ] = None
    data_source: Annotated[
        str | None,
        typer.Option(
            "--data_source",
            callback=one_of(SOURCES),
            help=f"{', '.join(SOURCES)}. auto: the first of mirror, cache, download and, on a CPU, synthetic.",
            show_default="auto",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers.", show_default="0")] = None
    # torchrun reads --run as an abbreviation of its own --run-path, even after the program's name.
    run: Annotated[
        str | None,
        typer.Option(
            "--resume",
            "--run",
            help="Continue this run: its folder, or its name under results/; other options need no repeating. Under torchrun, "
            "only --resume works.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that the command runs on.

    Args:
        device: the device of this process.
        devices: number of devices of the machine; on a CPU, number of ranks that share it.
        ranks: number of ranks that train together.
        launched: whether torchrun started this process as one of them.
    """

    device: Device
    devices: int
    ranks: int
    launched: bool


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A checked request.

    Args:
        options: the options with all defaults.
        recipes: the trainings; none for scaling.
        counts: numbers of devices, for scaling.
        results: folder of all runs.
        run: the run to resume, if any.
        notes: lines to print before the start.
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
        OptionError: an unknown option or a bad value. It is not printed here: one rank of many shall print it.
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
    """Return the request that the options describe, the same on every rank.

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
                "--model scaling under torchrun: it makes one launch for each number of devices",
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
    """What was not said, said."""
    defaults = {"model": TRAININGS[0], "precision": "auto", "data_source": "auto", "seed": 0}
    if options.model != SCALING and options.steps is None:
        defaults["epochs"] = EPOCHS
    return replace(options, **{name: value for name, value in defaults.items() if getattr(options, name) is None})


def require_sense(options: CommandOptions) -> None:
    """Refuse what contradicts itself, whatever the machine.

    Raises:
        OptionError: names the option, and the remedy.
        HyperionError: the seed is out of range.
    """
    require_seed(0 if options.seed is None else options.seed)
    model = options.model
    trains_llama = model in ("llama", ALL)
    if options.lora and not trains_llama:
        raise refused(f"--lora with --model {model}: adapters are for the Llama", "add --model llama, or leave --lora out")
    if options.model_id is not None and not trains_llama:
        raise refused(
            f"--model_id {options.model_id} with --model {model}: it names the weights of a Llama",
            "add --model llama, or leave it out",
        )
    own = LANGUAGE.get(model or "")
    if options.strategy is not None and own not in (None, options.strategy):
        raise refused(
            f"--strategy {options.strategy} contradicts --model {model}",
            f"name --model language_{options.strategy}, and leave --strategy out",
        )
    if options.scaling_gpus is not None and model != SCALING:
        raise refused(
            f"--scaling_gpus with --model {model}: a training runs on the ranks that torchrun starts",
            "add --model scaling, or start torchrun with --nproc_per_node",
        )
    if options.epochs is not None and options.steps is not None:
        raise refused("--epochs and --steps together", "give one of them: --steps is for a short try")
    if model == SCALING:
        said = [name for name in _OF_TRAININGS if getattr(options, name) not in (None, False)]
        if said:
            raise refused(
                f"--{said[0]} with --model scaling: it times steps of fixed work, whose sizes the profile says",
                f"leave --{said[0]} out",
            )


def _counts(text: str | None, machine: Machine) -> tuple[int, ...]:
    """Return the numbers of devices in order: those given, or 1, 2, 4, … and all."""
    if text is None:
        powers = [1 << power for power in range(machine.devices.bit_length()) if 1 << power <= machine.devices]
        return tuple(dict.fromkeys([*powers, machine.devices]))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise refused(f"--scaling_gpus {text!r} is no list of numbers above 0", "write it as 1,2,4")
    counts = sorted({int(part) for part in parts})
    if counts[-1] > machine.devices:
        raise refused(
            f"--scaling_gpus {text}: this machine has {machine.devices} devices"
            + (" (ranks that share the CPU)" if machine.device.kind == "cpu" else ""),
            f"name at most {machine.devices}",
        )
    return tuple(counts)


def training_sizes(profile: str, task: str) -> dict:
    """Return the sizes of a task in a profile, with those of the profile's ancestors.

    Args:
        profile: name of a profile.
        task: "language", "images" or "llama".
    """
    by_profile, sizes = tomllib.loads(_SIZES.read_text(encoding="utf-8")), {}
    for ancestor in lineage(profile):
        sizes |= by_profile.get(ancestor, {}).get(task, {})
    return sizes


def _recipe(name: str, options: CommandOptions, machine: Machine, notes: list[str]) -> Recipe:
    """Return one training: the sizes of the profile, changed by the options."""
    task: Task = "language" if name in LANGUAGE else "images" if name == "cifar" else "llama"
    sizes = training_sizes(default_profile(machine.device.kind), task)
    strategy = cast(Strategy, LANGUAGE.get(name) or options.strategy or _STRATEGY[name])
    if task == "llama":
        rates = sizes.pop("learning_rates")
        sizes["learning_rate"] = rates["lora" if options.lora else "full"]
        sizes["model"] = _llama(options, machine, sizes.pop("models"), strategy, notes)
    batch = sizes.pop("batch_size")
    if options.batch_size is None and batch % machine.ranks:
        rounded = -(-batch // machine.ranks) * machine.ranks
        notes.append(f"{name}: a batch of {rounded} in the place of {batch}, which {machine.ranks} ranks do not divide")
        batch = rounded
    return Recipe(
        task=task,
        strategy=strategy,
        precision=options.precision or "auto",
        batch_size=options.batch_size or batch,
        steps=options.steps,
        epochs=options.epochs,
        lora=options.lora and task == "llama",
        **sizes,
    )


def _llama(options: CommandOptions, machine: Machine, configurations: list[str], strategy: str, notes: list[str]) -> str:
    """Return name or folder of the weights: those asked for, those of the mirror or cache, or random ones that fit."""
    if options.model_id is not None:
        return options.model_id
    folder = local_llama(options.data_source or "auto")
    if folder is not None:
        notes.append(f"LLAMA  real weights from {folder.resolve()}")
        return str(folder.resolve())
    method, sharers = (LORA if options.lora else FULL), machine.ranks if strategy == "fsdp" else 1

    def fits(name: str) -> bool:
        state = state_bytes(random_llama_shape(name, _GPT2_VOCABULARY), method, "fp32")
        return state / sharers < not_none(machine.device.memory_bytes) / 2  # the other half is for activations and logits

    name = next(filter(fits, configurations), configurations[-1])
    notes.append(
        f"LLAMA  RANDOM WEIGHTS: {name}. The mirror and the cache have no folder llama/, and no --model_id names weights. "
        "Times and memory are those of a Llama of this shape; the loss says nothing about a pretrained one."
    )
    return name


def _require_possible(recipe: Recipe, machine: Machine) -> None:
    """Raise if this machine or the weights do not allow the training."""
    choose_precision(machine.device, recipe.precision)
    if recipe.batch_size % machine.ranks:
        raise refused(
            f"{machine.ranks} ranks do not divide a batch of {recipe.batch_size}",
            f"give --batch_size a multiple of {machine.ranks}, or start another number of ranks",
        )
    if recipe.task == "llama":
        require_llama(recipe.model)


def _results(options: CommandOptions) -> Path:
    """Return the folder of all runs. Raise if it cannot be created or written."""
    folder = results_folder() if options.base_dir is None else Path(options.base_dir) / "results"
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise OptionError(
            f"{folder} cannot be written", where=existing, next_step="make it writable, or name another with --base_dir"
        )
    return folder


def _run_folder(name: str, results: Path) -> Path:
    folder = results / name
    return folder.resolve() if (folder / "run.json").is_file() else find_run(name)


def _command(run: Path) -> dict:
    """Return the entry "command" of a run's run.json.

    Raises:
        HyperionError: this command did not start the run, or trains nothing in it.
    """
    command = Run.open(run).information().get("command")
    if command is None or not command["recipes"]:
        raise OptionError(
            f"the run has no training of {COMMAND}.py", where=run, next_step="name a run that has one, or leave --resume out"
        )
    return command


def _resumed(options: CommandOptions, run: Path) -> CommandOptions:
    """Return the options that a run was started with.

    Raises:
        HyperionError: an option given now differs.
    """
    began = CommandOptions(**_command(run)["options"])
    for name in (field.name for field in fields(CommandOptions) if field.name != "run"):
        now, then = getattr(options, name), getattr(began, name)
        if now not in (None, False) and now != then:
            raise OptionError(
                f"--{name} {now}, and the run was started " + (f"with {then}" if then else "without"),
                where=run,
                next_step=f"leave --{name} out, or leave --resume out for a new run",
            )
    return began


def refused(what: str, next_step: str) -> OptionError:
    return OptionError(what, where=f"options of {COMMAND}.py", next_step=next_step)
