"""The command line that runs a script of this interface in a container."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperion.errors import HyperionError
from hyperion.frameworks.config import GPU_COUNTS, MEGATRON_DEEPSPEED, OUTPUT, PRIMUS, Config, RocmSettings
from hyperion.frameworks.plan import output_folder
from hyperion.hardware.facts import VISIBLE_DEVICE_VARIABLES
from hyperion.paths import expanded

_INSIDE = "/hyperion"
_DATA, _MIRROR = "HYPERION_DATA", "HYPERION_DATA_MIRROR"  # folders that may lie outside the checkout
# ROCm needs the kernel driver and the render nodes. Its profilers and RCCL need ptrace and locked memory.
_DEVICES = {"amd": ["--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--cap-add=SYS_PTRACE", "--ulimit=memlock=-1"]}
_ROCM = RocmSettings(nccl_debug="WARN").variables()  # all variables, because no setting is ""


def docker_command(
    config: Config,
    root: Path,
    platform: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    config_file: Path | None = None,
) -> list[str]:
    """Return the command that runs train_<platform>.sh in a container with the checkout as a volume.

    The configuration file, and the files and folders that it or the environment names, have the same paths in the container.
    Relative paths are relative to the checkout.

    Args:
        config: the configuration, with environment variables applied.
        root: the checkout.
        platform: "amd".
        arguments: arguments of the script.
        environment: variables of this process. Those that the script reads are passed on.
        config_file: the file of the configuration.

    Raises:
        HyperionError: an argument names a folder that the container does not have.
    """
    if any(argument.partition("=")[0] == "--output-dir" for argument in arguments):
        what = "--output-dir cannot be passed to a container"
        raise HyperionError(what, where="hyperion frameworks docker", next_step=f"set {OUTPUT}= instead")
    passed = ("FRAMEWORKS", GPU_COUNTS[platform], *_ROCM, *VISIBLE_DEVICE_VARIABLES)
    variables = {name: environment[name] for name in passed if environment.get(name)}
    folders = {OUTPUT: str(output_folder(config)) if config.paths.output_dir or environment.get("HYPERION_RESULTS") else ""}
    folders |= {PRIMUS: config.paths.primus, MEGATRON_DEEPSPEED: config.paths.megatron_deepspeed}
    folders |= {name: environment.get(name, "") for name in (_DATA, _MIRROR)}
    folders = {name: str(expanded(folder).absolute()) for name, folder in folders.items() if folder}
    volumes = [*dict.fromkeys(folder for name, folder in folders.items() if name != _MIRROR)]
    file = [str(config_file.absolute())] if config_file else []
    read_only = [*file, *_inputs(config), *([folders[_MIRROR]] if _MIRROR in folders else [])]
    return [
        *("docker", "run", "--rm", "--ipc=host", "--network=host", f"--shm-size={config.docker.shm_size}"),
        *_DEVICES[platform],
        "--env=PYTHON=python3",  # the image's Python, because the checkout's environment is for the host
        *(f"--env={name}={value}" for name, value in (variables | folders).items()),
        f"--volume={root}:{_INSIDE}",
        *(f"--volume={path}:{path}" for path in volumes),
        *(f"--volume={path}:{path}:ro" for path in dict.fromkeys(read_only)),
        f"--workdir={_INSIDE}",
        config.docker.image,
        *("bash", f"phase2_development/frameworks/train_{platform}.sh"),
        *(f"--config={path}" for path in file),  # overrides the script's own --config
        *arguments,
    ]


def _inputs(config: Config) -> list[str]:
    """Return the paths outside the checkout that frameworks read: a recipe, a tokenizer, and the folder of indexed data."""
    megatron, recipe = config.frameworks.mgds, config.frameworks.nemo.recipe
    # data_path is the prefix of two files, data.bin and data.idx.
    paths = [expanded(recipe), expanded(megatron.tokenizer), expanded(megatron.data_path).parent]
    return [str(path) for path in paths if path.is_absolute() and path.exists()]
