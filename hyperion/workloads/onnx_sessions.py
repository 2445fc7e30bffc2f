"""Sessions of ONNX Runtime with a chosen execution provider, and the reasons why one cannot be opened here."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperion.errors import HyperionError
from hyperion.hardware import Device

CPU_PROVIDER = "CPUExecutionProvider"
GPU_PROVIDERS = {"cuda": ("CUDAExecutionProvider",), "rocm": ("MIGraphXExecutionProvider", "ROCMExecutionProvider")}
SPINNING = "session.intra_op.allow_spinning"


def why_no_onnx(find: Callable[[str], object] = importlib.util.find_spec) -> str:
    """Return the reason why ONNX Runtime or PyTorch's ONNX exporter cannot be used here, or an empty string if both can."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find(name) is None]
    names = " and ".join(missing)
    return f"unavailable: {names} not installed; next step: pip install {' '.join(missing)}" if missing else ""


def why_no_gpu_provider(device: Device) -> str:
    """Return the reason why ONNX Runtime has no provider for this device, or an empty string if it has one."""
    if device.kind == "cpu":
        return "unavailable: this machine has no GPU"
    if gpu_provider(device):
        return ""
    import onnxruntime

    present, wanted = onnxruntime.get_available_providers(), GPU_PROVIDERS[device.kind]
    return f"unavailable: onnxruntime {onnxruntime.__version__} has only {', '.join(present)}, none of {', '.join(wanted)}"


def gpu_provider(device: Device) -> str:
    """Return the provider of ONNX Runtime for a GPU, or an empty string if there is none."""
    import onnxruntime

    present = onnxruntime.get_available_providers()
    return next((name for name in GPU_PROVIDERS[device.kind] if name in present), "")


class Session:
    """An ONNX model in ONNX Runtime, callable with a tensor. Inputs and outputs are arrays in host memory.

    Args:
        path: path of the ONNX file. Its model has one input `x` and one output.
        provider: the requested execution provider.

    Attributes:
        ran: the requested provider, and the providers of the session.

    Raises:
        HyperionError: the session does not have the requested provider. ONNX Runtime itself only warns and runs on the CPU.
    """

    def __init__(self, path: Path, provider: str = CPU_PROVIDER):
        self._path, self._provider = path, provider
        self._session = self._open(profiling=False)
        self._batch = self._session.get_inputs()[0].shape[0]  # a name if the model accepts any batch size
        require_provider(provider, self._session.get_providers())
        self.ran = {"asked_provider": provider, "providers": ", ".join(self._session.get_providers())}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the outputs. A batch below a fixed batch size of the model is padded with copies of its first example."""
        missing = self._batch - len(x) if isinstance(self._batch, int) else 0
        full = torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) if missing else x
        return torch.from_numpy(self._session.run(None, {"x": full.cpu().numpy()})[0][: len(x)])

    def executed(self, x: Tensor) -> list[tuple[str, str]]:
        """Run once under ONNX Runtime's profiler. Return the operator and the provider of each node that ran."""
        session = self._open(profiling=True)
        session.run(None, {"x": x.cpu().numpy()})
        trace = Path(session.end_profiling())
        nodes = [event["args"] for event in json.loads(trace.read_text()) if event.get("cat") == "Node"]
        trace.unlink()
        # Each node has several events. One of them has a provider.
        return [(node["op_name"], node["provider"]) for node in nodes if "provider" in node]

    def _open(self, profiling: bool) -> Any:
        """Return a session with as many threads as PyTorch.

        Its idle threads sleep. By default they spin. They then take cores from PyTorch and from other sessions, whose calls are
        timed in alternation with those of this session: with four sessions on two cores, a call takes ten times as long.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry(SPINNING, "0")
        options.enable_profiling = profiling
        if profiling:
            options.profile_file_prefix = str(self._path.with_suffix(""))
        return onnxruntime.InferenceSession(str(self._path), options, providers=[self._provider])


def require_provider(asked: str, present: Sequence[str]) -> None:
    """Check that the first provider of a session is the requested one.

    Raises:
        HyperionError: the first provider is another one.
    """
    if not present or present[0] != asked:
        raise HyperionError(
            f"ONNX Runtime was asked for {asked}, but the session runs on {', '.join(present) or 'nothing'}",
            where="onnx_sessions.Session",
            next_step="install the build of ONNX Runtime for this device, or read its warnings about missing libraries",
        )
