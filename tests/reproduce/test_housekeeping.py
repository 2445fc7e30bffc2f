from hyperion.reproduce.housekeeping import removable, remove
from hyperion.reproduce.runs import claimed_run


def test_caches_go_and_runs_and_data_only_when_asked(tmp_path):
    for name in (".pytest_cache", "hyperion/x/__pycache__", "phase1_x/.ipynb_checkpoints", ".venv/lib/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    results, data = tmp_path / "results", tmp_path / "data"
    for name in ("reference/h100", "old", "no-run", "relaunch/A/1"):
        (results / name).mkdir(parents=True)
    for name in ("old", "relaunch/A/1"):
        (results / name / "run.json").write_text("{}")
    (results / "latest").symlink_to("old")
    (data / "raw").mkdir(parents=True)
    (data / "README.md").write_text("")

    def names(**options):
        return {str(path.relative_to(tmp_path)) for path in removable(tmp_path, results, data, **options)}

    caches = {".pytest_cache", "hyperion/x/__pycache__", "phase1_x/.ipynb_checkpoints"}
    assert names() == caches
    assert names(staged_data=True) == caches | {"data/raw"}
    with claimed_run(results, "live", {"profile": "smoke"}, {}):
        assert names(runs=True) == caches | {"results/old", "results/latest", "results/relaunch"}
    for path in removable(tmp_path, results, data, runs=True, staged_data=True):
        remove(path)
    assert names(runs=True, staged_data=True) == set()
    assert (results / "reference/h100").is_dir() and (data / "README.md").is_file()
