"""Notebooks side by side: who gets what of a machine, in which order, and how all of them end."""

import io
import json
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from hyperion.processes.child_process import CORES, has_ended
from hyperion.reproduce import Request, reproduce
from hyperion.reproduce.lanes import Lanes, Place, places_of
from hyperion.reproduce.notebooks import Notebook
from hyperion.results import Run
from tests.reproduce.small_book import TWO_DEVICES, recording, start_driver, write_notebook

MASKS = [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]

# Comes, says what it was given, and waits for the other.
MEETING = """
import os, time
from pathlib import Path
me, other = Path({me!r}), Path({other!r})
me.write_text(" ".join([os.environ.get("CUDA_VISIBLE_DEVICES", "all"), *map(str, sorted(os.sched_getaffinity(0)))]))
deadline = time.monotonic() + 60
while not other.exists():
    assert time.monotonic() < deadline, "nobody came"
    time.sleep(0.02)
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty checkout that is the working folder, on an idle machine."""
    monkeypatch.setattr("hyperion.reproduce.driver.waiting_threads", lambda: 0.0)
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("HYPERION_RESULTS", "HYPERION_DATA_MIRROR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def call(**request) -> tuple[int, str]:
    text = io.StringIO()
    return reproduce(Request(**request), machine=TWO_DEVICES, console=Console(file=text, width=160)), text.getvalue()


def the_run(root) -> Run:
    (folder,) = [path.parent for path in root.glob("results/2*/run.json")]
    return Run.open(folder)


def a_notebook(stem: str, devices: str, seconds: float = 1.0) -> Notebook:
    return Notebook(Path(f"{stem}.ipynb"), (), (), (), {"smoke": seconds}, (), devices)


def test_each_place_has_a_device_and_its_part_of_the_cores(tmp_path):
    assert places_of(MASKS, {4, 0, 1, 2, 3}, tmp_path) == [
        Place(0, MASKS[0] | {CORES: "0,1"}),
        Place(1, MASKS[1] | {CORES: "2,3"}),
    ]
    assert places_of(MASKS, {3}) == places_of(MASKS[:1], {0, 1}) == places_of([], {0, 1}) == [Place(0)]


def test_the_threads_of_one_core_are_not_parted(tmp_path):
    for number in range(4):  # 0 and 2 are threads of one core, 1 and 3 of another
        topology = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{number % 2}\n")
    assert [place.environment[CORES] for place in places_of(MASKS, set(range(4)), tmp_path)] == ["0,2", "1,3"]


def test_the_longest_go_first_and_what_needs_all_devices_runs_alone():
    short, long, every = a_notebook("short", "one", 1), a_notebook("long", "one", 9), a_notebook("every", "all", 99)
    lanes, ended = Lanes(MASKS), []

    def pick(ready):
        return lanes.pick(ready, lambda notebook: notebook.budget_s("smoke"))

    def hold(place, interruption):
        return ended.append(place.number)

    assert pick([every, short, long]) is long and pick([every]) is every and pick([]) is None
    assert lanes.lasting_s([every, short, long], {"every": 99.0, "short": 1.0, "long": 9.0}) == 108.0
    upon = Notebook(Path("upon.ipynb"), ("short",), ("long",), (), {}, (), "one")
    assert lanes.lasting_s([short, long, upon], {"short": 1.0, "long": 9.0, "upon": 2.0}) == 11.0  # no packing helps
    lanes.start(long, hold)
    assert pick([every]) is None and pick([every, short]) is short
    lanes.start(short, hold)
    assert pick([every, a_notebook("third", "one")]) is None
    assert {lanes.wait()[0].stem for _ in range(2)} == {"long", "short"} and sorted(ended) == [0, 1]
    lanes.start(every, lambda place, interruption: place)
    assert pick([short]) is None and lanes.wait() == (every, Place(0))
    assert Lanes().pick([every, long], lambda notebook: 0.0) is every  # one place: the book's order


@pytest.mark.book
@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two places want two cores")
def test_two_notebooks_of_one_device_run_at_once_and_a_third_waits_for_what_it_needs(root):
    phase = root / "phase1_hardware"
    for me, other, place in (("01_first", "02_second", "phase1_hardware"), ("02_second", "01_first", "phase2_training")):
        here = f"from pathlib import Path\nassert Path.cwd().name == {place!r}, Path.cwd()"
        cells = [here, MEETING.format(me=str(root / me), other=str(root / other)), recording(me)]
        write_notebook(root / place, me, cells, devices="one")
    both = f"from pathlib import Path\nassert all(Path({str(root)!r}, n).exists() for n in ('01_first', '02_second'))"
    cells = [both, MEETING.format(me=str(root / "03_all"), other=str(root / "03_all")), recording("03_all")]
    write_notebook(phase, "03_all", cells, needs=["01_first"])
    code, text = call()
    assert code == 0, text
    assert "at the same time, on 2 devices" in text and "predicted 10 s" in text  # 5 s each, two of them at once
    devices = {stem: (root / stem).read_text().split() for stem in ("01_first", "02_second", "03_all")}
    assert {devices["01_first"][0], devices["02_second"][0]} == {"GPU-a", "GPU-b"} and devices["03_all"][0] == "all"
    cores = [set(devices[stem][1:]) for stem in ("01_first", "02_second")]
    assert cores[0] and not cores[0] & cores[1]
    assert len(devices["03_all"]) == 1 + len(os.sched_getaffinity(0))
    the_run(root).verify()
    assert {row.notebook for row in the_run(root).rows()} == {"01_first", "02_second", "03_all"}
    assert Path.cwd() == root


@pytest.mark.book
@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two places want two cores")
def test_a_failure_beside_another_notebook_leaves_that_one_alone(root):
    phase = root / "phase1_hardware"
    met = [MEETING.format(me=str(root / "a"), other=str(root / "b")), MEETING.format(me=str(root / "b"), other=str(root / "a"))]
    write_notebook(phase, "01_first", [met[0], "raise ValueError('planted')"], devices="one")
    write_notebook(phase, "02_second", [met[1], "import time\ntime.sleep(1)", recording("02_second")], devices="one")
    write_notebook(phase, "03_third", [recording("03_third")], needs=["01_first"], devices="one")
    code, text = call()
    assert code == 1 and "ValueError: planted" in text and "blocked by 01_first" in text and "02_second: done" in text


@pytest.mark.book
@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two places want two cores")
@pytest.mark.parametrize(("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long), (signal.SIGINT, 130)])
def test_a_signal_ends_all_that_run_and_the_next_call_goes_on(root, number, code):
    phase = root / "phase1_hardware"
    waiting = "import os, time\nfrom pathlib import Path\nprint('BANNER', os.getpid(), flush=True)\n"
    waiting += f"while not Path({str(root / 'go')!r}).exists():\n    time.sleep(0.05)"
    for stem in ("01_first", "02_second"):
        write_notebook(phase, stem, [recording(stem, experiment="kept"), waiting, recording(stem)], devices="one")
    process = start_driver(root, "TWO_DEVICES")
    try:
        kernels = []
        while len(kernels) < 2:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            kernels += [int(line.split()[-1])] if "BANNER" in line else []
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code and out.count("interrupted") == 2 and "Traceback" not in err, (out, err)
    assert all(has_ended(kernel) for kernel in kernels)
    entries = json.loads(the_run(root).read("reproduce.json"))["notebooks"]
    assert {entry["status"] for entry in entries.values()} == {"interrupted"}
    (root / "go").write_text("")
    assert call()[0] == 0 and len(the_run(root).rows()) == 4


@pytest.mark.book
@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two places want two cores")
def test_the_time_budget_ends_each_of_them_between_two_cells(root):
    phase = root / "phase1_hardware"
    for stem in ("01_first", "02_second"):
        cells = ["import time\ntime.sleep(1.5)", recording(stem)]
        write_notebook(phase, stem, cells, devices="one", time_budget_s={"smoke": 0.1})
    code, text = call(time_budget_s=1.0)
    assert code == 3 and text.count("unfinished, the time budget is spent") == 2 and the_run(root).rows() == []


@pytest.mark.book
@pytest.mark.process
def test_what_the_time_budget_is_too_short_for_stops_what_builds_on_it_and_nothing_else(root):
    phase = root / "phase1_hardware"
    write_notebook(phase, "01_long", [recording("01_long")], devices="one", time_budget_s={"smoke": 999})
    write_notebook(phase, "02_upon", [recording("02_upon")], optional=["01_long"], devices="one")
    write_notebook(phase, "03_short", [recording("03_short")])
    code, text = call(time_budget_s=60.0)
    assert code == 3 and "01_long: not started, because it takes about 16.6 min" in text
    assert text.count("unfinished") == 2 and {row.notebook for row in the_run(root).rows()} == {"03_short"}
