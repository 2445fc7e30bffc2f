"""The options of run_distributed.py: read, and held against each other."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from hyperion.commands.console import UsageError, one_of
from hyperion.data.store.sources import SOURCES
from hyperion.errors import HyperionError, require_seed
from hyperion.paths import expanded
from hyperion.workloads.fine_tuning import RANK

COMMAND = "run_distributed"
LANGUAGE = {"language_ddp": "ddp", "language_fsdp": "fsdp"}
TRAININGS = (*LANGUAGE, "cifar", "llama")
ALL, SCALING = "all", "scaling"
MODELS = (*TRAININGS, ALL, SCALING)
EPOCHS = 5
_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
_OF_TRAININGS = ("epochs", "steps", "batch_size", "strategy")


class OptionError(HyperionError):
    """Options that mean nothing, contradict each other, or ask for what this machine cannot do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; None (False for lora) where nothing was said. JSON-able.

    Args:
        base_dir, run: absolute paths.
        others: see `--help`.
    """

    model: str | None = None
    epochs: int | None = None
    steps: int | None = None
    base_dir: str | None = None
    batch_size: int | None = None
    precision: str | None = None
    strategy: str | None = None
    lora: bool = False
    model_id: str | None = None
    scaling_gpus: str | None = None
    data_source: str | None = None
    seed: int | None = None
    run: str | None = None


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


def parsed(given: Sequence[str] | None, description: str) -> Options:
    """Read a command line.

    Raises:
        OptionError: an unknown option or a bad value. It is not printed here: one rank of many shall print it.
        SystemExit: after `--help`.
    """
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help="\b\n" + description.replace("\n\n", "\n\n\b\n"))(_options)
    command = typer.main.get_command(app)
    try:
        with command.make_context(f"{COMMAND}.py", list(sys.argv[1:] if given is None else given)) as context:
            return command.invoke(context)
    except typer.Exit as ending:
        raise SystemExit(ending.exit_code) from None
    except UsageError as error:
        raise refused(error.format_message(), f"see {COMMAND}.py --help") from error


def _options(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            callback=one_of(MODELS),
            help=f"What to train: {', '.join(MODELS)}. `all`: the first four in one launch; `scaling`: chapter 2.8 on 1, 2, 4 … "
            "devices.",
            show_default=TRAININGS[0],
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", parser=_count, help="Passes over the data.", show_default=str(EPOCHS))
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", parser=_count, help="Optimizer steps instead of epochs.")] = None,
    base_dir: Annotated[
        str | None,
        typer.Option(
            "--base_dir", parser=_folder, help="Folder of results/.", show_default="the repository, or HYPERION_RESULTS"
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch_size", parser=_count, help="Examples of a step, of all ranks together.", show_default="by model and device"
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            callback=one_of(_PRECISIONS),
            help=f"{', '.join(_PRECISIONS)}. auto: bf16 where matrix units support it, else fp32.",
            show_default="auto",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", callback=one_of(("ddp", "fsdp")), help="How the ranks share cifar (ddp) or llama (fsdp): ddp, fsdp."
        ),
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help=f"llama: train adapters of rank {RANK} on frozen weights.")] = False,
    model_id: Annotated[
        str | None,
        typer.Option(
            "--model_id",
            parser=_existing,
            help="llama: a folder of weights, an id on the hub, or a random configuration.",
            show_default="the folder llama/ of the mirror or the cache, else random weights",
        ),
    ] = None,
    scaling_gpus: Annotated[
        str | None,
        typer.Option("--scaling_gpus", help="scaling: numbers of devices, as 1,2,4.", show_default="1, 2, 4 … and all"),
    ] = None,
    data_source: Annotated[
        str | None,
        typer.Option(
            "--data_source",
            callback=one_of(SOURCES),
            help=f"{', '.join(SOURCES)}. auto: the first of mirror, cache, download and, on a CPU, synthetic.",
            show_default="auto",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of all random numbers.", show_default="0")] = None,
    # torchrun reads --run as an abbreviation of its own --run-path, even after the program's name.
    run: Annotated[
        str | None,
        typer.Option(
            "--resume",
            "--run",
            help="Continue this run: its folder, or its name under results/; other options need no repeating. Under torchrun, "
            "only --resume works.",
        ),
    ] = None,
) -> Options:
    return Options(
        model=model,
        epochs=epochs,
        steps=steps,
        base_dir=base_dir,
        batch_size=batch_size,
        precision=precision,
        strategy=strategy,
        lora=lora,
        model_id=model_id,
        scaling_gpus=scaling_gpus,
        data_source=data_source,
        seed=seed,
        run=run,
    )


def with_defaults(options: Options) -> Options:
    """What was not said, said."""
    defaults = {"model": TRAININGS[0], "precision": "auto", "data_source": "auto", "seed": 0}
    if options.model != SCALING and options.steps is None:
        defaults["epochs"] = EPOCHS
    return replace(options, **{name: value for name, value in defaults.items() if getattr(options, name) is None})


def require_sense(options: Options) -> None:
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


def refused(what: str, next_step: str) -> OptionError:
    """An option's refusal."""
    return OptionError(what, where=f"options of {COMMAND}.py", next_step=next_step)
