"""Each exercise: the cell as given fails it, a right answer passes, and no shortcut does."""

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hyperion import experiments
from hyperion.chapter.exercises import Question
from hyperion.errors import HyperionError
from hyperion.experiments.baselines.exercises import judge_leak_check
from hyperion.experiments.hardware.exercises import judge_timer
from tests.exercise_scores import solved


def test_timer_as_given_is_marked_wrong_and_a_sound_one_right():
    def as_given(device):
        start = time.perf_counter()
        device.launch()
        return time.perf_counter() - start

    def sound(device):
        device.launch()
        device.synchronize()
        samples = []
        for _ in range(10):
            start = time.perf_counter()
            device.launch()
            device.synchronize()
            samples.append(time.perf_counter() - start)
        return min(samples)

    assert not judge_timer(as_given)["right"].all()
    assert solved(judge_timer(sound))


def test_timer_that_waits_but_counts_the_first_call_is_caught():
    def cold(device):
        start = time.perf_counter()
        device.launch()
        device.synchronize()
        return time.perf_counter() - start

    met = judge_timer(cold).set_index("requirement")["right"]
    assert met["the clock stops after the work is done"]
    assert not met["the slow first call is not counted"]


def test_a_function_that_fails_is_explained_with_its_line_and_what_is_wanted():
    def my_timer(device):
        return device.wait()

    with pytest.raises(HyperionError, match="my_timer cannot be judged: AttributeError: .*'wait'") as caught:
        judge_timer(my_timer)
    assert caught.value.where == "my_timer: return device.wait()"
    assert "It must be a function that takes a ToyDevice and returns the time in seconds" in caught.value.next_step


@pytest.mark.parametrize("answer", [lambda device: None, lambda device: "5 ms", lambda: 1, 3])
def test_an_answer_of_the_wrong_type_gets_no_traceback_through_the_library(answer):
    with pytest.raises(HyperionError, match="my_timer cannot be judged: (Type|Value)Error"):
        judge_timer(answer)


def test_every_judge_explains_errors_of_the_readers_function():
    names = [f"hyperion.experiments.{module.name}.exercises" for module in pkgutil.iter_modules(experiments.__path__)]
    modules = [importlib.import_module(name) for name in names if importlib.util.find_spec(name)]
    judges = [judge for module in modules for name, judge in vars(module).items() if name.startswith("judge_")]
    assert len(judges) >= 20
    for judge in judges:
        wanted = list(inspect.signature(judge).parameters.values())
        if any(parameter.default is parameter.empty for parameter in wanted[1:]):
            continue  # it needs more than the reader's function
        with contextlib.suppress(HyperionError):  # most checks count an exception as a wrong answer instead
            table = judge(lambda: None)
            assert not table["right"].all()


def test_leak_check_as_given_passes_leaking_models_and_perturbation_catches_them():
    def as_given(model):
        return model(torch.randint(32, (2, 16))).shape == (2, 16, 32)

    def perturbing(model):
        tokens = torch.randint(32, (2, 16))
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % 32
        return torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])

    assert not solved(judge_leak_check(as_given))
    assert solved(judge_leak_check(perturbing))


def test_numbers_are_marked():
    question = Question(6.0, "count")
    assert question.judge(None) == "not answered yet: set `answer` and run the cell again"
    assert question.judge(6.05) == question.judge(np.float32(6)) == "right"
    assert "count" in question.judge(5.0) and "count" in question.judge(6.07)


@pytest.mark.parametrize(("answer", "kind"), [("6", "str"), ([6.0], "list"), (True, "bool"), (6 + 0j, "complex")])
def test_an_answer_of_a_wrong_type_gets_a_hint(answer, kind):
    assert Question(6.0, "count").judge(answer) == f"the answer is a {kind}: set `answer` to a number, for example answer = 12.5"


def test_no_notebook_contains_the_answer_to_its_own_question():
    """The marking cell names a Question of the library, whose answer stands in another file."""
    asked = 0
    for path in Path(__file__).parents[2].glob("phase*/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and "\nanswer = None\n" in source:
                asked += 1
                assert re.search(r"^([A-Z0-9_]+\.judge|judge_\w+)\(answer\b", source, re.MULTILINE) and "expected" not in source
    assert asked >= 15
