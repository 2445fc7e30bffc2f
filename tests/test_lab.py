import os
import socket
import sys

import pytest

from hyperion import cli
from hyperion.errors import HyperionError


def test_a_taken_port_is_passed_over():
    first = cli.free_port(18800)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert cli.free_port(first) > first
        with pytest.raises(HyperionError, match="in use") as caught:
            cli.lab(port=first)
        assert caught.value.where == f"127.0.0.1:{first}"


def test_the_server_listens_on_loopback_only_and_the_token_is_not_in_its_arguments(tmp_path):
    pytest.importorskip("jupyterlab")
    command = cli.lab_command(tmp_path, 9001)
    assert command[0] == sys.executable and "--ip=127.0.0.1" in command and f"--ServerApp.root_dir={tmp_path}" in command
    assert {"--LabApp.news_url=None", "--LabApp.extension_manager=readonly"} <= set(command), "nothing opens a connection"
    assert not any("token" in argument for argument in command)
    assert "--log-level=WARN" in command, "its log repeats the address without the token"


def test_the_reader_is_not_asked_about_news(monkeypatch, tmp_path):
    settings = pytest.importorskip("jupyterlab_server.settings_utils")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path))
    variables = cli.lab_environment("secret")
    assert variables["JUPYTER_TOKEN"] == "secret" and variables["JUPYTER_CONFIG_PATH"].startswith(f"{tmp_path}{os.pathsep}")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", variables["JUPYTER_CONFIG_PATH"])
    overrides, error = settings._get_overrides(str(tmp_path))
    assert not error and overrides["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    (tmp_path / "labconfig").mkdir()
    (tmp_path / "labconfig/default_setting_overrides.json").write_text(
        '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "true"}}'
    )
    overrides, _ = settings._get_overrides(str(tmp_path))
    assert overrides["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "true"  # the user's own answer


def test_the_lines_tell_the_address_and_the_way_from_elsewhere():
    here, elsewhere, stop = cli.lab_lines(9001, "secret")
    assert "Ctrl-C" in stop
    assert "http://127.0.0.1:9001/lab/tree/lab?token=secret" in here
    assert "ssh -N -L 9001:127.0.0.1:9001" in elsewhere and socket.gethostname() in elsewhere


def test_the_reader_gets_copies_and_keeps_what_was_changed(tmp_path):
    originals = [tmp_path / "phase1_x/01_a.ipynb", tmp_path / "phase2_y/02_b.ipynb"]
    for original in originals:
        original.parent.mkdir()
        original.write_text("first")
    assert cli.copy_notebooks(tmp_path) == []
    a, b = tmp_path / "lab/phase1_x/01_a.ipynb", tmp_path / "lab/phase2_y/02_b.ipynb"
    assert a.read_text() == b.read_text() == "first"
    a.write_text("my answer")
    assert cli.copy_notebooks(tmp_path) == [] and a.read_text() == "my answer"
    for original in originals:
        original.write_text("second")
    for _ in range(2):
        (line,) = cli.copy_notebooks(tmp_path)
        assert line.startswith("lab/phase1_x/01_a.ipynb has your changes") and a.read_text() == "my answer"
        assert b.read_text() == "second"
    a.rename(tmp_path / "lab/mine.ipynb")
    assert cli.copy_notebooks(tmp_path) == [] and a.read_text() == "second"
    assert all(original.read_text() == "second" for original in originals)


@pytest.mark.parametrize("record", ["", "[]", '{"phase1_x/01_a.ipynb"', None])
def test_without_a_readable_record_an_untouched_copy_is_adopted_and_a_changed_one_kept(tmp_path, record):
    for name in ("01_a", "02_b"):
        (tmp_path / "phase1_x").mkdir(exist_ok=True)
        (tmp_path / f"phase1_x/{name}.ipynb").write_text("first")
    cli.copy_notebooks(tmp_path)
    (tmp_path / "lab/phase1_x/02_b.ipynb").write_text("mine")
    (tmp_path / "lab/.copied.json").unlink()
    if record is not None:
        (tmp_path / "lab/.copied.json").write_text(record)
    (line,) = cli.copy_notebooks(tmp_path)
    assert "02_b" in line and (tmp_path / "lab/phase1_x/02_b.ipynb").read_text() == "mine"
    (tmp_path / "phase1_x/01_a.ipynb").write_text("second")
    cli.copy_notebooks(tmp_path)
    assert (tmp_path / "lab/phase1_x/01_a.ipynb").read_text() == "second"


def test_where_there_are_no_notebooks_nothing_is_made(tmp_path):
    assert cli.copy_notebooks(tmp_path) == [] and list(tmp_path.iterdir()) == []


def test_a_user_without_a_password_entry_is_named_by_number(monkeypatch):
    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert f" {os.getuid()}@" in cli.lab_lines(9001, "secret")[1]


def test_without_jupyterlab_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(HyperionError, match="not installed"):
        cli.lab_command(tmp_path, 9001)
