"""Fixtures of all tests."""

import functools
import gc
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

_CHECKOUT = Path(__file__).resolve().parents[1]

# Tests share the cores with each other: OpenMP threads that spin while they wait would slow all of them several times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# There are as many workers as cores, and toy work gains nothing from a second thread. The workers of pytest inherit the second
# variable, which says that the user did not set the first.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "HYPERION_TESTS_SET_THREADS": "1"}

# Files that take longer than twenty seconds: a worker is not to begin them last.
_LONGEST = (
    "test_readme.py",
    "test_readme_variants.py",
    "test_readme_commands.py",
    "test_driver.py",
    "test_replay.py",
    "test_own_subject.py",
    "test_pages.py",
    "test_experiments.py",
    "test_bad_input.py",
    "test_distributed_command.py",
    "test_compare_trials.py",
    "test_chapter.py",
    "test_terminal.py",
    "test_hostile_runs.py",
    "test_run_figures.py",
    "test_commands.py",
    "test_quantization.py",
    "test_loop_on_ranks.py",
    "test_compat.py",
    "test_ranks.py",
    "test_loop.py",
    "test_group.py",
    "test_collective_check.py",
    "test_display.py",
    "test_headlines.py",
    "test_report.py",
    "test_collectives.py",
    "test_planted_faults.py",
    "test_trained_models.py",
    "test_activation_checkpointing.py",
    "test_memory_estimate.py",
    "test_variants.py",
    "test_launches.py",
    "test_runtimes.py",
    "test_collective_faults.py",
    "test_cuda_packages.py",
    "test_launch.py",
)


# The time of an example is no property of the code: the machine may be busy.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# Imports leave no garbage, and a search for it takes a fifth of the time of the collection.
gc.disable()


def pytest_collection_finish():
    """Collect garbage from here on, after 10,000 new objects instead of 700: most of the tests create few."""
    gc.set_threshold(10_000)
    gc.enable()


@functools.cache
def _uses_standing_ranks(path: Path) -> bool:
    return path.parent.name == "parallel" or any(name in path.read_text("utf-8") for name in ("standing_ranks", "ranks_stay"))


_STANDING_RANKS = pytest.StashKey()


def pytest_runtest_teardown(item, nextitem):
    """End the standing ranks after the last test that uses them.

    The threads of each gloo group that they have left wake up a hundred times a second. After 140 groups, the two ranks would
    take a quarter of a core until the session ends.
    """
    ranks = item.session.stash.get(_STANDING_RANKS, None)
    if ranks is not None and (nextitem is None or not _uses_standing_ranks(nextitem.path)):
        ranks.close()


def pytest_collection_modifyitems(items):
    """Files of the longest tests begin first, so that the workers end together."""
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: -1 if _uses_standing_ranks(item.path) else place.get(item.path.name, len(_LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give all files that use the standing ranks to one worker, because two ranks take 15 s of processor time to start."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "standing ranks" if _uses_standing_ranks(config.rootpath / file) else file

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def mirror() -> Path:
    """The folder of real data that HYPERION_DATA_MIRROR names; without one the test is skipped, in CI it fails."""
    named = os.environ.get("HYPERION_DATA_MIRROR")
    if not named:
        reason = "HYPERION_DATA_MIRROR is not set: no real WikiText-2, CIFAR-10 and GPT-2 tokenizer to test with"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return Path(named)


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """A function that serves a folder over HTTP and returns its address."""
    servers = []

    def start(folder: Path, handler: type = http.server.SimpleHTTPRequestHandler) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hyperion(monkeypatch, capsys):
    """The command in this process: a process of its own takes seconds to load PyTorch or pandas."""
    from hyperion.cli import main  # not above, so that a test of the installer loads no torch

    def call(*arguments: str, folder: Path = _CHECKOUT, **variables: str) -> subprocess.CompletedProcess:
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["hyperion", *arguments])
            for name, value in {"COLUMNS": "120", **variables}.items():
                patch.setenv(name, value)
            capsys.readouterr()
            code = main()
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Toy work gains nothing from threads, and on busy cores threads wait for each other."""
    import torch  # not above: it reads OMP_WAIT_POLICY when it is loaded

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def never_busy() -> Iterator[None]:
    """Let no measurement in this process be "busy": the tests run beside each other."""
    from hyperion.hardware import telemetry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "_BUSY_SHARE", 2.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_cache() -> Iterator[None]:
    """Give the CPU a last-level cache of 8 MiB in this process.

    A cold sample reads twice the last-level cache first. Servers report up to 260 MiB for a virtual machine of two cores; to read
    520 MiB takes 50 ms, a thousand times as long as the toy work that the tests time.
    """
    from hyperion.hardware import facts

    read = facts.read_cpu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "read_cpu", lambda: replace(read(), last_level_cache_bytes=8 << 20))
        yield


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> Iterator[None]:
    """Let the garbage collector pass by what earlier files have imported.

    Half a million objects of torch, sympy and pandas live until the session ends, and a collection that reads them takes 0.2 s.
    Experiments collect after each model that they train, one of them 60 times.
    """
    gc.collect()
    gc.freeze()
    yield


# Imports below stand in the functions, so that a test of the installer loads no torch.


@pytest.fixture(scope="session")
def standing_ranks(request):
    """Two ranks on the CPU that stay until the last test that uses them has ended."""
    from tests.standing_ranks import StandingRanks

    ranks = request.session.stash[_STANDING_RANKS] = StandingRanks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def ranks_stay(standing_ranks) -> Iterator[None]:
    """Let experiments run on the ranks that stay. On GPUs they start their own."""
    import torch

    from hyperion.chapter import variants

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(variants, "run_ranks", standing_ranks.run)
        yield


def _made_once(tmp_path_factory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that all workers of pytest share. The first one that needs it makes it."""
    from hyperion.locks import file_lock

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "made-once" / name
    folder.parent.mkdir(exist_ok=True)
    with file_lock(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            made = tmp_path_factory.mktemp("made") / name
            make(made)
            made.rename(folder)
    return folder


@pytest.fixture(scope="session")
def toy_models(tmp_path_factory) -> Path:
    """A data folder with the two trained toy models. Modules that use it take a copy."""
    import torch

    from hyperion.workloads.trained_models import trained_classifier, trained_language_model
    from tests.chapter.toy import toy_context

    def make(folder: Path) -> None:
        folder.mkdir()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HYPERION_DATA", str(folder / "data"))
            context = toy_context("toy", {}, folder)
            trained_language_model(context, "llama_toy")
            trained_classifier(context, "resnet18_toy")
        torch.set_num_threads(threads)

    return _made_once(tmp_path_factory, "toy-models", make) / "data"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A made-up GPU run on mirrored data. Tests that write take a copy."""
    from hyperion.results import Run
    from tests.book.made_up.run import made_up_run

    return Run.open(_made_once(tmp_path_factory, "20260101-120000-full", made_up_run))


@pytest.fixture(scope="session")
def cpu_run(tmp_path_factory):
    """A made-up run of a CPU that no data sheet knows, on synthetic data."""
    from hyperion.results import Run
    from tests.book.made_up.run import GPU, made_up_run

    environment = GPU | {"gpus": [], "cuda": None, "torch": "2.13.0+cpu"}
    unknown = {"peaks": {"fp64": None, "fp32": None, "bf16": None}, "bandwidth": None}

    def make(folder: Path) -> None:
        made_up_run(folder, source="synthetic", environment=environment, **unknown)

    return Run.open(_made_once(tmp_path_factory, "20260101-120000-smoke", make))


@pytest.fixture(scope="session")
def material(run):
    from hyperion.figures.material import Material

    return Material(run)


@pytest.fixture(scope="session")
def cpu_material(cpu_run):
    from hyperion.figures.material import Material

    return Material(cpu_run)
