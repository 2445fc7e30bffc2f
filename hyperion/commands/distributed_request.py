"""What run_distributed.py is asked for, held against this machine, and made into recipes."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from hyperion.chapter.profiles import Profile, default_profile, load_profile
from hyperion.commands.distributed_options import (
    ALL,
    COMMAND,
    LANGUAGE,
    SCALING,
    TRAININGS,
    OptionError,
    Options,
    refused,
    require_sense,
    with_defaults,
)
from hyperion.experiments.llama.llama_rows import FULL, LORA, state_bytes
from hyperion.hardware import Device
from hyperion.models import local_llama, random_llama_shape
from hyperion.paths import results_folder
from hyperion.results import Run, find_run
from hyperion.training import choose_precision
from hyperion.workloads.llama_setup import require_llama
from hyperion.workloads.recipes import Recipe

_STRATEGY = {"cifar": "ddp", "llama": "fsdp"}
_USUAL_VOCABULARY = 50257  # GPT-2's, which the instruction rows are tokenized with


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What options are held against.

    Args:
        device: this process's.
        devices: how many this machine has; on a CPU, ranks that share it.
        ranks: how many train together.
        launched: torchrun started this process as one of them.
    """

    device: Device
    devices: int
    ranks: int
    launched: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options that can be met.

    Args:
        options: with the defaults in the place of what was not said.
        recipes: one a training; none for scaling.
        counts: numbers of devices, for scaling.
        results: the folder of all runs.
        run: the run to be continued, if any.
        notes: what the reader must be told before anything begins.
    """

    options: Options
    recipes: tuple[Recipe, ...] = ()
    counts: tuple[int, ...] = ()
    results: Path
    run: Path | None = None
    notes: tuple[str, ...] = ()


def checked(options: Options, machine: Machine) -> Request:
    """What the options ask of this machine; every rank comes to the same.

    Raises:
        HyperionError: they contradict each other, or this machine, the data or the weights do not allow it.
    """
    results = _results(options)
    run = None if options.run is None else _run_folder(options.run, results)
    options = with_defaults(options) if run is None else _continued(options, run)
    require_sense(options)
    shared = {"options": options, "results": results, "run": run}
    choose_precision(machine.device, options.precision)
    if options.model == SCALING:
        _require_plain_process(options, machine)
        return Request(**shared, counts=_counts(options.scaling_gpus, machine))
    notes: list[str] = []
    if run is None:
        profile = load_profile(default_profile(machine.device.kind))
        names = TRAININGS if options.model == ALL else (options.model,)
        recipes = [_recipe(name, options, machine, profile, notes) for name in names]
    else:
        recipes = [Recipe(**settings) for settings in _command(run)["recipes"]]
    for recipe in recipes:
        _require_possible(recipe, machine)
    return Request(**shared, recipes=tuple(recipes), notes=tuple(notes))


def _require_plain_process(options: Options, machine: Machine) -> None:
    if machine.launched:
        counts = f" --scaling_gpus {options.scaling_gpus}" if options.scaling_gpus else ""
        raise refused(
            "--model scaling under torchrun: it starts a launch of its own for each number of devices",
            f"start it plainly: python phase2_development/{COMMAND}.py --model scaling{counts}",
        )


def _counts(text: str | None, machine: Machine) -> tuple[int, ...]:
    """Numbers of devices in order: those named, or 1, 2, 4, … and all."""
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


def _recipe(name: str, options: Options, machine: Machine, profile: Profile, notes: list[str]) -> Recipe:
    """One training: what the profile says of it, changed by the options."""
    task = "language" if name in LANGUAGE else "images" if name == "cifar" else "llama"
    sizes = dict(profile.sizes(COMMAND, task))
    strategy = LANGUAGE.get(name) or options.strategy or _STRATEGY[name]
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
        precision=options.precision,
        batch_size=options.batch_size or batch,
        steps=options.steps,
        epochs=options.epochs,
        lora=options.lora and task == "llama",
        **sizes,
    )


def _llama(options: Options, machine: Machine, configurations: list[str], strategy: str, notes: list[str]) -> str:
    """Name or folder of the weights: those asked for, those at hand, or random ones that fit the device."""
    if options.model_id is not None:
        return options.model_id
    folder = local_llama(options.data_source)
    if folder is not None:
        notes.append(f"LLAMA  real weights from {folder.resolve()}")
        return str(folder.resolve())
    method, sharers = (LORA if options.lora else FULL), machine.ranks if strategy == "fsdp" else 1

    def fits(name: str) -> bool:
        state = state_bytes(random_llama_shape(name, _USUAL_VOCABULARY), method, "fp32")
        return state / sharers < machine.device.memory_bytes / 2  # the other half is for activations and logits

    name = next(filter(fits, configurations), configurations[-1])
    notes.append(
        f"LLAMA  RANDOM WEIGHTS: {name}. The mirror and the cache have no folder llama/, and no --model_id names weights. "
        "Times and memory are those of such a Llama; what it learns says nothing about a pretrained one."
    )
    return name


def _require_possible(recipe: Recipe, machine: Machine) -> None:
    """Refuse what this machine or the weights do not allow."""
    choose_precision(machine.device, recipe.precision)
    if recipe.batch_size % machine.ranks:
        raise refused(
            f"{machine.ranks} ranks do not divide a batch of {recipe.batch_size}",
            f"give --batch_size a multiple of {machine.ranks}, or start another number of ranks",
        )
    if recipe.task == "llama":
        require_llama(recipe.model)


def _results(options: Options) -> Path:
    """The folder of all runs, which must be writable, or be one that can be made."""
    folder = results_folder() if options.base_dir is None else Path(options.base_dir) / "results"
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise OptionError(
            f"{folder} cannot be written", where=there, next_step="make it writable, or name another with --base_dir"
        )
    return folder


def _run_folder(name: str, results: Path) -> Path:
    folder = results / name
    return folder.resolve() if (folder / "run.json").is_file() else find_run(name)


def _command(run: Path) -> dict:
    """What a run's run.json says of the command that began it.

    Raises:
        HyperionError: it was no training of this command's.
    """
    command = Run.open(run).information().get("command")
    if command is None or not command["recipes"]:
        raise OptionError(
            f"no training of {COMMAND}.py began there", where=run, next_step="name a run that one began, or leave --resume out"
        )
    return command


def _continued(options: Options, run: Path) -> Options:
    """The options that a run was started with.

    Raises:
        HyperionError: an option says otherwise now.
    """
    began = Options(**_command(run)["options"])
    for name in (field.name for field in fields(Options) if field.name != "run"):
        now, then = getattr(options, name), getattr(began, name)
        if now not in (None, False) and now != then:
            raise OptionError(
                f"--{name} {now}, and the run was started " + (f"with {then}" if then else "without"),
                where=run,
                next_step=f"leave --{name} out, or leave --resume out for a new run",
            )
    return began
