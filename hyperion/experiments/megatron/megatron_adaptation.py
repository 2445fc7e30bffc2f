"""Is the adaptation of megatron-core complete, reversible, and free of packages that need CUDA?"""

import importlib
import importlib.abc
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pandas as pd

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import run_variant
from hyperion.parallel.megatron.release import (
    ADAPTED,
    adapt,
    adapted_copy,
    changes,
    find_release,
    states,
    use_adapted,
    why_unavailable,
)

APPLIED, AGAIN, REVERTED, IMPORTS = "applied", "applied again", "reverted", "imports"
# Packages that have only CUDA code, or that only CUDA builds of other packages use.
CUDA_ONLY = (
    "apex",
    "causal_conv1d",
    "cuda",
    "deep_ep",
    "flash_attn",
    "flash_attn_3",
    "flash_mla",
    "flashinfer",
    "fused_weight_gradient_mlp_cuda",
    "grouped_gemm",
    "mamba_ssm",
    "nvidia_resiliency_ext",
    "nvtx",
    "scaled_upper_triang_masked_softmax_cuda",
    "transformer_engine",
    "transformer_engine_torch",
)


def forecast(context: Context) -> list[Forecast]:
    """Predict that adapting changes one file per change, that adapting again changes none, and that reverting restores all bytes.

    The last prediction is that the imports load no CUDA package.
    """
    applied = Forecast(APPLIED, "count", len(changes()), "one file for each change", params=_params("files changed"))
    return [
        applied,
        Forecast(AGAIN, "count", 0, "the changes are idempotent", params=_params("files changed")),
        Forecast(REVERTED, "count", 0, "the changes are reversible", params=_params("files that differ from the release")),
        Forecast(IMPORTS, "count", 0, "all fusions are off", params=_params("CUDA packages that were imported")),
    ]


def run(context: Context, report: Report) -> Result:
    """Apply and revert the changes in a copy of the release. Then import the adapted copy while CUDA packages are refused."""
    if reason := why_unavailable():
        rows = [context.absent_row(one.variant, "count", reason, params=one.params) for one in forecast(context)]
        return Result(rows, pd.DataFrame())
    release, core = find_release(), context.workspace / "megatron" / "core"
    shutil.rmtree(core, ignore_errors=True)
    shutil.copytree(release, core, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    adapt(core, revert=True)  # the installed package may have been adapted in place
    published = _contents(core)
    rows = [_count(context, APPLIED, len(adapt(core)), len(changes()), "files changed")]
    adapted = sum(state == ADAPTED for state in states(core).values())
    rows.append(_count(context, APPLIED, adapted, len(changes()), "files in the adapted state"))
    rows.append(_count(context, AGAIN, len(adapt(core)), 0, "files changed"))
    adapt(core, revert=True)
    after = _contents(core)
    different = sum(published.get(name) != after.get(name) for name in {*published, *after})
    rows.append(_count(context, REVERTED, different, 0, "files that differ from the release"))
    rows += [
        context.row(
            change.file, "count", sum(part.times for part in change.replace), params=_params("replacements", change.reason)
        )
        for change in changes()
    ]
    adapted_copy()
    return Result(rows + run_variant(context, report, import_without_cuda).rows, pd.DataFrame())


EXPERIMENT = Experiment(forecast, run)


class CudaBlocker(importlib.abc.MetaPathFinder):
    """Import hook that refuses packages that need CUDA, and records which of them the program tried to import."""

    def __init__(self):
        self.refused: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Raise ModuleNotFoundError for a package in `CUDA_ONLY`."""
        if (package := fullname.partition(".")[0]) in CUDA_ONLY:
            self.refused.add(package)
            raise ModuleNotFoundError(f"{package} needs CUDA", name=fullname)
        return None


def import_without_cuda(context: Context, report: Report) -> Result:
    """Import what the experiments of this chapter import, and count the modules of CUDA packages in this process."""
    use_adapted()
    blocker = CudaBlocker()
    sys.meta_path.insert(0, blocker)
    for module in (
        "megatron.core.datasets.indexed_dataset",
        "megatron.core.dist_checkpointing",
        "hyperion.parallel.megatron.gpt",
    ):
        importlib.import_module(module)
    loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(CUDA_ONLY))
    row = _count(context, IMPORTS, len(loaded), 0, "CUDA packages that were imported", ", ".join(sorted(blocker.refused)))
    return Result([row], pd.DataFrame())


def _contents(core: Path) -> dict[str, bytes]:
    return {path.relative_to(core).as_posix(): path.read_bytes() for path in core.rglob("*") if path.is_file()}


def _count(context: Context, variant: str, found: int, expected: int, what: str, note: str = ""):
    columns = {"check": f"{expected} {what}", "check_error": abs(found - expected), "check_tolerance": 0}
    return context.row(variant, "count", found, params=_params(what, note), **columns)


def _params(what: str, note: str = "") -> dict:
    return {"what": what} | ({"note": note} if note else {})
