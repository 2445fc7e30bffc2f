import contextlib
import hashlib
import http.server
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from hyperion.data.store import sources
from hyperion.data.store.folders import DataError, DataUnavailable, cache_root
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


def test_a_source_is_printed_once_in_a_frame_that_is_as_wide_as_its_lines(capsys):
    checks = "; ".join(["counts and labels verified"] * 6)
    for detail in (checks, checks, "others"):
        take("words", "cache", {"cache": lambda detail=detail: Thing("cache", detail=detail)})
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("=" * 100) == 4 and max(map(len, lines)) == 100
    assert "".join(lines).count("labels verified") == 6 and lines[2].startswith(" " * 8)


def test_auto_ends_at_synthetic_where_that_is_allowed(capsys):
    suppliers = dict.fromkeys(("mirror", "cache", "download"), _lacks("nothing")) | {"synthetic": _has("synthetic")}
    assert take("words", "auto", suppliers).source == "synthetic"
    assert "source = SYNTHETIC" in capsys.readouterr().out
    with pytest.raises(DataError, match="not allowed in this profile unless data_source=synthetic is given") as caught:
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


@pytest.mark.slow
def test_a_silent_host_is_given_up_and_remembered(silent):
    address, accepted = silent
    for _ in range(2):
        with pytest.raises(DataUnavailable, match=r"no answer|timed out") as caught:
            sources.require_network(address)
        assert address in str(caught.value) and "make fetch" in str(caught.value)
    assert len(accepted) == 1


@pytest.mark.slow
def test_one_call_of_the_driver_asks_a_silent_host_once_in_all_its_processes(silent, tmp_path, monkeypatch):
    address, accepted = silent
    monkeypatch.setenv("HYPERION_SILENT_HOSTS", str(tmp_path))
    for _ in range(2):
        with pytest.raises(DataUnavailable, match=r"no answer|timed out"):
            sources.require_network(address)
        sources._silent_until.clear()  # what another process does not know
    assert len(accepted) == 1


def test_a_notebook_and_its_jobs_print_a_frame_once(tmp_path, monkeypatch, capsys):
    def printed(*lines: str, rank: str = "0") -> bool:
        sources._print_framed.cache_clear()  # as in another process
        monkeypatch.setenv("RANK", rank)
        sources._print_framed(lines)
        return "DATA" in capsys.readouterr().out

    assert printed("DATA a") and printed("DATA a"), "outside of `make reproduce`"
    monkeypatch.setenv("HYPERION_FRAMES", str(tmp_path / "frames"))
    assert printed("DATA a") and printed("DATA a"), "without the folder, a frame is better twice than never"
    (tmp_path / "frames").mkdir()
    # The notebook does not show what rank 1 prints.
    assert [printed("DATA a", rank="1"), printed("DATA a"), printed("DATA a"), printed("DATA b")] == [True, True, False, True]


LOAD_EVERYTHING = """
import sys
from hyperion.data import load_cifar10, load_tokenizer, load_wikitext2
text = load_wikitext2("auto", synthetic_lines={"train": 200, "valid": 20, "test": 20})
images = load_cifar10("auto", synthetic_counts={"train": 20, "test": 20}, url=sys.argv[1])
print("SOURCES", text.source, load_tokenizer("auto", text).source, images.source)
"""


@pytest.mark.process
def test_a_silent_network_costs_seconds_in_every_process(silent):
    address, accepted = silent
    environment = {**os.environ, "HF_ENDPOINT": address}
    for attempt in (1, 2):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", LOAD_EVERYTHING, f"{address}/cifar-10-python.tar.gz"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "SOURCES synthetic trained synthetic" in done.stdout and "not download: no network" in done.stdout
        assert len(accepted) == attempt
        assert time.monotonic() - started < 60  # it hangs for minutes, or for ever, where nobody watches the clock


def test_a_refused_port_is_named(refused):
    with pytest.raises(DataUnavailable, match=rf"no network: {refused}/ .*refused"):
        sources.require_network(refused)


def test_a_name_that_does_not_resolve_is_named():
    with pytest.raises(DataUnavailable, match=r"no network: http://host.invalid/"):
        sources.require_network("http://host.invalid/file")


@pytest.mark.parametrize("switch", sources.OFFLINE_SWITCHES)
def test_an_offline_switch_is_obeyed_before_any_connection(switch, silent, monkeypatch):
    address, accepted = silent
    monkeypatch.setenv(switch, "1")
    with pytest.raises(DataUnavailable, match=f"offline: {switch}=1"):
        sources.require_network(address)
    assert not accepted


def test_any_status_counts_as_an_answer(serve, tmp_path):
    assert sources.require_network(serve(tmp_path / "nothing here") + "/some/file") is None


def test_a_download_with_the_right_checksum_arrives(serve, tmp_path):
    content = bytes(range(256)) * 20_000
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file.bin").write_bytes(content)
    url = serve(tmp_path / "served") + "/file.bin"
    sums = {name: hashlib.new(name, content).hexdigest() for name in ("md5", "sha256")}
    sources.download(url, tmp_path / "copy.bin", **sums)
    assert (tmp_path / "copy.bin").read_bytes() == content


def test_a_download_with_a_wrong_checksum_is_quarantined(serve, tmp_path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "file.bin").write_bytes(b"a login page")
    with pytest.raises(DataUnavailable, match=r"expected 00; moved to quarantine/copy.bin"):
        sources.download(serve(tmp_path / "served") + "/file.bin", tmp_path / "copy.bin", md5="00")
    assert not (tmp_path / "copy.bin").exists()
    (kept,) = (cache_root() / "quarantine").iterdir()
    assert kept.read_bytes() == b"a login page"


def test_a_missing_file_is_named(serve, tmp_path):
    with pytest.raises(DataUnavailable, match="404"):
        sources.download(serve(tmp_path) + "/absent.bin", tmp_path / "copy.bin")


class _Interrupted(http.server.SimpleHTTPRequestHandler):
    """Announces 1000 bytes and sends 10; `pause_s` later it hangs up."""

    pause_s = 0.0

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"0123456789")
        self.wfile.flush()
        time.sleep(self.pause_s)


class _Stalling(_Interrupted):
    pause_s = 2.0


def test_a_download_that_breaks_off_is_an_error(serve, tmp_path):
    with pytest.raises(DataUnavailable, match=r"10 of 1000 bytes|IncompleteRead|10 bytes read"):
        sources.download(serve(tmp_path, _Interrupted) + "/file", tmp_path / "copy.bin")


def test_a_download_that_stalls_is_given_up_and_its_host_remembered(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STALL_LIMIT_S", 0.2)
    address = serve(tmp_path, _Stalling)
    with pytest.raises(DataUnavailable, match="download failed: .*timed out"):
        sources.download(address + "/file", tmp_path / "copy.bin")
    with pytest.raises(DataUnavailable, match="no network: .*timed out"):
        sources.require_network(address)


class Endless(http.server.SimpleHTTPRequestHandler):
    """Announces a length that is no number and sends bytes until nobody listens."""

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "many")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))


def test_a_download_without_end_is_broken_off(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("hyperion.data.store.sources.DOWNLOAD_LIMIT_BYTES", 1 << 21)
    with pytest.raises(DataUnavailable, match="download failed: more than 2 MiB"):
        sources.download(serve(tmp_path, Endless) + "/file", tmp_path / "file")
    assert (tmp_path / "file").stat().st_size <= 4 << 20
