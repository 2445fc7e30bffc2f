"""Run all checks, in the order in which one explains the next."""

from collections.abc import Callable

from hyperion.doctor import software, storage, torch_checks
from hyperion.doctor.result import CheckResult

# Each check has parameters for its tests, all of them with defaults.
CHECKS: tuple[Callable[..., CheckResult], ...] = (
    software.check_python,
    torch_checks.check_torch_build,
    torch_checks.check_accelerator,
    torch_checks.check_arithmetic,
    software.check_torchvision,
    software.check_notebook_kernel,
    storage.check_data_source,
    storage.check_results_folder,
    storage.check_disk_space,
    storage.check_caches,
)


def run_checks(checks: tuple[Callable[..., CheckResult], ...] = CHECKS) -> list[CheckResult]:
    """Run each check and return its result. A check that raises counts as failed, and the others still run."""
    results = []
    for check in checks:
        try:
            results.append(check())
        except Exception as error:  # of any kind: it is reported, and the next check runs
            name = check.__name__.removeprefix("check_")
            evidence = f"the check itself broke: {type(error).__name__}: {error}"
            results.append(CheckResult(name, "fail", evidence, "report this message with all that `hyperion doctor` prints"))
    return results
