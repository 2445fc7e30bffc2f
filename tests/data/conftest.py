"""A data folder for every test, hosts that answer, refuse or keep silent, and a full-size CIFAR-10 archive."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hyperion.data.store import sources
from tests.data.cifar10_files import LABELS_SHA256, numbered_pictures, write_layout


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> Path:
    """HYPERION_DATA for this test alone: no mirror, an empty cache, a hub that refuses."""
    for name in ("HYPERION_DATA_MIRROR", "HYPERION_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_ENDPOINT", refused)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    sources._print_framed.cache_clear()  # each source is printed once in a process
    return tmp_path / "data"


@pytest.fixture
def refused() -> Iterator[str]:
    """Address of a port that is taken but does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[tuple[str, list]]:
    """Address of a host that accepts and never answers, and the connections it has accepted so far."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    accepted.append(server.accept()[0])
                except OSError:
                    return  # the test is over

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", accepted
        server.shutdown(socket.SHUT_RDWR)
    for connection in accepted:
        connection.close()


@pytest.fixture(scope="session")
def flat_layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive of CIFAR-10's full size and true channel means whose pictures are one colour, each with
    its number in three pixels."""
    root = tmp_path_factory.mktemp("flat")
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    batches = {name: (numbered_pictures(10_000, place), np.arange(10_000) % 10) for place, name in enumerate(names)}
    write_layout(root, "cifar-10-python.tar.gz", batches)
    return root


@pytest.fixture
def labels_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels 0 to 9 in turn are taken for CIFAR-10's: the real ones are in no file of this repository."""
    monkeypatch.setattr("hyperion.data.images.cifar10.LABELS_SHA256", LABELS_SHA256)
