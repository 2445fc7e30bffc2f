"""The script compilation_optimization.py: from any directory, with real weights, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from safetensors.torch import save_file

import hyperion
from hyperion.commands.compilation import CompilationRequest, main, profile_options, specifications
from hyperion.errors import HyperionError
from hyperion.experiments.compilation.compilation_models import ModelSpec, make_model
from hyperion.results import Run

pytestmark = pytest.mark.book

SCRIPT = Path(hyperion.__file__).resolve().parents[1] / "phase2_development" / "compilation_optimization.py"
SPEC = {"model": "resnet18_w4", "dtype": "fp32", "batch": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "net.safetensors"
    state = make_model(ModelSpec.model_validate(SPEC, strict=False), "cpu", seed=5).module.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


@pytest.mark.process
@pytest.mark.long
def test_from_another_directory_with_a_checkpoint(tmp_path, checkpoint):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(SCRIPT), "--base_dir", ".", "--dtype", "bf16", "--repeat", "10", "--mode", "eager"]
    command += ["--model", "resnet18_w4", "--model", "resnet18_w8", "--batch", "2", "--checkpoint", str(checkpoint)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "sha256 " in done.stdout and "resnet18_w8 is left out" in done.stdout
    assert "--repeat 10 is too small: 50 samples are taken" in done.stdout
    folder = tmp_path / "results" / "benchmarks" / "compilation"
    table = pd.read_csv(folder / "compilation.csv")
    assert list(table["variant"]) == ["eager", "default", "max-autotune", "reduce-overhead"]
    eager = table.iloc[0]
    assert eager["time_ms"] > 0 and eager["mem_gb"] > 0 and eager["reps"] >= 50 and eager["dtype"] == "bf16"
    assert eager["weights"].startswith("net.safetensors, sha256 ")
    lines = pd.DataFrame(json.loads((folder / "compilation.json").read_text()))
    pd.testing.assert_frame_equal(table, lines.astype(table.dtypes), rtol=1e-14)
    assert (folder / "compilation.png").read_bytes().startswith(b"\x89PNG")
    (run,) = (tmp_path / "results").glob("*-compilation")
    assert len(Run.open(run).samples("07_compilation_optimization", "compilation")) == eager["reps"]


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--dtype", "int8"], "'int8' is not one of fp32, bf16, fp16"),
        (["--repeat", "0"], "Invalid value for '--repeat'"),
        (["--repeat", "ten"], "Invalid value for '--repeat'"),
        (["--base_dir", "no/such/folder"], "is not a folder"),
        (["--mode", "fastest"], "'fastest' is not one of eager, default"),
        (["--batch", "0"], "Invalid value for '--batch'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
    ],
)
def test_invalid_values_are_refused_with_the_reason(capsys, arguments, why):
    assert main(arguments) == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize("model, why", [("resnet18x", "no image model"), ("gpt9", "no Transformer configuration")])
def test_an_unknown_model_is_refused_before_anything_is_measured(tmp_path, capsys, model, why):
    assert main(["--base_dir", str(tmp_path), "--model", model]) == 2
    assert why in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_refused(tmp_path, checkpoint):
    options = CompilationRequest(base_dir=tmp_path, checkpoint=checkpoint, models=("resnet18_imagenet_stem",))
    with pytest.raises(HyperionError, match="fits none of the models: resnet18_imagenet_stem: bn1.weight is missing"):
        specifications(options)


def test_a_model_named_gets_the_published_shape():
    options = CompilationRequest(models=("resnet18_imagenet_stem", "lm_d768_h12_l4"), modes=("max-autotune",))
    images, language = specifications(options)
    assert (images.batch, images.dtype, images.modes) == (32, "fp32", ("eager", "max-autotune"))
    assert (language.batch, language.sequence_length, language.vocabulary) == (8, 128, 50257)


def test_without_a_model_those_of_the_machines_profile_are_measured():
    specs = specifications(CompilationRequest(dtype="fp16", batch=3))
    assert [spec.model for spec in specs] == [spec.model for spec in profile_options().models]
    assert all((spec.dtype, spec.batch) == ("fp16", 3) for spec in specs)
    assert all(spec.modes == ("eager", "default", "max-autotune", "reduce-overhead") for spec in specs)
