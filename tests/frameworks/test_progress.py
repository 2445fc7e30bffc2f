"""Progress of runs: the time left, the progress line, and the form of the event log."""

import io
import json
from collections.abc import Callable

import pytest
from rich.console import Console

from hyperion.commands.frameworks_benchmark import ProgressLine
from hyperion.frameworks.progress import EVENTS, EventError, Progress, StepReporter, append_event, read_events
from tests.frameworks.test_run import plan

TRAN = plan("tran")


def clock(*times_s: float) -> Callable[[], float]:
    return iter(times_s).__next__


def test_the_time_left_is_that_of_the_mean_step_since_the_first_report(tmp_path):
    seen = []
    report = StepReporter(TRAN, tmp_path, lambda plan, progress: seen.append(progress), clock(100.0, 101.0, 104.0))
    report(1, 5.0)
    report(2, None)
    report(3, 4.0)
    # Two steps took 4 s, and 47 of 50 steps are left.
    assert seen == [Progress(1, 50, 5.0, None), Progress(2, 50, None, 48.0), Progress(3, 50, 4.0, 94.0)]


def test_a_progress_event_is_written_at_most_every_5_s(tmp_path):
    report = StepReporter(TRAN, tmp_path, lambda plan, progress: None, clock(0.0, 4.9, 5.0, 9.0, 10.0))
    for step, loss in enumerate((5.0, 4.0, None, 3.0, float("nan")), 1):
        report(step, loss)
    events = read_events(tmp_path / EVENTS)
    assert [(event.event, event.step, event.steps, event.loss) for event in events] == [
        ("progress", 1, 50, 5.0),
        ("progress", 3, 50, None),
        ("progress", 5, 50, "nan"),
    ]
    assert {event.file for event in events} == {"train_cpu_tran_llama_tiny.json"}
    assert all(event.time.endswith("+00:00") for event in events)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"time": "2026-01-31T12:0', "not a valid JSON document"),
        ({"event": "begun"}, "event.event must be"),
        ({"color": "red"}, "unknown field event.color"),
        ({"time": "2026-01-31T12:00:00+02:00"}, "time must be in UTC"),
        ({"time": "2026-01-31T12:00:00"}, "time must be in UTC"),
        ({"time": "now"}, "Invalid isoformat string"),
        ({"step": 3, "steps": 50}, "step and steps belong to each progress event"),
        ({"event": "progress", "step": 3}, "step and steps belong to each progress event"),
        ({"event": "failed"}, "reason belongs to each event failed"),
        ({"event": "progress", "step": 3, "steps": 50, "loss": "low"}, "event.loss"),
    ],
)
def test_a_line_of_another_form_is_named(line, said, tmp_path):
    append_event(tmp_path, TRAN, "started")
    file = tmp_path / EVENTS
    text = line if isinstance(line, str) else json.dumps(json.loads(file.read_text()) | line)
    file.write_text(file.read_text() + text + "\n")
    with pytest.raises(EventError) as error:
        read_events(file)
    assert said in error.value.what and str(error.value.where).endswith(f"{EVENTS}: line 2") and error.value.next_step


def test_the_line_of_a_terminal_changes_in_place():
    console = Console(file=io.StringIO(), force_terminal=True, width=70, _environ={"TERM": "xterm"})
    with ProgressLine(console) as line:
        line.show(TRAN, Progress(1, 50, None, None))
        line.show(TRAN, Progress(3, 50, 4.0, 94.0))
    first, second, *_ = console.file.getvalue().split("\r\x1b[2K")  # type: ignore[attr-defined]
    assert first.endswith("tran llama_tiny: step 1/50") and "\n" not in first
    assert second.startswith("tran llama_tiny: step 3/50, loss 4.0000, about 1.6 min left")
    assert console.file.getvalue().rstrip().endswith("\x1b[1A\x1b[2K")  # type: ignore[attr-defined]  # the line is removed


def test_other_outputs_get_a_line_every_10_s(capsys):
    times = iter((0.0, 0.0, 9.9, 10.0, 10.0, 11.0, 11.0))
    line = ProgressLine(Console(file=io.StringIO()), times.__next__)
    for step in (1, 2, 3):
        line.show(TRAN, Progress(step, 50, 4.0, None))
    line.clear()
    line.show(TRAN, Progress(1, 50, 5.0, None))
    said = capsys.readouterr().out.splitlines()
    assert said == [f"  tran llama_tiny: step {step}" for step in ("1/50, loss 4.0000", "3/50, loss 4.0000", "1/50, loss 5.0000")]
