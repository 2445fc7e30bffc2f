"""Run folders of somebody else: whatever is in them, readers refuse or succeed in seconds and write nothing anywhere."""

import csv
import hashlib
import io
import json
import os
import shutil
from html import escape

import mistune
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperion.book.export import reference_readme, tables
from hyperion.book.report import report_page
from hyperion.errors import HyperionError
from hyperion.figures.material import Material
from hyperion.reproduce.runs import LEDGER, Entry, Ledger
from hyperion.results import Metric, Prediction, Row, Run, median_estimate, verify_run
from hyperion.results.files import MANIFEST, PENDING
from hyperion.results.rows import COLUMNS
from tests.hostile import JUNK, SPOILED, command, determined, refused, snapshot, spoil, watched

NOTEBOOK, OWN, SCORED = "02_own_work", "own_steps", "own_score"
SAMPLES = f"samples/{NOTEBOOK}.{OWN}.parquet"
SCORES = f"samples/{NOTEBOOK}.{SCORED}.parquet"
DOCUMENTS = ("run.json", "experiments.json", "predictions.json", "environments.json", "metrics.json", LEDGER)
FILES = (*DOCUMENTS, "rows.csv", SAMPLES, SCORES, MANIFEST)
SCORE = Metric("own_score", "points", "higher", "a metric that only this run defines", needs_limit=True)
HOSTILE_NAMES = (
    "/{root}/outside/file",
    "../outside/file",
    "samples/../../outside/file",
    "",
    ".",
    "..",
    "a//b",
    "a\x00b",
    ".lock",
)
ENVIRONMENT = {
    "torch": "2.13",
    "cpu": {"name": "Test CPU", "cores": 2},
    "gpus": [],
    "packages": {"numpy": "2.5"},
    "source": {"hash": "f" * 64, "commit": "0" * 40, "modified": False},
}


def rows_and_samples(experiment: str) -> tuple[list[Row], pd.DataFrame]:
    rows, frames, random = [], [], np.random.default_rng(0)
    for variant, params in (("small", {"batch": 8, "k": 8, "m": 8, "n": 8}), ("large", {"batch": 64, "k": 64, "m": 64, "n": 64})):
        times = 1e-3 * (1 + random.random(30) / 10)
        time = median_estimate(times)
        rate = time.map(lambda time_s, params=params: params["batch"] / time_s)
        metric = "images_per_s"
        if experiment == "gemm":
            metric, rate = "gemm_tflops", time.map(lambda time_s, params=params: 2 * params["m"] ** 3 / time_s / 1e12)
        circumstances = {"notebook": NOTEBOOK, "experiment": experiment, "variant": variant, "dtype": "fp32", "params": params}
        checked = {"check": "against float64", "check_error": 1e-6, "check_tolerance": 1e-3, "data_source": "mirror"}
        for name, found, limit in (("step_time_s", time, 1e-4), (metric, rate, 1e6)):
            rows.append(
                Row(
                    **circumstances,
                    **checked,
                    metric=name,
                    value=found.value,
                    n=found.n,
                    ci_low=found.ci_low,
                    ci_high=found.ci_high,
                    limit=limit,
                    limit_source="data sheet",
                    clock_mhz=1000.0,
                    power_w=100.0,
                )
            )
        frames.append(
            pd.DataFrame({"variant": variant, "dtype": "fp32", "params": json.dumps(params), "index": range(30), "time_s": times})
        )
    return rows, pd.concat(frames, ignore_index=True)


def record(folder, experiment=OWN) -> Run:
    run = Run.create(folder, {"profile": "full", "seed": 0, "data_source": "auto", "environment": ENVIRONMENT})
    named = {"notebook": NOTEBOOK, "experiment": experiment, "variant": "small", "dtype": "fp32", "params": {}}
    run.predict([Prediction(**named, metric="step_time_s", guess=1e-3, estimate=2e-3, basis="roofline", input_hash="h")])
    rows, samples = rows_and_samples(experiment)
    provenance = {"profile": "full", "seed": 0}
    run.record(NOTEBOOK, experiment, rows, samples, input_hash="h", provenance=provenance, environment=ENVIRONMENT)
    if experiment == OWN:
        named = {"notebook": NOTEBOOK, "experiment": SCORED, "variant": "small"}
        row = Row(**named, metric=SCORE.name, value=3.0, limit=4.0, limit_source="four questions", own_metric=SCORE)
        run.record(NOTEBOOK, SCORED, [row], pd.DataFrame({"points": [1.0, 2.0]}), input_hash="h")
    ledger = Ledger.new(run, {"profile": "full"})
    ledger.keep(NOTEBOOK, Entry("done", {"a": "h"}, 1.0, 4))
    return run


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two runs in the real format: one of a reader's own experiment, one of matrix products, which has figures."""
    folder = tmp_path_factory.mktemp("originals")
    assert len(verify_run(record(folder / "own"))) == 6
    record(folder / "pictured", "gemm")
    return folder


@pytest.fixture
def place(originals, tmp_path, monkeypatch):
    """Makes a checkout with a hostile copy of a run, and a neighbour that nobody may touch."""
    count = iter(range(10**6))

    def make(original="own"):
        root = tmp_path / f"checkout{next(count)}"
        shutil.copytree(originals / original, root / "results" / "hostile")
        (root / "phase1_hardware").mkdir()
        (root / "pyproject.toml").touch()
        (root / "outside").mkdir()
        (root / "outside" / "file").write_bytes(b"mine")
        monkeypatch.chdir(root)
        monkeypatch.delenv("HYPERION_RESULTS", raising=False)
        return root / "results" / "hostile"

    return make


def rehash(folder, *names):
    """Put the files' present sizes and hashes into the manifest, so that rules and not hashes must speak."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in names:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def drive(folder, sound, monkeypatch, capsys) -> bool:
    """Show a folder to every reader and then to a writer; return whether `verify` refused it."""
    root = folder.parents[1]
    before = snapshot(root)
    code, said = command(monkeypatch, capsys, "verify", folder)
    assert code in (0, 2) and (code == 0 or "next:" in said)
    assert command(monkeypatch, capsys, "compare", folder, sound, "--all")[0] in (0, 1, 2)
    material = Material(Run(folder))
    for reader in (report_page, lambda material: reference_readme(material.run, material), tables):
        pages = []
        if not refused(lambda reader=reader, pages=pages: pages.append(reader(material))) and reader is not tables:
            shown = [pages[0]] if isinstance(pages[0], str) else [pages[0]["README.md"].decode()]
            # In a Markdown page, code may contain any text: a reader sees it as it is. So look at what a browser would get.
            assert not any("<script>" in (text if text.startswith("<!DOCTYPE") else mistune.html(text)) for text in shown)
            assert "](http://x)" not in str(pages).replace("\\n", "")
    refused(lambda: Ledger.of(Run.open(folder)))
    assert snapshot(root) == before
    refused(lambda: Run.open(folder).write({"note.txt": b"written"}))
    after = snapshot(root)
    inside = "results/hostile"
    untouched = {name: found for name, found in before.items() if not name.startswith(inside)}
    assert {name: found for name, found in after.items() if not name.startswith(inside)} == untouched
    return code != 0


def test_the_sound_run_passes_every_reader(place, originals, monkeypatch, capsys):
    folder = place()
    assert not drive(folder, originals / "own", monkeypatch, capsys)
    page = report_page(Material(Run.open(folder)))
    assert "images_per_s" in page and "mirror" in page and SCORE.meaning in page


@pytest.mark.slow
@determined(40)
@given(st.sampled_from(FILES), st.sampled_from(sorted(SPOILED)))
def test_spoiled_files_are_refused(place, originals, monkeypatch, capsys, name, how):
    folder = place()
    spoil(folder / name, how, folder.parents[1] / "outside" / "file")
    verdict = drive(folder, originals / "own", monkeypatch, capsys)
    harmless = name == MANIFEST and how == "extended"  # a newline behind a JSON document is white space
    assert verdict != harmless


@pytest.mark.slow
@determined(20)
@given(st.sampled_from([".lock", ".writer.lock"]), st.sampled_from(["a pipe", "a folder", "a link out", "a dangling link"]))
def test_locks_are_not_followed(place, originals, monkeypatch, capsys, name, how):
    folder = place()
    spoil(folder / name, how, folder.parents[1] / "outside" / "file")
    assert drive(folder, originals / "own", monkeypatch, capsys) == (name == ".lock")


@determined(20)
@given(st.sampled_from(HOSTILE_NAMES), st.sampled_from(["manifest", "target", "source", "swapped"]), st.booleans())
def test_names_that_leave_the_folder_are_refused(place, originals, monkeypatch, capsys, name, where, link):
    folder = place()
    root = folder.parents[1]
    name = name.format(root=str(root).strip("/"))
    if link:
        (folder / "link").symlink_to(root / "outside")
        name = "link/file"
    if where == "manifest":
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][name] = {"sha256": hashlib.sha256(b"mine").hexdigest(), "size": 4}
        (folder / MANIFEST).write_text(json.dumps(manifest))
    else:
        (folder / ".rows.csv.0.tmp").write_bytes(b"theirs")
        moves = {"target": {".rows.csv.0.tmp": name}, "source": {name: "rows.csv"}, "swapped": {"run.json": "rows.csv"}}
        (folder / PENDING).write_text(json.dumps(moves[where]))
    assert drive(folder, originals / "own", monkeypatch, capsys)


def leaves(value, path=()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [leaf for key, item in items for leaf in leaves(item, (*path, key))]


@pytest.mark.slow
@determined(30)
@given(st.sampled_from(DOCUMENTS), st.randoms(use_true_random=False), st.sampled_from(JUNK))
def test_junk_anywhere_in_a_document_is_refused_in_words_or_kept(place, originals, monkeypatch, capsys, name, random, junk):
    folder = place()
    document = json.loads((folder / name).read_text())
    *outer, last = random.choice(leaves(document)[1:])
    holder = document
    for part in outer:
        holder = holder[part]
    holder[last] = "JUNK"
    (folder / name).write_text(json.dumps(document).replace('"JUNK"', junk))
    rehash(folder, name)
    verdict = drive(folder, originals / "own", monkeypatch, capsys)
    no_json = junk in ("1e999", "NaN", "Infinity", '{"a": 1, "a": 2}', '"\\ud800"') or junk.startswith("[" * 2000)
    assert verdict or not no_json or name == LEDGER


CELLS = (
    "",
    "nan",
    "inf",
    "-1",
    "1e999",
    "0",
    "9" * 400,
    "x",
    "\x1b[2J",
    "<script>alert(1)</script>",
    "../up",
    "a|b](http://x)",
    "{}",
    "[]",
)


@pytest.mark.slow
@determined(30)
@given(st.sampled_from(COLUMNS), st.sampled_from(CELLS))
def test_junk_in_a_cell_is_refused_in_words_or_kept(place, originals, monkeypatch, capsys, column, cell):
    folder = place()
    edit_cells(folder, {column: lambda old: cell})
    verdict = drive(folder, originals / "own", monkeypatch, capsys)
    ruled = column in ("value", "ci_low", "ci_high", "n", "unit", "metric", "experiment", "params")
    assert verdict or not ruled or (column, cell) == ("params", "{}")  # a row of its own, which no sample determines


def edit_cells(folder, changes, row=1):
    """Edit cells of a row of rows.csv, with the manifest's hash made anew."""
    lines = list(csv.reader(io.StringIO((folder / "rows.csv").read_text())))
    for column, change in changes.items():
        place = COLUMNS.index(column)
        lines[row][place] = change(lines[row][place])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    (folder / "rows.csv").write_text(text.getvalue())
    rehash(folder, "rows.csv")


def times(factor):
    return lambda cell: repr(float(cell) * factor)


RULED = {
    "unit": ({"unit": lambda cell: "ms"}, "the unit is 'ms', but the unit of step_time_s is 's'"),
    "interval": ({"ci_low": times(2.0)}, "lies outside its own interval"),
    "interval out of order": ({"ci_low": times(1.5), "ci_high": times(0.5)}, "lies outside its own interval"),
    "limit": ({"limit": lambda cell: "1.0"}, "beyond its limit"),
    "check": ({"check_error": lambda cell: "1.0"}, "failed its check"),
    "samples": ({"n": lambda cell: "31"}, "has n = 31, but there are 30 samples"),
    "faster throughout": ({c: times(0.5) for c in ("value", "ci_low", "ci_high")}, "its samples give"),
    "narrower interval": ({"ci_high": times(0.999)}, "its samples give"),
    "clock in kHz": ({"clock_mhz": times(1000.0)}, "clocks are in MHz"),
    "another metric": ({"metric": lambda cell: "luck"}, "unknown metric 'luck'"),
    "path": ({"experiment": lambda cell: "../../up"}, "cannot be a part of a file's name"),
    "another experiment": ({"experiment": lambda cell: "other"}, "has 3 rows in rows.csv, but experiments.json says 4"),
    "no reason": ({"value": lambda cell: ""}, "value is null without a reason"),
}


@pytest.mark.parametrize(("changes", "said"), RULED.values(), ids=RULED)
def test_an_edited_row_with_its_hash_made_anew_is_refused_by_its_rule(place, originals, monkeypatch, capsys, changes, said):
    folder = place()
    edit_cells(folder, changes)
    assert drive(folder, originals / "own", monkeypatch, capsys)
    assert said in command(monkeypatch, capsys, "verify", folder)[1]


def edit_document(folder, name, change):
    document = json.loads((folder / name).read_text())
    change(document)
    (folder / name).write_text(json.dumps(document))
    rehash(folder, name)


ENTRY, ENTRY_SCORED = f"{NOTEBOOK}/{OWN}", f"{NOTEBOOK}/{SCORED}"
# A built-in metric without its rules: rows that break them would pass.
LENIENT = {"name": "step_time_s", "unit": "s", "direction": "none", "meaning": "one optimizer step, median"}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("experiments.json", lambda d: d[ENTRY].update(rows=3), "has 4 rows in rows.csv, but experiments.json says 3"),
        ("experiments.json", lambda d: d.update({"a/b": d.pop(ENTRY)}), "a/b has 0 rows"),
        ("experiments.json", lambda d: d.update(other=d.pop(ENTRY)), "experiment is '', which cannot be"),
        ("experiments.json", lambda d: d.clear(), "has rows in rows.csv and no entry in experiments.json"),
        ("experiments.json", lambda d: d[ENTRY]["provenance"].update(environment="0" * 16), "which environments.json lacks"),
        ("experiments.json", lambda d: d.update({"../../up/x": {"input_hash": "h", "rows": 0}}), "notebook is '..', which"),
        ("environments.json", lambda d: next(iter(d.values())).update(torch="9"), "does not match its digest"),
        ("run.json", lambda d: d.update(schema=2), "run has schema 2"),
        ("metrics.json", lambda d: d.clear(), "unknown metric 'own_score': the run does not define it"),
        ("metrics.json", lambda d: d.update({ENTRY: d.pop(ENTRY_SCORED)}), "unknown metric 'own_score'"),
        ("metrics.json", lambda d: d.update({ENTRY: d[ENTRY_SCORED]}), f"defines own_score for '{ENTRY}', which has no row"),
        ("metrics.json", lambda d: d[ENTRY_SCORED].append(d[ENTRY_SCORED][0]), "defines a metric twice"),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(unit="s"), "the unit is 'points', but the unit of own_score is 's'"),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(direction="lower"), "lies beyond its limit"),
        (
            "metrics.json",
            lambda d: d[ENTRY_SCORED][0].update(direction="up"),
            "direction must be 'higher', 'lower' or 'none', not 'up'",
        ),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(needs_interval=True), "lacks n or the 95 % confidence interval"),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(needs_check=1), "needs_check must be a valid boolean, not 1"),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(meaning="two\nlines"), "meaning is 'two\\nlines'"),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(unit="<b>"), "metric unit is '<b>'"),
        ("metrics.json", lambda d: d[ENTRY_SCORED][0].update(colour="red"), "unknown field"),
        ("metrics.json", lambda d: d[ENTRY_SCORED].append({**LENIENT}), "'step_time_s' has two definitions: direction"),
        ("run.json", lambda d: d["environment"].update(gpus=[{"name": 1}]), "gpus[0].name must be a valid string, not 1"),
        ("predictions.json", lambda d: d[0].update(guess="fast"), "guess must be a valid number, not 'fast'"),
    ],
)
def test_documents_that_contradict_each_other_are_refused(place, originals, monkeypatch, capsys, name, change, said):
    folder = place()
    edit_document(folder, name, change)
    assert drive(folder, originals / "own", monkeypatch, capsys)
    assert said in command(monkeypatch, capsys, "verify", folder)[1]


def written(table, **options):
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def repeated_text():
    """A megabyte of text a thousand and some times: small on disk, gigabytes when decoded."""
    return written(pa.table({"text": pa.DictionaryArray.from_arrays(np.zeros(1100, dtype=np.int32), ["x" * 2**20])}))


def with_pandas_metadata():
    table = pa.Table.from_pandas(rows_and_samples(OWN)[1], preserve_index=False)
    pandas_metadata = {"columns": [{"name": "time_s", "numpy_type": "os.system", "pandas_type": "object"}], "index_columns": 7}
    return written(table.replace_schema_metadata({b"pandas": json.dumps(pandas_metadata).encode()}))


def slower():
    _, samples = rows_and_samples(OWN)
    samples["time_s"] *= 2
    return written(pa.Table.from_pandas(samples, preserve_index=False))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda: b"PAR1" + bytes(40) + b"PAR1", "unreadable samples"),
        (lambda: written(pa.table({"x": np.zeros(20_000_001, dtype=bool)})), "20000001 rows"),
        (lambda: written(pa.table({name: np.zeros(17_000_000, dtype=bool) for name in "abcdef"})), "102000000 values"),
        (repeated_text, "bytes are more than Hyperion records"),
        (lambda: written(pa.table({"variant": pa.array([b"\xff"]).view("string")})), "unreadable samples"),
        (lambda: written(pa.table({"x": [b"pickled"]})), "column of type binary"),
        (lambda: written(pa.table({"x": [{"a": 1}]})), "column of type struct"),
        (lambda: written(pa.table([[1], [2]], names=["x", "x"])), "two columns of the same name"),
        (slower, "its samples give"),
        (
            lambda: written(pa.table({"variant": ["v"], "dtype": [""], "params": ["{"], "time_s": [1.0]})),
            "not a valid JSON document",
        ),
        (lambda: written(pa.table({"variant": ["v"], "dtype": [""], "params": ["{}"], "time_s": [-1.0]})), "not positive num"),
    ],
)
def test_samples_that_are_none_are_refused(place, originals, monkeypatch, capsys, content, said):
    folder = place()
    (folder / SAMPLES).write_bytes(content())
    rehash(folder, SAMPLES)
    assert drive(folder, originals / "own", monkeypatch, capsys)
    assert said in command(monkeypatch, capsys, "verify", folder)[1]


def test_types_of_python_that_a_file_of_samples_names_are_not_made(place):
    folder = place()
    sound = Run.open(folder).samples(NOTEBOOK, OWN)
    (folder / SAMPLES).write_bytes(with_pandas_metadata())
    rehash(folder, SAMPLES)
    pd.testing.assert_frame_equal(Run.open(folder).samples(NOTEBOOK, OWN), sound)


@determined(20)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_bytes_flipped_in_samples_are_refused_in_words_or_read(place, position, flip):
    """The manifest vouches for the flipped byte; a sample that does not move the median is another valid run."""
    folder = place()
    content = bytearray((folder / SAMPLES).read_bytes())
    content[position % len(content)] ^= flip
    (folder / SAMPLES).write_bytes(content)
    rehash(folder, SAMPLES)
    try:
        with watched():
            statements = verify_run(Run.open(folder))
    except HyperionError as error:
        assert str(folder) in str(error.where) or ENTRY in str(error.where)
        assert "restore" in error.next_step or "record numbers" in error.next_step
    else:
        assert "samples: 2 files are readable and contain 62 samples" in statements


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ("{}", "KeyError: 'm'"),
        ('{"m": 1}', "KeyError: 'n'"),
        ('{"m": "x", "n": [], "k": {}}', "TypeError: can't multiply"),
        ('{"cache": 1, "k": 0, "m": 0, "n": 0}', None),  # a product of nothing is a point like others
    ],
)
def test_figures_of_rows_that_lack_their_parameters_are_refused_in_words(place, originals, monkeypatch, capsys, params, fault):
    folder = place("pictured")
    edit_cells(folder, {"params": lambda cell: params}, row=2)  # of the rate, which the figure shows
    material = Material(Run.open(folder))
    if fault is None:
        assert report_page(material) and reference_readme(material.run, material)
    else:
        with watched(), pytest.raises(HyperionError) as caught:
            reference_readme(material.run, material)
        assert caught.value.what.startswith(f"figure 'gemm' cannot be made from these rows: {fault}")
        assert "hyperion verify" in caught.value.next_step
        # The report is written without the figure, and says why.
        assert f"The figure &#x27;gemm&#x27; is missing: {escape(caught.value.what)}" in report_page(material)
    assert not drive(folder, originals / "own", monkeypatch, capsys)
    edit_cells(folder, {"params": lambda cell: params}, row=1)  # of the time, which no figure shows
    drive(folder, originals / "own", monkeypatch, capsys)


def test_every_string_of_a_run_is_escaped_on_every_page(place):
    folder = place()
    script = "<script>alert(1)</script>"
    changes = {
        "variant": script,
        "data_source": f'{script}" onload="x',
        "dtype": "a|b",
        "limit_source": "no limit: ![](http://x)",
    }
    edit_cells(folder, {column: lambda cell, text=text: text for column, text in changes.items()} | {"limit": lambda cell: ""})
    edit_document(folder, "run.json", lambda d: d.update(profile=f"`{script}"))
    edit_document(folder, "run.json", lambda d: d["environment"]["cpu"].update(name=script))
    edit_document(folder, "metrics.json", lambda d: d[ENTRY_SCORED][0].update(meaning=f"{script} ![](http://x)"))
    material = Material(Run.open(folder))
    html = report_page(material)
    assert "<script" not in html and html.count("&lt;script&gt;") >= 4 and '" onload="' not in html
    page = reference_readme(material.run, material)["README.md"].decode()
    visible = [part for place, part in enumerate(page.split("`")) if place % 2 == 0]  # the rest is inline code
    assert "<script" not in "".join(visible) and "![](http" not in page and "a\\|b" in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(line.replace("\\|", "").strip("|").split("|")) >= 2 for line in lines)


def test_the_order_of_names_says_nothing_about_the_run(place):
    """A folder with an interrupted commit reads as the finished one, and is finished by the next writer alone."""
    folder = place()
    original = Run.open(folder).rows()
    os.rename(folder / "rows.csv", folder / ".rows.csv.7.tmp")
    (folder / PENDING).write_text(json.dumps({".rows.csv.7.tmp": "rows.csv"}))
    before = snapshot(folder)
    assert Run.open(folder).rows() == original and len(Run.open(folder).verify()) == len(FILES) - 1
    assert snapshot(folder) == before
    Run.open(folder).write({"note.txt": b"written"})
    assert (folder / "rows.csv").exists() and not (folder / PENDING).exists()
    with pytest.raises(HyperionError):
        Run.open(folder).write({"../note.txt": b"written"})
