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
