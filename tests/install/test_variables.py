"""The registry of environment variables is proved by the installed libraries; the linter, and the generated environment."""

import re
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from hyperion.errors import HyperionError
from hyperion.install.assignments import _of_python, _of_shell
from hyperion.install.variables import SHELLS, Setting, as_script, contains_name, fictional, lint, minimal_environment, registry

SITE = Path(sysconfig.get_paths()["purelib"])
DOCUMENTED = ("RCCL_P2P_ENABLE", "RCCL_TIMEOUT", "TORCH_NCCL_TIMEOUT", "PYTORCH_ROCM_DEVICE", "RCCL_DEBUG", "RCCL_DEVICES")
PROVED = [(name, file) for name, one in registry().items() for file in one.files if (SITE / file).is_file()]


def kinds(*assignments: str) -> list[tuple[str, str]]:
    found = lint([tuple(one.split("=", 1)) for one in assignments])
    assert all(finding.what and finding.instead for finding in found)
    return [(finding.kind, finding.name) for finding in found]


def test_names_are_unique_and_every_variable_has_a_source():
    tables = tomllib.loads((Path(__file__).parents[2] / "hyperion/install/variables.toml").read_text())
    names = [name for reader in tables["reader"] for name in reader["variables"]] + list(tables["fiction"])
    assert len(names) == len(set(names)) and set(DOCUMENTED) <= set(fictional())
    assert all(one.readers and one.effect and one.source for one in registry().values())


@pytest.mark.parametrize(("name", "file"), PROVED)
def test_the_installed_library_contains_the_name(name, file):
    assert contains_name(SITE / file, name), f"{file} does not read {name}: correct variables.toml"


def test_enough_of_the_registry_is_proved_here():
    assert len({name for name, _ in PROVED}) >= 25


@pytest.mark.slow
def test_no_installed_library_contains_a_fictional_name():
    files = [*SITE.glob("torch/lib/lib*.so*"), *SITE.glob("nvidia/nccl/lib/lib*.so*"), *SITE.glob("torch/distributed/*.py")]
    assert len(files) > 20
    assert [(name, file) for file in files for name in fictional() if contains_name(file, name)] == []


def test_a_part_of_a_longer_name_is_no_proof(tmp_path):
    (tmp_path / "lib.so").write_bytes(b"\0NCCL_P2P_DISABLE_X\0RCCL_P2P_LEVEL\0")
    assert not contains_name(tmp_path / "lib.so", "NCCL_P2P_DISABLE")
    assert contains_name(tmp_path / "lib.so", "RCCL_P2P_LEVEL") and not contains_name(tmp_path / "lib.so", "CCL_P2P_LEVEL")


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_fictional_variables_of_the_guides_are_named(name):
    assert kinds(f"{name}=1") == [("unknown", name)]


@pytest.mark.parametrize(
    ("assignments", "found"),
    [
        (["HSA_ENABLE_SDMA=0", "HSA_ENABLE_SDMA=1"], [("contradiction", "HSA_ENABLE_SDMA")]),
        (["HSA_ENABLE_SDMA=0", "HSA_ENABLE_SDMA=0"], []),
        (["HSA_ENABLE_SDMA=0", "HSA_ENABLE_SDMA=$SDMA"], []),
        (["MODEL=7b", "MODEL=70b"], []),
        (["HSA_TOOLS_LIB=1"], [("harmful", "HSA_TOOLS_LIB")]),
        (["HSA_TOOLS_LIB=librocprofiler64.so"], []),
        (["TORCH_NCCL_ASYNC_ERROR_HANDLING=0"], [("harmful", "TORCH_NCCL_ASYNC_ERROR_HANDLING")]),
        (["TORCH_NCCL_ASYNC_ERROR_HANDLING=1"], []),
        (["AMD_LOG_LEVEL=4"], [("harmful", "AMD_LOG_LEVEL")]),
        (["MIOPEN_FIND_ENFORCE=4"], [("harmful", "MIOPEN_FIND_ENFORCE")]),
        (["MIOPEN_FIND_ENFORCE=search_db_update"], [("harmful", "MIOPEN_FIND_ENFORCE")]),
        (["MIOPEN_FIND_ENFORCE=3"], []),
        (["MIOPEN_FIND_ENFORCE=SEARCH"], []),
        (["TORCH_CUDA_ARCH_LIST=8.0;9.0a"], []),
        (["NCCL_DEBUG=info"], [("harmful", "NCCL_DEBUG")]),
        (["NCCL_DEBUG=WARN"], []),
        (["DS_ACCELERATOR="], [("harmful", "DS_ACCELERATOR")]),
        (["NCCL_P2P_DISABLE=1", "NCCL_P2P_LEVEL=NVL"], [("contradiction", "NCCL_P2P_LEVEL")]),
        (["NCCL_P2P_DISABLE=0", "NCCL_P2P_LEVEL=NVL"], []),
        (["HIP_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=1"], [("contradiction", "HIP_VISIBLE_DEVICES")]),
        (["HIP_VISIBLE_DEVICES=0", "CUDA_VISIBLE_DEVICES=0"], []),
        (["PATH=/bin", "MY_NCCL_DEBUG=1"], []),
    ],
)
def test_harmful_values_and_contradictions(assignments, found):
    assert kinds(*assignments) == found


def linted(text: str) -> list[tuple[str, str]]:
    return [(one.kind, one.name) for one in lint(_of_shell(text))]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA_VISIBLE_DEVICES=0 python a.py &\nCUDA_VISIBLE_DEVICES=1 python b.py &\nwait",
        "export CUDA_VISIBLE_DEVICES=0,1\nCUDA_VISIBLE_DEVICES=1 python b.py",
        "if [ $A ]; then export NCCL_IB_DISABLE=0; else export NCCL_IB_DISABLE=1; fi",
        "if a\nthen\n  export NCCL_IB_DISABLE=0\nelif b\nthen\n  export NCCL_IB_DISABLE=1\nelse export NCCL_IB_DISABLE=2\nfi",
        "case $A in\n x|y) export NCCL_IB_DISABLE=0;;\n z)\n  export NCCL_IB_DISABLE=1 ;;\nesac",
        "[ $A ] && export NCCL_IB_DISABLE=0 || export NCCL_IB_DISABLE=1",
        "one() {\n  export NCCL_IB_DISABLE=0\n}\ntwo() { export NCCL_IB_DISABLE=1; }",
        "(export NCCL_IB_DISABLE=0; a) & (export NCCL_IB_DISABLE=1; b)",
        "for n in 1 2; do export NCCL_IB_DISABLE=0; done\nexport NCCL_IB_DISABLE=1",
        "export NCCL_IB_DISABLE=0; unset NCCL_IB_DISABLE; export NCCL_IB_DISABLE=1",
        "docker run -e NCCL_IB_DISABLE=0 a\ndocker run --env NCCL_IB_DISABLE=1 b",
        "mpirun -x NCCL_P2P_DISABLE=1 a\nmpirun -x NCCL_P2P_LEVEL=NVL b",
        "export NCCL_P2P_DISABLE=1\na\nunset NCCL_P2P_DISABLE\nexport NCCL_P2P_LEVEL=NVL",
        "bash -c 'export NCCL_IB_DISABLE=0; a'\nexport NCCL_IB_DISABLE=1",
    ],
)
def test_settings_of_different_commands_or_branches_do_not_contradict_each_other(text):
    assert linted(text) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("export NCCL_IB_DISABLE=0\na\nexport NCCL_IB_DISABLE=1", "NCCL_IB_DISABLE"),
        ("ENV NCCL_IB_DISABLE=0\nRUN a\nENV NCCL_IB_DISABLE 1", "NCCL_IB_DISABLE"),
        ("export NCCL_IB_DISABLE=0; if a; then b; fi\n(c)\ncase d in e) f;; esac\nexport NCCL_IB_DISABLE=1", "NCCL_IB_DISABLE"),
        ("if a; then export NCCL_IB_DISABLE=0; export NCCL_IB_DISABLE=1; fi", "NCCL_IB_DISABLE"),
        ("docker run -e NCCL_IB_DISABLE=0 -e NCCL_IB_DISABLE=1 a", "NCCL_IB_DISABLE"),
        ("export NCCL_P2P_DISABLE=1\nNCCL_P2P_LEVEL=NVL a\nNCCL_P2P_LEVEL=NVL b", "NCCL_P2P_LEVEL"),
        ("if a; then export NCCL_P2P_DISABLE=1 NCCL_P2P_LEVEL=NVL; fi", "NCCL_P2P_LEVEL"),
        ("bash -c 'export NCCL_IB_DISABLE=0; export NCCL_IB_DISABLE=1'", "NCCL_IB_DISABLE"),
    ],
)
def test_settings_of_the_same_program_contradict_each_other(text, name):
    assert linted(text) == [("contradiction", name)]


def test_the_blocks_of_a_python_program_are_told_apart():
    one, other = ("os.environ['NCCL_IB_DISABLE'] = '0'", "os.environ['NCCL_IB_DISABLE'] = '1'")
    apart = f"if a:\n    {one}\nelse:\n    {other}\nrun(env={{'NCCL_IB_DISABLE': '2'}})\nrun(env={{'NCCL_IB_DISABLE': '3'}})\n"
    assert lint(_of_python(apart)) == []
    assert [found.kind for found in lint(_of_python(f"{one}\nwith a:\n    {other}\n"))] == ["contradiction"]


@pytest.mark.parametrize(
    ("name", "step"), [("HYPERION_RESULT", "use HYPERION_RESULTS"), ("HYPERION_X", "hyperion env --variables")]
)
def test_a_misspelt_variable_of_hyperion_is_named(name, step):
    (found,) = lint([(name, "1")])
    assert (found.kind, found.name) == ("unknown", name) and step in found.instead
    assert lint([("HYPERION_RESULTS", "/runs"), ("HYPERION_DATA_MIRROR", "/data")]) == []


def test_the_registry_has_every_variable_that_hyperion_reads():
    root = Path(__file__).parents[2]
    sources = [*root.glob("hyperion/**/*.py"), *root.glob("hyperion/**/*.sh"), root / "Makefile"]
    read = {name for file in sources for name in re.findall(r"\bHYPERION_[A-Z_]+\b", file.read_text("utf-8"))}
    listed = {name: one for name, one in registry().items() if name.startswith("HYPERION_")}
    assert {name for name, one in listed.items() if not one.readers.startswith("the tests")} == read
    for name, one in listed.items():
        assert name in (root / one.source.replace(": ", "/")).read_text("utf-8"), f"{one.source} does not read {name}"


def test_a_misspelt_name_of_a_known_family_is_found_by_searching_the_libraries(tmp_path):
    for name in ("torch/lib/libtorch.so", "nvidia/nccl/lib/libnccl.so.2"):
        library = tmp_path / name
        library.parent.mkdir(parents=True)
        library.write_bytes(b"\0TORCH_NCCL_NEW_OPTION\0")
    assignments = [("NCCL_DEBUGG", "WARN"), ("TORCH_NCCL_NEW_OPTION", "1"), ("EDITOR", "vi")]
    assert [(one.kind, one.name) for one in lint(assignments, tmp_path)] == [("unlisted", "NCCL_DEBUGG")]
    assert lint(assignments) == []


@pytest.mark.parametrize("name", ["NCCL_SOCKET_NTHREADS", "HIP_PATH", "MIOPEN_LOG_LEVEL"])
def test_a_name_whose_library_is_not_installed_is_unknown_here(tmp_path, name):
    assert [(one.kind, one.name) for one in lint([(name, "4")], tmp_path, tmp_path)] == [("unknown here", name)]
    for library in ("librccl.so.1", "libamdhip64.so.7", "libMIOpen.so.1"):
        (tmp_path / library).write_bytes(b"\0")
    assert [(one.kind, one.name) for one in lint([(name, "4")], tmp_path, tmp_path)] == [("unlisted", name)]
    (tmp_path / "libany.so").write_bytes(f"\0{name}\0".encode())
    assert lint([(name, "4")], tmp_path, tmp_path) == []


def test_the_environment_is_minimal_and_its_own_linter_has_no_finding():
    alone = minimal_environment(cores=16, devices=1)
    assert [one.name for one in alone] == ["PYTHONNOUSERSITE"]
    node = minimal_environment(64, 8, {"TRITON_CACHE_DIR": "/scratch/triton"})
    values = {one.name: one.value for one in node}
    assert values["OMP_NUM_THREADS"] == "8" and values["TRITON_CACHE_DIR"] == "/scratch/triton"
    assert lint(values.items()) == [] and set(values) <= set(registry()) and all(one.why for one in node)
    assert {one.name: one.value for one in minimal_environment(4, 8)}["OMP_NUM_THREADS"] == "1"


@pytest.mark.process
@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_gives_the_values_in_the_shell(shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    hostile = [Setting("A", "two 'quoted' words", "a"), Setting("B", '$HOME `id` \\ "', "b"), Setting("C", "", "c")]
    script = as_script(hostile, shell) + "".join(f'printf "%s\\n" "${name}"\n' for name in "ABC")
    assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0
    done = subprocess.run([shell], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "".join(f"{one.value}\n" for one in hostile)


def test_fish_gets_its_own_quoting_and_another_shell_is_refused():
    assert as_script([Setting("A", "it's \\", "why")], "fish") == "# why\nset -gx A 'it\\'s \\\\'\n"
    with pytest.raises(HyperionError, match="unknown shell"):
        as_script([], "csh")
