import os
import shutil
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from hyperion.data import load_wikitext2
from hyperion.data.store.folders import DataError, DataUnavailable, cache_root
from hyperion.data.text.wikitext2 import HUB_FILES, HUB_FOLDER, WIKITEXT2

SMALL = {"train": 30, "valid": 5, "test": 5}


@pytest.fixture
def damaged(mirror, tmp_path, monkeypatch):
    """A mirror whose WikiText-2 may be damaged."""
    shutil.copytree(mirror / "wikitext-2", tmp_path / "mirror" / "wikitext-2")
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path / "mirror"))
    return tmp_path / "mirror" / "wikitext-2"


@pytest.fixture
def hub(mirror, tmp_path, serve, monkeypatch):
    """A stand-in for the hub with WikiText-2 as the real one holds it: Parquet, and "" for an empty line."""
    folder = tmp_path / "hub" / HUB_FOLDER
    folder.mkdir(parents=True)
    for split, name in HUB_FILES.items():
        lines = (mirror / "wikitext-2" / f"wiki.{split}.tokens").read_text().splitlines(keepends=True)
        table = pyarrow.table({"text": [line if line.strip() else "" for line in lines]})
        pyarrow.parquet.write_table(table, folder / name)
    monkeypatch.setenv("HF_ENDPOINT", serve(tmp_path / "hub"))
    return folder


@pytest.mark.mirror
def test_the_mirror_is_counted(mirror, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    corpus = load_wikitext2(allow_synthetic=False)
    assert (corpus.name, corpus.source, corpus.language) == ("wikitext-2", "mirror", None)
    assert {split: len(lines) for split, lines in corpus.splits.items()} == {"train": 36718, "valid": 3760, "test": 4358}
    assert "counts verified" in corpus.detail and str(mirror) not in corpus.detail
    official = "official" if corpus.checksums.official else "NOT OFFICIAL"
    assert f"wikitext-2: source = MIRROR, {official}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.mirror
def test_lines_of_the_valid_split_in_train_are_refused(damaged):
    """The counts are right: each leaked line takes the place of one with as many words."""
    valid = {len(line.split()): line for line in (damaged / "wiki.valid.tokens").read_text().splitlines(keepends=True)}
    lines = (damaged / "wiki.train.tokens").read_text().splitlines(keepends=True)
    longest = {}
    for place, line in enumerate(lines):
        if (size := len(line.split())) >= 40 and size in valid:
            longest[size] = place
    for size, place in longest.items():
        lines[place] = valid[size].upper()
    (damaged / "wiki.train.tokens").write_text("".join(lines))
    with pytest.raises(DataError, match=rf"{len(longest)} of \d+ long lines of the valid split .* also occur in another split"):
        load_wikitext2()


@pytest.mark.mirror
def test_damage_is_named_and_stops_auto(damaged):
    path = damaged / "wiki.test.tokens"
    content = path.read_bytes()
    path.write_bytes(content.removesuffix(b" \n"))
    with pytest.raises(DataError, match=r"wiki.test.tokens has 4357 lines, expected 4358"):
        load_wikitext2()
    path.write_bytes(content.replace(b"Robert", b"Rob ert", 1))
    with pytest.raises(DataError, match="245570 words with one <eos> per line, expected 245569"):
        load_wikitext2()
    path.write_bytes(content.replace(b"Robert", b"R\xf6bert", 1))
    with pytest.raises(DataError, match="not UTF-8: byte 0xf6 at offset 6"):
        load_wikitext2()
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read wiki.test.tokens"):
        load_wikitext2()


def test_a_mirror_without_it_is_passed_over_aloud(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(tmp_path))
    assert load_wikitext2(synthetic_lines=SMALL).source == "synthetic"
    banner = " ".join(capsys.readouterr().out.split())
    for part in ("SYNTHETIC, synthetic-echo", "the mirror has no wikitext-2/", "the cache has no", "refused"):
        assert part in banner


def test_nothing_found_and_synthetic_not_allowed(data_home):
    with pytest.raises(DataError, match="no source has wikitext-2") as caught:
        load_wikitext2(allow_synthetic=False)
    assert "data_source=synthetic" in str(caught.value)
    assert not data_home.exists()


def test_synthetic_text_has_its_own_name_and_its_true_model():
    corpus = load_wikitext2("synthetic", synthetic_lines=SMALL, seed=3)
    assert corpus.name == "synthetic-echo" and {s: len(lines) for s, lines in corpus.splits.items()} == SMALL
    assert corpus.language.true_negative_log_likelihood(corpus.splits["valid"]) > 0
    assert corpus.splits["valid"] != corpus.splits["test"]


@pytest.mark.slow
@pytest.mark.mirror
def test_a_download_is_counted_and_staged(hub, mirror, monkeypatch, data_home):
    corpus = load_wikitext2("download")
    assert corpus.source == "download" and "Salesforce/wikitext" in corpus.detail
    for split in corpus.splits:
        name = f"wiki.{split}.tokens"
        assert (cache_root() / "wikitext-2" / name).read_bytes() == (mirror / "wikitext-2" / name).read_bytes()
    monkeypatch.setenv("HYPERION_OFFLINE", "1")
    assert load_wikitext2().source == "cache"
    assert load_wikitext2("download").source == "cache"
    assert not list(data_home.glob("raw/.*"))


@pytest.mark.slow
@pytest.mark.mirror
def test_a_short_download_leaves_nothing(hub, data_home):
    table = pyarrow.parquet.read_table(hub / HUB_FILES["test"])
    pyarrow.parquet.write_table(table.slice(0, 100), hub / HUB_FILES["test"])
    with pytest.raises(DataError, match="has 100 lines, expected 4358"):
        load_wikitext2("download")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["word " * 20_000] * 4358}), hub / HUB_FILES["test"])
    with pytest.raises(DataError, match="has more than 67108864 bytes of text"):
        load_wikitext2("download")
    (hub / HUB_FILES["test"]).write_bytes(b"no table")
    with pytest.raises(DataError, match="not a readable Parquet table"):
        load_wikitext2("download")
    assert not list((data_home / "raw").iterdir())


@pytest.mark.slow
@pytest.mark.mirror
def test_an_edited_cache_is_refused(mirror, monkeypatch):
    monkeypatch.setenv("HYPERION_DATA_MIRROR", str(mirror))
    assert WIKITEXT2.stage() == "copied from the mirror"
    assert WIKITEXT2.stage() == "present"
    path = cache_root() / "wikitext-2" / "wiki.valid.tokens"
    path.write_bytes(path.read_bytes().replace(b"lobster", b"lobsteR", 1))
    with pytest.raises(DataError, match=r"wiki.valid.tokens was edited: its sha256 differs from the manifest"):
        load_wikitext2("cache")


@pytest.mark.process
@pytest.mark.mirror
def test_two_processes_stage_at_once(mirror):
    code = "from hyperion.data.text.wikitext2 import WIKITEXT2; WIKITEXT2.stage()"
    environment = {**os.environ, "HYPERION_DATA_MIRROR": str(mirror), "PYTHONPATH": os.getcwd()}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert load_wikitext2("cache").source == "cache"
    assert [path.name for path in cache_root().iterdir()] == ["wikitext-2"]


def test_an_empty_cache_is_unavailable():
    with pytest.raises(DataUnavailable, match="the cache has no wikitext-2/"):
        load_wikitext2("cache")
