from dataclasses import dataclass

import pytest

from hyperion.data.store.folders import DataError, DataUnavailable
from hyperion.data.store.sources import Checksums, mirror_root, take


@dataclass
class Thing:
    source: str
    name: str = "thing"
    detail: str = "made for a test"
    checksums: Checksums | None = None


def _has(source):
    return lambda: Thing(source)


def _lacks(reason):
    def supply():
        raise DataUnavailable(reason)

    return supply


def _broken():
    raise DataError("file is truncated", where="file", next_step="copy it")


def test_auto_takes_the_first_that_has_it_and_says_why_not_the_others(capsys):
    suppliers = {"mirror": _lacks("no mirror"), "cache": _lacks("empty"), "download": _has("download")}
    assert take("words", "auto", {**suppliers, "synthetic": _has("synthetic")}).source == "download"
    banner = capsys.readouterr().out
    for part in ("words: source = DOWNLOAD", "not mirror: no mirror", "not cache: empty"):
        assert part in banner


def test_auto_ends_at_synthetic_where_that_is_allowed(capsys):
    suppliers = dict.fromkeys(("mirror", "cache", "download"), _lacks("nothing")) | {"synthetic": _has("synthetic")}
    assert take("words", "auto", suppliers).source == "synthetic"
    assert "source = SYNTHETIC" in capsys.readouterr().out
    with pytest.raises(DataError, match="not allowed in this profile unless asked for by name") as caught:
        take("words", "auto", suppliers, allow_synthetic=False)
    assert "make fetch" in str(caught.value)


def test_synthetic_by_name_is_always_allowed():
    assert take("words", "synthetic", {"synthetic": _has("synthetic")}, allow_synthetic=False).source == "synthetic"


def test_wrong_data_stop_auto_instead_of_being_skipped():
    with pytest.raises(DataError, match="truncated"):
        take("words", "auto", {"mirror": _broken, "cache": _has("cache")})


def test_a_named_source_is_never_replaced():
    with pytest.raises(DataUnavailable, match="nothing"):
        take("words", "cache", {"mirror": _has("mirror"), "cache": _lacks("nothing")})


def test_an_unknown_source_is_an_error():
    with pytest.raises(DataError, match="unknown data source 'internet'"):
        take("words", "internet", {})


def test_a_mirror_that_is_missing_is_an_error_and_never_skipped(monkeypatch, tmp_path):
    with pytest.raises(DataUnavailable, match="HYPERION_DATA_MIRROR is not set"):
        mirror_root()
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="absent, which is not a folder") as caught:
        take("words", "auto", {"mirror": mirror_root, "cache": _has("cache")})
    assert "correct HYPERION_DATA_MIRROR" in str(caught.value)
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path))
    assert mirror_root() == tmp_path
