"""`hyperion doctor --floors` as a user types it: its table, its last line and its exit codes."""

from dataclasses import replace

import pandas as pd

from hyperion.hardware import detect_cpu, fingerprint
from hyperion.results import Run
from tests.doctor.test_floors import NODE, healthy


def stored(folder, **changes):
    run = Run.create(folder, {"environment": fingerprint(NODE)})
    rows = [replace(row, notebook="nb", experiment="e") for row in healthy(**changes)]
    run.record("nb", "e", rows, pd.DataFrame({"x": [0]}), input_hash="h")
    return str(folder)


def test_an_unhealthy_gcd_is_exit_code_1_with_the_cited_floor(hyperion, tmp_path):
    done = hyperion("doctor", "--floors", "--run", stored(tmp_path / "bad", copy=1150))
    assert done.returncode == 1 and "NOT healthy, 1 of 7" in done.stdout.splitlines()[-1]
    assert "not met" in done.stdout and "AMD, System" in done.stdout and "1200 GB/s" in done.stdout
    assert hyperion("doctor", "--floors", "--run", stored(tmp_path / "good")).returncode == 0


def test_a_machine_without_floors_is_told_so_and_is_no_failure(hyperion):
    done = hyperion("doctor", "--floors")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"no floor is known for {detect_cpu().name}")


def test_a_run_without_floors_is_refused(hyperion):
    done = hyperion("doctor", "--run", "h200x2")
    assert done.returncode == 2 and "is given without --floors" in done.stderr
