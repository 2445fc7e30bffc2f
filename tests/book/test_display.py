"""What a notebook shows: banners, pictures, tables, lessons."""

from dataclasses import dataclass, field

import pytest

from hyperion.book import display
from hyperion.errors import HyperionError


@dataclass
class Result:
    rows: list = field(default_factory=list)
    source: str = ""
    replayed_from: str = ""


@pytest.fixture
def shown(monkeypatch):
    """The bundles that reach the notebook, in order."""
    bundles = []
    monkeypatch.setattr(display, "_display", bundles.append)
    return bundles


def test_show_gives_pictures_then_tables(run, material, shown):
    display.show(Result(material.of("gemm")), run)
    kinds = [next(iter(bundle)) for bundle in shown]
    assert kinds == ["image/png"] * 2 + ["text/html"] * 3
    assert all("text/plain" in bundle for bundle in shown)


def test_replay_and_synthetic_are_announced_first(run, material, shown):
    display.show(Result(material.of("gemm"), replayed_from="h200"), run)
    assert "REPLAY: measured on h200" in shown[0]["text/plain"]
    shown.clear()
    display.show(Result(material.of("text_pipeline"), source="synthetic"), run)
    assert "SYNTHETIC DATA" in shown[0]["text/html"]


def test_a_result_without_rows_is_refused(run, shown):
    with pytest.raises(HyperionError, match="holds no row"):
        display.show(Result(), run)


def test_outside_a_notebook_plain_text_is_printed(material, capsys):
    display.banner("REPLAY")
    display.teach("best: {best.value}", best=material.of("gemm", metric="gemm_tflops")[0])
    printed = capsys.readouterr().out
    assert "REPLAY" in printed and "TFLOPS" in printed


def test_teach_gives_markdown(material, shown):
    display.teach("**{row.value}**", row=material.of("gemm", metric="gemm_tflops")[0])
    assert shown[0]["text/markdown"].startswith("**") and "TFLOPS" in shown[0]["text/markdown"]
