"""Parse the options of run_distributed.py and check them for contradictions."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from hyperion.data.store.sources import SOURCES
from hyperion.errors import HyperionError, require_seed
from hyperion.paths import expanded
from hyperion.workloads.llama_setup import RANK

COMMAND = "run_distributed"
LANGUAGE = {"language_ddp": "ddp", "language_fsdp": "fsdp"}
TRAININGS = (*LANGUAGE, "cifar", "llama")
ALL, SCALING = "all", "scaling"
MODELS = (*TRAININGS, ALL, SCALING)
EPOCHS = 5
_PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
_OF_TRAININGS = ("epochs", "steps", "batch_size", "strategy")


class OptionError(HyperionError):
    """Options that have no effect, contradict each other, or that this machine cannot meet."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options as given; None (False for lora) where not given. JSON-able.

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


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors instead of printing them, because only one rank must print them."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(message, where=f"options of {COMMAND}.py", next_step=f"see {COMMAND}.py --help")


def parsed(given: Sequence[str] | None, description: str) -> Options:
    """Return the options of a command line.

    Raises:
        OptionError: an unknown option, or a value that it does not take.
    """
    parser = _Parser(prog=f"{COMMAND}.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    say = parser.add_argument
    say(
        "--model",
        choices=MODELS,
        help="what to train (language_ddp); `all`: the first four in one launch; `scaling`: chapter 2.8 on 1, 2, 4 … devices",
    )
    say("--epochs", type=_count, help=f"passes over the data ({EPOCHS})")
    say("--steps", type=_count, help="optimizer steps, in the place of epochs: for a short try")
    say("--base_dir", type=_folder, help="results/ is made in it (the repository, or what HYPERION_RESULTS says)")
    say("--batch_size", type=_count, help="examples of a step, of all ranks together (by model and device)")
    say("--precision", choices=_PRECISIONS, help="auto: bf16 where matrix units have it, else fp32")
    say("--strategy", choices=("ddp", "fsdp"), help="how the ranks share cifar (ddp) or llama (fsdp)")
    say("--lora", action="store_true", help=f"llama: train adapters of rank {RANK} on frozen weights")
    say(
        "--model_id",
        type=_existing,
        help="llama: a folder of weights, an id on the hub, or a random configuration (the "
        "folder llama/ of the mirror or the cache, else random weights)",
    )
    say("--scaling_gpus", help="scaling: numbers of devices, as 1,2,4 (1, 2, 4 … and all)")
    say("--data_source", choices=SOURCES, help="auto: the first of mirror, cache, download and, on a CPU, synthetic")
    say("--seed", type=int, help="seeds all that is drawn (0)")
    # torchrun takes --run for an abbreviation of its own --run-path, wherever it stands.
    say(
        "--resume",
        "--run",
        dest="run",
        help="go on with this run: its folder, or its name under results/; other options "
        "need no repeating. Under torchrun only --resume is understood",
    )
    return Options(**vars(parser.parse_args(given)))


def with_defaults(options: Options) -> Options:
    """Return the options with defaults for those that were not given."""
    defaults: dict[str, str | int] = {"model": TRAININGS[0], "precision": "auto", "data_source": "auto", "seed": 0}
    if options.model != SCALING and options.steps is None:
        defaults["epochs"] = EPOCHS
    return replace(options, **{name: value for name, value in defaults.items() if getattr(options, name) is None})


def require_sense(options: Options) -> None:
    """Raise if the options contradict each other, on any machine.

    Raises:
        OptionError: names the option and the next step.
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
    """Return the error of an option."""
    return OptionError(what, where=f"options of {COMMAND}.py", next_step=next_step)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return value


def _folder(text: str) -> str:
    path = expanded(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder: make it, or name another")
    return str(path)


def _existing(text: str) -> str:
    """Return the absolute path of a folder, any other name unchanged."""
    path = expanded(text)
    return str(path.resolve()) if path.is_dir() else text
