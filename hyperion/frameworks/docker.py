"""The command line that runs a script of this interface in a container."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperion.frameworks.config import GPU_COUNTS, Config

_INSIDE = "/hyperion"
# ROCm needs the kernel driver and the render nodes. Its profilers and RCCL need ptrace and locked memory.
_DEVICES = {"amd": ["--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--cap-add=SYS_PTRACE", "--ulimit=memlock=-1"]}


def docker_command(
    config: Config, root: Path, platform: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Return the command that runs train_<platform>.sh in a container with the checkout as a volume.

    Args:
        config: the configuration.
        root: the checkout.
        platform: "amd".
        arguments: arguments of the script.
        environment: variables of this process. Those that the script reads are passed on.
    """
    variables = [name for name in ("FRAMEWORKS", GPU_COUNTS[platform]) if environment.get(name)]
    return [
        *("docker", "run", "--rm", "--ipc=host", "--network=host", f"--shm-size={config.docker.shm_size}"),
        *_DEVICES[platform],
        "--env=PYTHON=python3",  # the image's own: the checkout's environment was made on the host
        *(f"--env={name}={environment[name]}" for name in variables),
        f"--volume={root}:{_INSIDE}",
        f"--workdir={_INSIDE}",
        config.docker.image,
        *("bash", f"phase2_development/frameworks/train_{platform}.sh", *arguments),
    ]
