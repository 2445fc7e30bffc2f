"""Programs that generate text (backends): how to start them, and why one is unavailable.

A backend runs behind the front, which is a reverse proxy (see `front`). `transformers serve` and vLLM have an OpenAI-compatible
endpoint. Both run unmodified. A variant of `transformers serve` changes one setting of PyTorch (see `without_cudnn_attention`).
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hyperion.chapter.context import Table

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
UNAVAILABLE = "unavailable: "  # begins the reason of a row whose backend lacks a package
# The front and the client need these packages for every backend.
_COMMON = ("httpx", "starlette", "uvicorn")


class ServerSizes(Table):
    """Capacity limits of a server.

    Args:
        max_requests: largest number of requests that the front accepts at once. It refuses further requests.
        blocks: number of blocks in the KV cache.
        block_tokens: number of tokens in a block.
        batch_tokens: largest number of tokens in one forward pass of the model.
        max_tokens: largest number of tokens in a prompt and its answer together. Only vLLM has this option.
        start_timeout_s: largest time from the start to the first answer, in seconds.
    """

    max_requests: int
    blocks: int
    block_tokens: int
    batch_tokens: int
    max_tokens: int = 1024
    start_timeout_s: float = 120.0

    @property
    def cache_tokens(self) -> int:
        """Number of tokens in the KV cache."""
        return self.blocks * self.block_tokens


@dataclass(frozen=True)
class Backend:
    """A program with an OpenAI-compatible endpoint.

    Args:
        name: name of the program.
        module: module that `python -m` runs.
        packages: packages that it needs.
        options: function of (folder of the model, port, dtype, device, sizes) that returns the command-line options.
        log_mark: text in the log that proves continuous batching, or "" if the program always batches continuously. The
            experiment `server_answers` checks in addition that answers overlap.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    options: Callable[[Path, int, str, str, ServerSizes], list[str]]
    log_mark: str = ""

    def why_absent(self, is_installed: Callable[[str], bool] | None = None) -> str:
        """Return why this backend cannot run, or "" if all its packages are installed.

        Args:
            is_installed: function that returns whether a package is installed. By default, Python's import system is searched.
        """
        is_installed = is_installed or (lambda name: importlib.util.find_spec(name) is not None)
        missing = [name for name in (*_COMMON, *self.packages) if not is_installed(name)]
        if not missing:
            return ""
        return f"{UNAVAILABLE}{', '.join(missing)} not installed; next step: install {' '.join(missing)}"


def _transformers_options(folder: Path, port: int, dtype: str, device: str, sizes: ServerSizes) -> list[str]:
    return [
        "serve",
        str(folder),
        "--continuous-batching",
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", _DTYPES[dtype], "--device", device),
        # Without these limits, the cache takes most of the free memory.
        *("--cb-num-blocks", str(sizes.blocks), "--cb-block-size", str(sizes.block_tokens)),
        *("--cb-max-batch-tokens", str(sizes.batch_tokens)),
    ]


def _vllm_options(folder: Path, port: int, dtype: str, device: str, sizes: ServerSizes) -> list[str]:
    # The build of vLLM determines the device, so `device` is not passed.
    return [
        *("--model", str(folder), "--served-model-name", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", _DTYPES[dtype]),
        *("--max-model-len", str(sizes.max_tokens), "--max-num-batched-tokens", str(max(sizes.batch_tokens, sizes.max_tokens))),
        *("--block-size", str(sizes.block_tokens), "--num-gpu-blocks-override", str(sizes.blocks)),
    ]


_TRANSFORMERS = Backend(
    "transformers serve",
    "transformers.cli.transformers",
    ("transformers", "fastapi", "openai"),
    _transformers_options,
    log_mark="CB: True",
)
BACKENDS = {
    backend.name: backend
    for backend in (
        _TRANSFORMERS,
        replace(
            _TRANSFORMERS,
            name="transformers serve, cuDNN attention off",
            module="hyperion.experiments.serving.without_cudnn_attention",
        ),
        Backend("vllm", "vllm.entrypoints.openai.api_server", ("vllm",), _vllm_options),
    )
}
