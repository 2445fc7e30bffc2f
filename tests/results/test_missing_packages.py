"""Packages that rows name as missing, and that are installed now."""

import importlib.util
from dataclasses import replace

import pytest

from hyperion.results.missing_packages import installed_since
from tests.results.conftest import GEMM

_REASON = "unavailable: {} not installed; next step: {}"


@pytest.mark.parametrize(
    ("reason", "now", "found"),
    [
        (_REASON.format("bitsandbytes is", "pip install bitsandbytes"), ["bitsandbytes"], ["bitsandbytes"]),
        (_REASON.format("bitsandbytes is", "pip install bitsandbytes"), [], []),
        (_REASON.format("fastapi, uvicorn", "install fastapi uvicorn"), ["fastapi", "uvicorn"], ["fastapi", "uvicorn"]),
        (_REASON.format("fastapi, uvicorn", "install fastapi uvicorn"), ["fastapi"], []),
        (_REASON.format("Triton is", "pip install --no-deps triton==3.7.1"), ["triton"], ["triton"]),
        (_REASON.format("Triton is", "install the Triton release that this PyTorch requires"), ["triton"], []),
        (_REASON.format("deepspeed", "hyperion frameworks install deepspeed"), ["deepspeed"], []),
        ("unavailable: this machine has no GPU", ["bitsandbytes"], []),
    ],
)
def test_a_package_counts_if_all_that_the_reason_names_can_be_imported(reason, now, found, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in now else None)
    assert installed_since([GEMM, replace(GEMM, value=None, value_reason=reason)]) == found
