"""Stage everything while there is a network: `make fetch`."""

from collections.abc import Callable
from typing import NamedTuple

from hyperion.data.images.cifar10 import URL, stage_cifar10
from hyperion.data.instructions.instructions import URL as INSTRUCTIONS_URL
from hyperion.data.instructions.instructions import stage_instructions
from hyperion.data.store.faults import DataError
from hyperion.data.text.tokenizer import stage_tokenizer
from hyperion.data.text.wikitext2 import stage_wikitext2


class Report(NamedTuple):
    """What became of one thing: `status` is 'ok' or 'failed', `detail` how or why."""

    name: str
    status: str
    detail: str


def fetch_all(cifar10_url: str = URL, instructions_url: str = INSTRUCTIONS_URL) -> list[Report]:
    """Stage all data and the tokenizer in the cache; afterwards the source 'cache' serves them without any connection.

    What is there already is verified, the rest is copied from the mirror where one is named, else downloaded. A failure
    does not stop the others.
    """
    return [
        _report("wikitext-2", stage_wikitext2),
        _report("gpt2 tokenizer", stage_tokenizer),
        _report("cifar-10", lambda: stage_cifar10(cifar10_url)),
        _report("instructions", lambda: stage_instructions(instructions_url)),
    ]


def _report(name: str, action: Callable[[], str]) -> Report:
    try:
        return Report(name, "ok", action())
    except DataError as error:
        return Report(name, "failed", str(error))
