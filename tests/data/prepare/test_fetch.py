import shutil

import pytest

from hyperion.data import fetch_all, load_cifar10, load_instructions, load_tokenizer, load_wikitext2
from hyperion.data.store.folders import cache_root


@pytest.mark.slow
@pytest.mark.mirror
def test_after_fetching_the_cache_serves_everything_without_a_connection(mirror, monkeypatch, silent):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    assert [(report.name, report.status) for report in fetch_all()] == [
        ("wikitext-2", "ok"),
        ("gpt2 tokenizer", "ok"),
        ("cifar-10", "ok"),
        ("instructions", "ok"),
    ]
    assert {report.detail for report in fetch_all()} == {"present"}
    monkeypatch.delenv("HYPERION_DATA_MIRROR")
    address, accepted = silent
    monkeypatch.setenv("HF_ENDPOINT", address)
    loaded = (load_wikitext2(), load_tokenizer("auto"), load_cifar10(url=address), load_instructions(url=address))
    assert [thing.source for thing in loaded] == ["cache"] * 4 and not accepted


def test_each_failure_is_reported_and_stops_nothing_else(refused):
    reports = fetch_all(cifar10_url=refused + "/file", instructions_url=refused + "/rows")
    assert [report.status for report in reports] == ["failed"] * 4
    assert all("no network" in report.detail and "next:" in report.detail for report in reports)
    assert not list(cache_root().iterdir())


@pytest.mark.mirror
def test_damage_in_the_cache_is_reported(mirror, monkeypatch, refused):
    shutil.copytree(mirror / "wikitext-2", cache_root() / "wikitext-2")
    (cache_root() / "wikitext-2" / "wiki.test.tokens").write_text("cut\n")
    report = fetch_all(cifar10_url=refused + "/file", instructions_url=refused + "/rows")[0]
    assert report.status == "failed" and "has 1 lines, expected 4358" in report.detail
