"""What the container of `train_docker_amd.sh` sees of the host."""

from dataclasses import replace
from pathlib import Path

from hyperion.frameworks.config import Config, Frameworks, MegatronDeepSpeedSettings, NemoSettings
from hyperion.frameworks.docker import docker_command


def volumes(config: Config) -> list[str]:
    return [word for word in docker_command(config, Path("/checkout"), "amd", [], {}) if word.startswith("--volume=")]


def test_files_that_frameworks_read_have_the_same_paths_in_the_container(tmp_path):
    data, recipe, tokenizer = tmp_path / "data", tmp_path / "recipe.yaml", tmp_path / "tokenizer"
    for folder in (data, tokenizer):
        folder.mkdir()
    recipe.write_text("")
    megatron = MegatronDeepSpeedSettings(data_path=str(data / "wikitext_text_document"), tokenizer=str(tokenizer))
    config = replace(Config(), frameworks=Frameworks(nemo=NemoSettings(recipe=str(recipe)), mgds=megatron))
    assert volumes(config)[1:] == [f"--volume={path}:{path}:ro" for path in (recipe, tokenizer, data)]


def test_names_that_are_no_paths_are_not_mounted():
    """A tokenizer may be a name on a hub, and a relative path lies in the checkout."""
    megatron = MegatronDeepSpeedSettings(data_path="data/text_document", tokenizer="gpt2")
    config = replace(Config(), frameworks=Frameworks(mgds=megatron))
    assert volumes(config) == volumes(Config()) == ["--volume=/checkout:/hyperion"]


def test_data_outside_the_checkout_is_seen_in_the_container(tmp_path):
    environment = {"HYPERION_DATA": str(tmp_path / "data"), "HYPERION_DATA_MIRROR": str(tmp_path / "mirror")}
    words = docker_command(Config(), Path("/checkout"), "amd", [], environment)
    assert {f"--env={name}={folder}" for name, folder in environment.items()} <= set(words)
    assert {f"--volume={tmp_path}/data:{tmp_path}/data", f"--volume={tmp_path}/mirror:{tmp_path}/mirror:ro"} <= set(words)
