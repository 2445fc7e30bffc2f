"""The install advisor on injected drivers and GPUs, and the dry run of the set-up."""

import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hyperion.install import __main__ as command
from hyperion.install import environment, overlay
from hyperion.install.advice import advise, least_nvidia_driver, support_of, training_images
from hyperion.install.machine import AMD, KernelFacts, collect_facts, decide
from hyperion.install.plan import CPU_INDEX, CUDA_INDEX, ROCM_INDEX, TORCH, Choice, choose

ROOT = Path(__file__).resolve().parents[2]


def amd(*archs: str, rocm: tuple[int, int] | None = (7, 2), kfd: str = "ok") -> KernelFacts:
    return KernelFacts(amd_archs=archs, kfd=kfd, rocm_version=rocm)


def verdicts(facts: KernelFacts) -> dict[str, str]:
    ways = advise(facts)
    assert [way.kind for way in ways] == ["wheel", "container", "conda", "native"] and all(way.why for way in ways)
    return {way.kind: way.verdict for way in ways}


@pytest.mark.parametrize(
    ("arch", "level", "wheel"),
    [
        ("gfx90a", "supported", True),
        ("gfx906", "deprecated", True),
        ("gfx900", "unsupported", True),
        ("gfx1101", "unknown", True),
        ("gfx1103", "unknown", True),
        ("gfx803", "unknown", False),
        ("gfx9999", "unknown", False),
    ],
)
def test_support_has_a_level_and_a_dated_source_or_is_unknown(arch, level, wheel):
    support = support_of(arch)
    assert (support.level, support.wheel) == (level, wheel)
    assert ("20" in support.evidence) == (level != "unknown")


def test_every_statement_of_the_table_has_a_source_and_a_date():
    tables = tomllib.loads((ROOT / "hyperion/install/support.toml").read_text())
    entries = (*tables["amd"], tables["cuda"], *tables["cuda_wheel"], *tables["image"])
    assert all(entry["source"] and entry["date"].startswith("20") for entry in entries)


def test_an_instinct_node_gets_the_wheel_of_its_rocm():
    wheel = advise(amd("gfx90a", "gfx90a"))[0]
    assert wheel.verdict == "recommended" and wheel.command.endswith(ROCM_INDEX.format(major=7, minor=2))
    assert "MI250X" in wheel.why and "2026-07-29" in wheel.why
    assert (
        "rocm6.4" in advise(amd("gfx90a", rocm=(6, 4)))[0].command
        and "torch==2.9.1" in advise(amd("gfx90a", rocm=(6, 4)))[0].command
    )


def test_an_architecture_without_a_statement_is_unknown_and_never_recommended():
    assert verdicts(amd("gfx1101"))["wheel"] == "unknown"
    assert verdicts(amd("gfx906"))["wheel"] == "possible"
    assert verdicts(amd("gfx803")) == {"wheel": "impossible", "container": "unknown", "conda": "unknown", "native": "unknown"}


def test_the_gpu_of_a_processor_without_code_in_the_wheel_is_ignored_if_another_gpu_is_usable():
    facts = amd("gfx90a", "gfx1036")
    wheel = advise(facts)[0]
    assert wheel.verdict == "recommended" and wheel.command == advise(amd("gfx90a"))[0].command
    assert wheel.why.count("gfx1036") == 1 and "ignored, because the wheels have no code for it: gfx1036" in wheel.why
    assert verdicts(facts) == verdicts(amd("gfx90a")) and choose(decide(facts)) == Choice("rocm", (7, 2))


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1036"])
def test_the_advice_for_gpus_of_both_vendors_is_for_the_one_that_the_set_up_takes(arch):
    facts = replace(amd(arch), nvidia_driver="580.159.04")
    wheel = advise(facts)[0]
    assert (decide(facts).kind, wheel.verdict) == ("cuda", "recommended") and "--index-url" not in wheel.command
    assert ("TORCH=rocm chooses it" in wheel.why) == (arch == "gfx1100")


def test_a_rocm_older_than_every_wheel_leaves_the_container():
    assert (
        verdicts(amd("gfx90a", rocm=(5, 7)))["wheel"] == "impossible"
        and verdicts(amd("gfx90a", rocm=(5, 7)))["container"] == "possible"
    )


def test_a_gpu_that_cannot_be_opened_stops_every_way_with_the_remedy():
    assert set(verdicts(amd("gfx90a", kfd="denied")).values()) == {"impossible"}
    assert "render" in advise(amd("gfx90a", kfd="denied"))[0].why
    assert set(verdicts(KernelFacts(pci=((AMD, "0x0380"),))).values()) == {"impossible"}


@pytest.mark.parametrize(
    ("driver", "verdict", "text"),
    [
        ("580.159.04", "recommended", "CUDA 13.x"),
        ("575.57", "possible", "CUDA 12.x"),
        ("525.60", "possible", "not Blackwell"),
        ("470.82", "impossible", "older than 525"),
        ("", "unknown", "unknown"),
    ],
)
def test_nvidia_drivers(driver, verdict, text):
    wheel = advise(KernelFacts(nvidia_driver=driver))[0]
    assert wheel.verdict == verdict and text in wheel.why
    assert bool(wheel.command) == (verdict in ("recommended", "possible"))
    assert wheel.command.endswith(f" --index-url {CUDA_INDEX.format(major=12, minor=6)}") == (verdict == "possible")


def test_a_release_that_the_table_does_not_list_is_unknown_and_the_index_is_named(monkeypatch):
    monkeypatch.setattr("hyperion.install.advice.TORCH", "2.99.0")
    wheel = advise(KernelFacts(nvidia_driver="550.90"))[0]
    assert (wheel.verdict, wheel.command) == ("unknown", "")
    assert CUDA_INDEX.format(major=12, minor=6) in wheel.why and "torch 2.99.0 is unknown" in wheel.why


def test_the_training_image_of_amd_is_described_for_its_gpus_only():
    (image,) = training_images(["gfx942", "gfx942"])
    assert (image.name, image.products) == ("rocm/pytorch-training:v25.6", "Instinct MI300X, MI325X")
    assert (len(image.pretraining), len(image.finetuning)) == (3, 14) and "Llama 3.1 70B" in image.pretraining
    assert not image.runs_hyperion and replace(image, torch="2.9.1", python="3.11.2").runs_hyperion
    assert not replace(image, torch="2.9.1").runs_hyperion and not replace(image, python="3.11.2").runs_hyperion
    assert training_images(["gfx90a", "gfx950"]) == [] == training_images([])


def test_a_machine_without_a_gpu_gets_the_cpu_index():
    wheel = advise(KernelFacts())[0]
    assert wheel.verdict == "recommended" and CPU_INDEX in wheel.command


def test_the_dry_run_prints_every_action_and_makes_nothing(tmp_path):
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    lines = environment.planned_actions(tmp_path, Choice("rocm", (7, 2)))
    assert f"-m venv {tmp_path}/.venv" in lines[0] and f"torch=={TORCH}" in lines[1] and "whl/rocm7.2" in lines[1]
    assert "--requirement" in lines[2] and "--editable" in lines[3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pyproject.toml", "requirements.txt"]
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("")
    assert environment.planned_actions(tmp_path, Choice("rocm", (7, 2)))[0].startswith("stop: ")
    environment.write_stamp(tmp_path / ".venv", {"state": "building"})
    assert environment.planned_actions(tmp_path, Choice("rocm", (7, 2)))[0] == f"remove {tmp_path}/.venv"


def test_the_printed_plan_can_be_pasted_into_a_shell(tmp_path):
    root = tmp_path / "my checkout"
    root.mkdir()
    (root / "requirements.txt").write_text("")
    extras = "".join(f'{name} = ["absent-server[all]>=3.0"]\n' for name in ("test", *overlay.CHAPTER_GROUPS))
    dependencies = 'dependencies = ["absent-package>=2,<3"]'
    (root / "pyproject.toml").write_text(f"[project]\n{dependencies}\n[project.optional-dependencies]\n{extras}")
    create, first, second, third, _ = environment.planned_actions(root, Choice("rocm", (7, 2)))
    python = f"{root}/.venv/bin/python"
    assert shlex.split(create)[1:] == ["-m", "venv", f"{root}/.venv"]
    assert shlex.split(first, comments=True)[0] == shlex.split(second)[0] == shlex.split(third)[0] == python
    assert f"{root}/requirements.txt" in shlex.split(second) and shlex.split(third)[-1] == str(root)
    (line,) = overlay.planned_actions(root, Path(sys.executable), ["test"])
    words = shlex.split(line)
    assert words[0] == sys.executable and {"absent-package>=2,<3", "absent-server[all]>=3.0"} <= set(words)
    assert words[words.index("--target") + 1].startswith(f"{root}/.overlay/")


def test_a_complete_environment_needs_nothing(tmp_path):
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).write_text("")
    choice, folder = Choice("rocm", (7, 2)), tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").write_text("")
    stamp = {"state": "complete", "fingerprint": environment.fingerprint(tmp_path, choice), "entries": []}
    environment.write_stamp(folder, stamp)
    assert environment.planned_actions(tmp_path, choice) == [f"nothing: {folder} is complete"]


@pytest.mark.process
def test_the_dry_run_through_the_shell_changes_nothing():
    before = {path.name for path in ROOT.iterdir()}
    script = ["sh", str(ROOT / "hyperion/install/enter.sh"), "--torch", "cpu", "--dry-run", "setup"]
    done = subprocess.run(
        script, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    )
    assert done.returncode == 0 and "build cpu (TORCH=)" in done.stdout and len(done.stdout.splitlines()) == 2, done.stderr
    assert {path.name for path in ROOT.iterdir()} == before


def test_a_dry_run_of_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--dry-run", "run", "pytest"])
    assert "--dry-run needs setup" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.version.cuda is None, reason="no NVIDIA GPU here")
def test_the_table_of_drivers_agrees_with_a_build_that_runs_on_the_gpu_of_this_machine():
    facts = collect_facts()
    assert torch.ones(3, device="cuda").sum().item() == 3
    driver, least = int((facts.nvidia_driver or "0").split(".")[0]), least_nvidia_driver(torch.version.cuda)
    assert least is not None and driver >= least
    wheel = advise(facts)[0]
    assert f"driver {facts.nvidia_driver} runs CUDA" in wheel.why and wheel.verdict != "impossible"
