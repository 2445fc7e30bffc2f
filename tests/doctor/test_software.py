"""Python, torchvision and kernel: found well, and found wanting from injected facts."""

import sys
from types import SimpleNamespace

import pytest

from hyperion.doctor import checks
from hyperion.errors import HyperionError


@pytest.mark.parametrize(("version", "status"), [((3, 11, 0), "ok"), ((3, 14, 1), "ok"), ((3, 10, 13), "fail")])
def test_python(version, status):
    result = checks.check_python(version)
    assert (result.id, result.status) == ("python", status)
    assert bool(result.remedy) == (status != "ok")


def test_this_torchvision_imports():
    result = checks.check_torchvision()
    assert result.status == "ok" and result.evidence.startswith("torchvision ")


def test_a_broken_torchvision_is_reported_with_its_cause():
    def load():
        raise HyperionError("torchvision cannot be imported: undefined symbol", next_step="make setup")

    result = checks.check_torchvision(load)
    assert (result.status, result.remedy) == ("fail", "make setup") and "undefined symbol" in result.evidence


@pytest.mark.process
def test_a_real_kernel_starts_in_this_interpreter():
    result = checks.check_notebook_kernel()
    assert (result.status, result.evidence) == ("ok", f"a kernel started in {sys.executable}")


def test_a_kernel_of_another_python_is_a_failure():
    result = checks.check_notebook_kernel(lambda: "/usr/bin/python3")
    assert result.status == "fail" and "kernelspec" in result.remedy


def test_a_kernel_that_does_not_start_is_a_failure():
    def start():
        raise ModuleNotFoundError("No module named 'ipykernel'")

    result = checks.check_notebook_kernel(start)
    assert result.status == "fail" and "ipykernel" in result.evidence and result.remedy


def test_a_plain_module_counts_as_torchvision():
    assert checks.check_torchvision(lambda: SimpleNamespace(__version__="0.28.0")).status == "ok"
