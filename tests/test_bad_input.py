"""Bad input met the way a user meets it: the exit code, a message with place and next step, and nothing half-written."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyperion.chapter.context import Context
from hyperion.chapter.variants import run_experiment, run_isolated
from hyperion.cli import main
from hyperion.processes import JobError
from hyperion.results import Run
from tests.reproduce.small_book import recording, write_notebook

LIBRARY = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    """A small checkout with one chapter that records one row."""
    root = tmp_path / "checkout"
    write_notebook(root / "phase1_hardware", "01_first", [recording("01_first")])
    (root / "pyproject.toml").write_text("")
    return root


@pytest.fixture
def hyperion(checkout, tmp_path):
    """The command in the small checkout, with results, data and variables of its own, and no network."""

    def call(*arguments: str, **variables: object) -> subprocess.CompletedProcess:
        ours = [name for name in os.environ if name.startswith("HYPERION_")]
        clean = {name: value for name, value in os.environ.items() if name not in ours}
        environment = clean | {"PYTHONPATH": str(LIBRARY), "OMP_NUM_THREADS": "1", "HYPERION_OFFLINE": "1"}
        environment |= {"HYPERION_DATA": str(tmp_path / "data"), "HYPERION_RESULTS": str(tmp_path / "results")}
        environment |= {name: str(value) for name, value in variables.items()}
        return subprocess.run(
            [sys.executable, "-m", "hyperion", *arguments],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return call


@pytest.fixture
def in_this_process(checkout, tmp_path, monkeypatch, capsys):
    """As `hyperion`, without the seconds that a process takes to load torch or pandas."""

    def call(*arguments: str, **variables: object) -> subprocess.CompletedProcess:
        for name in [name for name in os.environ if name.startswith("HYPERION_")]:
            monkeypatch.delenv(name)
        ours = {"HYPERION_OFFLINE": "1", "HYPERION_DATA": tmp_path / "data", "HYPERION_RESULTS": tmp_path / "results"}
        for name, value in {**ours, **variables}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(checkout)
        monkeypatch.setattr(sys, "argv", ["hyperion", *arguments])
        capsys.readouterr()
        code = main()
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return call


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a tmpfs, of 1 MiB by default; skips where the system does not let us."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options: str = "size=1m") -> Path:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("mounting a tmpfs needs root")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this machine forbids mounting a tmpfs: {done.stderr.strip()}")
        return place

    yield mount
    if os.path.ismount(place):
        subprocess.run(["umount", place], check=True)


def check_refusal(done: subprocess.CompletedProcess, code: int, *parts: object) -> None:
    """The exit code is `code`, every part is in the message, a next step too, and no traceback anywhere."""
    text = done.stdout + done.stderr
    assert done.returncode == code, text
    for part in (*parts, "next:"):
        assert str(part) in text, text
    assert "Traceback" not in text, text


def nothing_half_written(folder: Path) -> None:
    """No temporary file below `folder`, and every run in it is whole."""
    assert [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".part", ".pending"))] == []
    for run in [path for path in folder.glob("*") if path.is_dir() and not path.is_symlink()]:
        Run.open(run).verify()


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.process
@pytest.mark.parametrize(("command", "code"), [("reproduce", 2), ("fetch", 1)])
def test_a_mirror_that_is_not_there(hyperion, tmp_path, command, code):
    nowhere = tmp_path / "nowhere"
    check_refusal(hyperion(command, HYPERION_DATA_MIRROR=nowhere), code, "HYPERION_DATA_MIRROR", nowhere)
    assert not (tmp_path / "results").exists() and not (tmp_path / "data").exists()


@pytest.mark.process
def test_an_unknown_profile(in_this_process, tmp_path):
    """The profile is looked up in the process that examines the machine."""
    check_refusal(in_this_process("reproduce", "--profile", "huge"), 2, "'huge'", "smoke")
    assert not (tmp_path / "results").exists()


class Payload:
    """Unpickled by Python itself, it makes a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def bad_mirror(root: Path, fault: str) -> Path:
    """A mirror whose `fault` is in the file that is returned."""
    name = {
        "truncated .bin": "cifar-10-batches-bin/data_batch_1.bin",
        "records of CIFAR-100": "cifar-10-batches-bin/data_batch_1.bin",
        "text in Latin-1": "wikitext-2/wiki.train.tokens",
        "text in UTF-16": "wikitext-2/wiki.train.tokens",
        "pickle that runs code": "cifar-10-batches-py/data_batch_1",
    }[fault]
    content = {
        "truncated .bin": bytes(3073 * 5 - 100),
        "records of CIFAR-100": bytes(3074 * 5),
        "text in Latin-1": " = Café = \n".encode("latin-1"),
        "text in UTF-16": " = Café = \n".encode("utf-16"),
        "pickle that runs code": pickle.dumps(Payload(root / "it ran"), protocol=2),
    }[fault]
    (root / name).parent.mkdir(parents=True)
    (root / name).write_bytes(content)
    return root / name


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("truncated .bin", "15265 bytes are 4 records of 3073 bytes and 2973 extra bytes"),
        ("records of CIFAR-100", "15370 bytes are 5 records of 3073 bytes and 5 extra bytes"),
        ("text in Latin-1", "not UTF-8: byte 0xe9 at offset 6"),
        ("text in UTF-16", "not UTF-8: byte 0xff at offset 0"),
        ("pickle that runs code", "mkdir, which no CIFAR-10 batch needs; nothing was executed"),
    ],
)
def test_bad_files_are_not_staged(in_this_process, tmp_path, fault, words):
    file = bad_mirror(tmp_path / "mirror", fault)
    check_refusal(in_this_process("fetch", HYPERION_DATA_MIRROR=tmp_path / "mirror"), 1, words, file)
    assert contents(tmp_path / "data") == {}
    assert not (tmp_path / "mirror" / "it ran").exists()


@pytest.mark.process
@pytest.mark.book
@pytest.mark.long
def test_a_notebook_that_meets_a_bad_file_says_so_in_the_same_words(hyperion, checkout, tmp_path):
    file = bad_mirror(tmp_path / "mirror", "pickle that runs code")
    cell = "from hyperion.data import load_cifar10\nload_cifar10(data_source)"
    write_notebook(checkout / "phase1_hardware", "01_first", [cell])
    done = hyperion("reproduce", HYPERION_DATA_MIRROR=tmp_path / "mirror")
    check_refusal(done, 1, "01_first.ipynb, cell In [3]: DataError: the pickle refers to", file)
    assert "----> " not in done.stdout
    assert not (tmp_path / "mirror" / "it ran").exists()
    nothing_half_written(tmp_path / "results")


@pytest.mark.process
@pytest.mark.book
def test_a_file_where_the_results_folder_should_be(hyperion, tmp_path):
    place = tmp_path / "in the way"
    place.write_text("mine")
    check_refusal(hyperion("reproduce", HYPERION_RESULTS=place), 2, "cannot write", place, "HYPERION_RESULTS=")
    assert place.read_text() == "mine"


@pytest.mark.process
@pytest.mark.book
def test_a_results_folder_that_cannot_be_written(hyperion, small_disk):
    place = small_disk("ro")
    check_refusal(hyperion("reproduce", HYPERION_RESULTS=place), 2, "not writable", place, "HYPERION_RESULTS=")
    assert list(place.iterdir()) == []


@pytest.mark.process
@pytest.mark.book
def test_a_disk_that_is_full_before_the_first_row(hyperion, small_disk):
    place = small_disk()
    filler = place / "filler"
    filler.write_bytes(bytes(2**20))
    check_refusal(hyperion("reproduce", HYPERION_RESULTS=place), 2, "disk is full", place)
    assert list(place.iterdir()) == [filler]


LARGE = """
import numpy as np, pandas as pd
from hyperion.results import Row, Run
row = Row(notebook="01_first", experiment="large", variant="v", metric="count", value=1.0)
samples = pd.DataFrame({"x": np.random.default_rng(0).random(2**19)})
Run.open(output).record("01_first", "large", [row], samples, input_hash="h")
"""


@pytest.mark.process
@pytest.mark.book
@pytest.mark.long
def test_a_disk_that_fills_up_under_a_notebook(hyperion, checkout, small_disk):
    place = small_disk("size=6m")
    (place / "filler").write_bytes(bytes(3 * 2**20))
    produces = ["counting", "large"]
    write_notebook(checkout / "phase1_hardware", "01_first", [recording("01_first"), LARGE], produces=produces)
    check_refusal(hyperion("reproduce", HYPERION_RESULTS=place), 1, "StoreError: the disk is full", "01_first.large.parquet")
    nothing_half_written(place)
    (run,) = place.glob("*-smoke")
    assert [row.experiment for row in Run.open(run).rows()] == ["counting"]

    (place / "filler").unlink()
    done = hyperion("reproduce", HYPERION_RESULTS=place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row.experiment for row in Run.open(run).rows()] == ["counting", "large"]


@pytest.mark.process
@pytest.mark.book
def test_an_edited_result_is_never_built_upon(hyperion, tmp_path):
    assert hyperion("reproduce").returncode == 0
    (rows,) = tmp_path.glob("results/*-smoke/rows.csv")
    rows.write_text(rows.read_text().replace(",1.0,", ",2.0,"))
    before = contents(tmp_path / "results")
    check_refusal(hyperion("reproduce"), 2, "cannot be continued", rows, "RUN=new")
    assert contents(tmp_path / "results") == before


SIZES = {
    "width": 4,
    "batch_size": 16,
    "epochs": 2,
    "held_out_images": 20,
    "learning_rate": 0.1,
    "warmup_share": 0.2,
    "weight_decay": 5e-4,
    "label_smoothing": 0.0,
    "reaches": 0.0,
    "border": "black",
    "hole": 0,
    "precision": "fp32",
    "target": 0.5,
    "compiled": False,
    "evaluate_every": 1,
    "checkpoint_every": 5,
    "steady_time_limit_s": 0.1,
}


@pytest.mark.process
def test_corrupted_checkpoints_of_a_training_that_goes_on(tmp_path, monkeypatch, capsys, one_thread):
    """The last training runs in a process of its own, as in a chapter; the others run here, and load torch once."""
    monkeypatch.setenv("HYPERION_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = Context(
        notebook="02_core_framework",
        experiment="image_classifier",
        sizes=SIZES,
        data_source="synthetic",
        synthetic={"images": {"train": 100, "test": 20}},
        workspace=tmp_path / "workspace",
    )

    def train(run=run_experiment) -> list:
        result = run(context, lambda done, total, note: None)
        return [(row.key, row.value) for row in result.rows if row.metric in ("training_loss", "accuracy")]

    undisturbed = train()
    earlier, newest = sorted(context.workspace.glob("seed-0-fp32/step-*"))
    damaged = max(newest.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-8] + bytes(8))
    assert train() == undisturbed
    printed = "".join(capsys.readouterr())
    assert "WARNING: this checkpoint cannot be used" in printed and str(damaged) in printed

    for checkpoint in context.workspace.glob("seed-0-fp32/step-*"):
        (checkpoint / "manifest.json").write_text("{")
    before = contents(context.workspace)
    with pytest.raises(JobError, match="checkpoints can be used") as caught:
        train(run_isolated)
    assert str(earlier.parent) in str(caught.value) and "manifest.json" in str(caught.value.where)
    assert "remove this folder to train from the beginning" in caught.value.next_step
    assert "Traceback" not in str(caught.value) + capsys.readouterr().out
    assert contents(context.workspace) == before
