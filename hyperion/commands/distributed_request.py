"""Check the options of run_distributed.py against this machine and turn them into recipes."""

import functools
import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from hyperion.chapter.profiles import default_profile, lineage
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
from hyperion.errors import not_none
from hyperion.hardware import Device
from hyperion.models import local_llama, random_llama_shape
from hyperion.paths import results_folder
from hyperion.results import Run, find_run
from hyperion.training import choose_precision
from hyperion.workloads.fine_tuning import FULL, LORA, require_llama, state_bytes
from hyperion.workloads.recipes import Recipe, Strategy, Task

_STRATEGY = {"cifar": "ddp", "llama": "fsdp"}
_GPT2_VOCABULARY = 50257  # the instruction rows are tokenized with the tokenizer of GPT-2
_SIZES = Path(__file__).with_name("distributed_sizes.toml")


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
class Request:
    """A checked request.

    Args:
        options: the options with all defaults.
        recipes: the trainings; none for scaling.
        counts: numbers of devices, for scaling.
        results: folder of all runs.
        run: the run to resume, if any.
        notes: lines to print before the start.
    """

    options: Options
    recipes: tuple[Recipe, ...] = ()
    counts: tuple[int, ...] = ()
    results: Path
    run: Path | None = None
    notes: tuple[str, ...] = ()


def checked(options: Options, machine: Machine) -> Request:
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
        _require_plain_process(options, machine)
        counts = _counts(options.scaling_gpus, machine)
        return Request(options=options, results=results, run=run, counts=counts)
    notes: list[str] = []
    if run is None:
        names = TRAININGS if options.model == ALL else (options.model or TRAININGS[0],)
        recipes = [_recipe(name, options, machine, notes) for name in names]
    else:
        recipes = [Recipe(**settings) for settings in _command(run)["recipes"]]
    for recipe in recipes:
        _require_possible(recipe, machine)
    return Request(options=options, results=results, run=run, recipes=tuple(recipes), notes=tuple(notes))


def _require_plain_process(options: Options, machine: Machine) -> None:
    if machine.launched:
        counts = f" --scaling_gpus {options.scaling_gpus}" if options.scaling_gpus else ""
        raise refused(
            "--model scaling under torchrun: it makes one launch for each number of devices",
            f"start it without torchrun: python phase2_development/{COMMAND}.py --model scaling{counts}",
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
    sizes: dict = {}
    for ancestor in lineage(profile):
        sizes |= _all_sizes().get(ancestor, {}).get(task, {})
    return sizes


@functools.cache
def _all_sizes() -> dict[str, dict[str, dict]]:
    return tomllib.loads(_SIZES.read_text(encoding="utf-8"))


def _recipe(name: str, options: Options, machine: Machine, notes: list[str]) -> Recipe:
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


def _llama(options: Options, machine: Machine, configurations: list[str], strategy: str, notes: list[str]) -> str:
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


def _results(options: Options) -> Path:
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


def _resumed(options: Options, run: Path) -> Options:
    """Return the options that a run was started with.

    Raises:
        HyperionError: an option given now differs.
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
