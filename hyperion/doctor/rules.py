"""Rules of troubleshooting: each rule looks for one cause in the facts of a machine, and says what to do.

Rules about logs are search patterns in rules.toml. Each of the other rules is a function that takes a `State` and returns the
evidence for the cause, or "" if the cause is not present.
"""

import functools
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyperion.doctor.checks import device_masks, require_torch_build
from hyperion.doctor.report import RuleResult
from hyperion.doctor.state import NETWORK_FILE_SYSTEMS, State, is_port
from hyperion.errors import HyperionError
from hyperion.install.machine import NVIDIA, ROCM_WHEEL_ARCHS, decide
from hyperion.install.variables import lint

NOT_PRESENT = "not present"
# Variables of batch systems, which give a job only some of the GPUs of a machine.
_BATCH_SYSTEMS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
# GPUs that are part of a processor ("APU" in the table of processors in LLVM's AMDGPUUsage, read on 2026-11-27).
_INTEGRATED = {
    *("gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1103"),
    *("gfx1150", "gfx1151", "gfx1152", "gfx1153"),
}
# Drivers with algorithms of their own for the clock, of which the one called powersave follows the load (Linux, admin-guide/pm,
# intel_pstate.rst and amd-pstate.rst). With all other drivers, powersave is the lowest clock (cpufreq.rst).
_OWN_GOVERNORS = ("intel_pstate", "amd-pstate-epp")


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        id: name of the rule.
        symptom: what a user sees.
        detect: function that returns the evidence, or "" if the cause is not present.
        remedy: the next step.
        needs: names of the facts that must be known.
        per_device: name of the field of `DeviceState` that must be known for each GPU, or "".
        severity: result if the cause is present.
    """

    id: str
    symptom: str
    detect: Callable[[State], str]
    remedy: str
    needs: tuple[str, ...] = ()
    per_device: str = ""
    severity: Literal["warn", "fail"] = "warn"

    def apply(self, state: State) -> RuleResult:
        """Return the result of this rule. If a fact that it needs is unknown, the result is 'skip'.

        If a field is known for some GPUs only, a cause in these is reported. Without a cause in them, the result is 'skip'.
        """
        unknown = [name for name in self.needs if getattr(state, name) is None]
        if unknown:
            return RuleResult(self.id, self.symptom, "skip", f"unknown: {', '.join(unknown)}", "")
        evidence = self.detect(state)
        if evidence:
            return RuleResult(self.id, self.symptom, self.severity, evidence, self.remedy)
        devices = state.devices if self.per_device else ()
        unread = [str(n) for n, one in enumerate(devices or ()) if getattr(one, self.per_device) is None]
        if unread:
            return RuleResult(self.id, self.symptom, "skip", f"unknown: {self.per_device} of GPU {', '.join(unread)}", "")
        return RuleResult(self.id, self.symptom, "ok", NOT_PRESENT, "")


_RULES: list[Rule] = []


def _rule(symptom: str, remedy: str, *needs: str, per_device: str = "", severity: Literal["warn", "fail"] = "warn"):
    """Return a decorator that registers a function as the detector of a rule. The name of the function is the id of the rule."""

    def register(detect: Callable[[State], str]) -> Callable[[State], str]:
        _RULES.append(Rule(detect.__name__, symptom, detect, remedy, needs, per_device, severity))
        return detect

    return register


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Return all rules: first the rules about the state of the machine, then the rules about a log."""
    logs = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))["rule"]
    patterns = {entry["id"]: re.compile(entry.pop("pattern")) for entry in logs}
    others = {entry["id"]: [patterns[name] for name in entry.pop("except", ())] for entry in logs}
    about_logs = [Rule(**entry, detect=_searches(patterns[entry["id"]], others[entry["id"]]), needs=("log",)) for entry in logs]
    return (*_RULES, *about_logs)


def _searches(pattern: re.Pattern[str], others: list[re.Pattern[str]]) -> Callable[[State], str]:
    """Return a function that searches a log for a pattern, without the parts of the log that match one of the others."""

    def detect(state: State) -> str:
        log = state.log or ""
        for other in others:
            log = other.sub("\n", log)
        found = pattern.search(log)
        return " ".join(found[0].split())[:200] if found else ""

    return detect


def apply_rules(state: State) -> list[RuleResult]:
    """Return the result of each rule."""
    return [rule.apply(state) for rule in rules()]


def _gpu_problem(state: State, words: str) -> str:
    machine = decide(state.kernel)
    return f"{machine.problem}; {machine.evidence}" if machine.problem and words in machine.problem else ""


def _masks(state: State) -> dict[str, str]:
    return device_masks(state.build, state.variables) if state.build else {}


@_rule("torch.cuda.is_available() is False", "unset the variable, or name a device that exists", "build", "device_error")
def masked_gpu(state: State) -> str:
    masks, kernel = _masks(state), state.kernel
    rocm = state.build is not None and state.build.kind == "rocm"
    usable = kernel.kfd == "ok" and bool(_usable_archs(state)) if rocm else kernel.nvidia_driver is not None
    # If all GPUs are hidden, torch raises one of these errors or none. Other errors have other causes, such as an old driver.
    words = r"No (HIP|CUDA) GPUs are available|no (ROCm|CUDA)-capable device|invalid device ordinal"
    hidden = not state.device_error or re.search(words, state.device_error)
    return f"{masks} hides all GPUs" if masks and usable and hidden and not state.device_archs else ""


def _usable_archs(state: State) -> list[str]:
    """Return the architectures of the AMD GPUs for which PyTorch's wheels have code."""
    return [arch for arch in state.kernel.amd_archs if arch in ROCM_WHEEL_ARCHS]


@_rule("fewer GPUs than expected", "set only one of them: ROCR_VISIBLE_DEVICES renumbers the GPUs before HIP reads its own")
def nested_masks(state: State) -> str:
    values = {name: state.variables[name] for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in state.variables}
    return f"both masks are set: {values}" if len(values) == 2 and state.variables.get("HIP_VISIBLE_DEVICES") != "0" else ""


@_rule(
    "fewer GPUs than expected",
    "unset the variable, or list all GPUs that exist: an index that does not exist ends the list",
    "build",
)
def partly_masked(state: State) -> str:
    masks, seen = _masks(state), len(state.device_archs)
    if not masks or not seen or any(name in state.variables for name in _BATCH_SYSTEMS):
        return ""
    # The GPU of a processor is not expected: to hide it is the next step of `integrated_gpu`.
    expected = sum(arch not in _INTEGRATED for arch in state.kernel.amd_archs)
    if state.build is not None and state.build.kind == "cuda":
        expected = sum(vendor == NVIDIA for vendor, _ in state.kernel.pci)
    hidden = expected - sum(arch not in _INTEGRATED for arch in state.device_archs)
    hidden = max(hidden, *(value.count(",") + 1 - seen for value in masks.values()))
    return f"{masks}: torch sees {seen} of {seen + hidden} GPUs" if hidden > 0 else ""


@_rule("work runs on the GPU of the processor", "hide it: set HIP_VISIBLE_DEVICES to the indices of the other GPUs")
def integrated_gpu(state: State) -> str:
    integrated = [f"GPU {n} ({arch})" for n, arch in enumerate(state.device_archs) if arch in _INTEGRATED]
    visible = f"{', '.join(integrated)} is part of the processor, and visible beside other GPUs"
    return visible if 0 < len(integrated) < len(state.device_archs) else ""


@_rule("the GPU is ignored", "see `hyperion env --install`: another wheel or a container may support it")
def unsupported_gpu(state: State) -> str:
    other = set(state.kernel.amd_archs) - ROCM_WHEEL_ARCHS
    nvidia = state.kernel.nvidia_driver is not None
    if _usable_archs(state) or nvidia:
        other -= _INTEGRATED  # if there is another GPU, that of the processor is not needed
    if not other:
        return ""
    instead = "the NVIDIA GPU is used" if nvidia else "the other GPUs are used" if _usable_archs(state) else "the CPU is used"
    return f"PyTorch's ROCm wheels have no code for {', '.join(sorted(other))}: {instead}"


@_rule("the first kernel fails", "install a wheel that contains this architecture", "build", "archs", severity="fail")
def missing_architecture(state: State) -> str:
    names = {name.split(":")[0] for name in state.archs or ()}
    # If there are other GPUs, `integrated_gpu` reports that of the processor.
    archs = set(state.device_archs) - _INTEGRATED or set(state.device_archs)
    lacking = sorted(arch for arch in archs if not _has_code(arch, names))
    return f"the build has code for {', '.join(sorted(names))}, not for {', '.join(lacking)}" if lacking else ""


def _has_code(arch: str, names: set[str]) -> bool:
    """Return True if one of the architectures of a build runs on this GPU."""
    if arch in names or not arch.startswith("sm_"):
        return arch in names
    own = int(arch.removeprefix("sm_"))
    # Binary code runs on later GPUs of the same major version, and PTX (compute_) on all later GPUs.
    for kind, number in (match.groups() for name in names if (match := re.fullmatch(r"(sm|compute)_(\d+)[a-z]?", name))):
        if int(number) <= own and (kind == "compute" or int(number) // 10 == own // 10):
            return True
    return False


@_rule("PyTorch sees no GPU", "install the build for this GPU: `make setup`", "build", severity="fail")
def wrong_build(state: State) -> str:
    machine = decide(state.kernel)
    if machine.kind == "cpu" or machine.problem:  # without a GPU, there is no build for it; other rules report the problem
        return ""
    try:
        require_torch_build(state.build, machine, state.variables.get("TORCH", ""))
    except HyperionError as error:
        return f"{error.what}; {machine.evidence}"
    return ""


@_rule("only root can use the GPU", "add the user to the groups render and video, and log in again", severity="fail")
def device_permission(state: State) -> str:
    return _gpu_problem(state, "may not open /dev/kfd")


@_rule("a GPU cannot be opened", "add the user to the group render", "denied_render", severity="fail")
def render_permission(state: State) -> str:
    denied = state.denied_render if state.kernel.amd_archs else ()
    return f"this user may not open {', '.join(denied)}" if denied else ""


@_rule("no GPU in the container", "start it with --device=/dev/kfd --device=/dev/dri (AMD) or --gpus all", severity="fail")
def device_not_passed(state: State) -> str:
    return _gpu_problem(state, "does not exist") or _gpu_problem(state, "not visible")


@_rule(
    "torch raises an error at the first use of a GPU",
    "update the driver to what this build needs",
    "device_error",
    severity="fail",
)
def driver_too_old(state: State) -> str:
    error = state.device_error or ""
    # torch raises other errors for masked GPUs and for absent drivers, which other rules report.
    return error if re.search(r"too old|insufficient", error, re.IGNORECASE) else ""


@_rule("symbols or kernels are missing", "use one ROCm: a wheel contains its own; do not mix it with /opt/rocm", "build")
def rocm_mismatch(state: State) -> str:
    hip, rocm = state.build.hip if state.build else None, state.kernel.rocm_version
    if not hip or not rocm or hip.split(".")[0] == str(rocm[0]):
        return ""
    return f"torch was built with HIP {hip}, and /opt/rocm is {rocm[0]}.{rocm[1]}"


@_rule("wrong results or crashes", "unset it on a GPU that the wheel supports; it makes the GPU claim another architecture")
def overridden_architecture(state: State) -> str:
    value = state.variables.get("HSA_OVERRIDE_GFX_VERSION", "")
    return f"HSA_OVERRIDE_GFX_VERSION={value} on {', '.join(state.kernel.amd_archs)}" if value and state.kernel.amd_archs else ""


@_rule("a setting has no effect", "remove the variables that nothing reads: `hyperion env --lint` says who reads what")
def fictional_variables(state: State) -> str:
    return "; ".join(finding.what for finding in lint(state.variables.items()) if finding.kind == "unknown")


@_rule("a setting acts against another one", "see `hyperion env --lint`")
def contradictory_variables(state: State) -> str:
    return "; ".join(finding.what for finding in lint(state.variables.items()) if finding.kind == "contradiction")


@_rule("a setting does harm", "see `hyperion env --lint`")
def harmful_variables(state: State) -> str:
    return "; ".join(finding.what for finding in lint(state.variables.items()) if finding.kind == "harmful")


@_rule(
    "a setting is lost in another terminal or after a reboot",
    "export it in that file, start a new shell, and set it in job scripts too: `hyperion env --generate bash` prints the lines",
    "startup",
)
def lost_settings(state: State) -> str:
    found = []
    for file, name, value in state.startup or ():
        here = state.variables.get(name)
        if here != value:
            found.append(f"{file} sets {name}={value}, and here it is {'not set' if here is None else here}")
    return "; ".join(found)


@_rule("files are not found after a reboot or an update", "correct or unset the variables", "absent_folders")
def absent_folders(state: State) -> str:
    return f"not found: {', '.join(state.absent_folders or ())}" if state.absent_folders else ""


@_rule(
    "ONNX Runtime computes on the CPU",
    "uninstall all of them, then install one: onnxruntime-gpu for NVIDIA, onnxruntime-migraphx for AMD",
    "onnx_builds",
    "build",
)
def onnx_runtime_builds(state: State) -> str:
    builds = state.onnx_builds or ()
    if len(builds) > 1:
        return f"they overwrite each other: {', '.join(builds)}"
    gpu = state.build is not None and state.build.kind != "cpu"
    return "onnxruntime is the build for the CPU" if gpu and builds == ("onnxruntime",) else ""


@_rule("out of memory with a batch that fitted before", "end the other processes: nvidia-smi or rocm-smi --showpids", "devices")
def memory_used_by_others(state: State) -> str:
    used = {n: one.total_gib - one.free_gib for n, one in enumerate(state.devices or ())}
    busy = [f"GPU {n}: {gib:.1f} GiB" for n, gib in used.items() if gib > 0.1 * (state.devices or ())[n].total_gib]
    return f"memory in use before the program starts: {', '.join(busy)}" if busy else ""


@_rule(
    "steps are slower than before",
    "check cooling and power limit, then run `hyperion doctor --floors`",
    "devices",
    per_device="throttle",
)
def throttled(state: State) -> str:
    bad = [f"GPU {n}: {one.throttle}" for n, one in enumerate(state.devices or ()) if one.throttle not in (None, "none")]
    return "; ".join(bad)


@_rule("clocks fall under load", "check fans, airflow and the temperature of the room", "devices", per_device="temperature_c")
def hot(state: State) -> str:
    hot_devices = [
        f"GPU {n}: {one.temperature_c:g} °C" for n, one in enumerate(state.devices or ()) if (one.temperature_c or 0) >= 90
    ]
    return "; ".join(hot_devices)


@_rule(
    "copies are slow",
    "reseat the card, and check the slot: fewer lanes are in use than the card has",
    "devices",
    per_device="link",
)
def narrow_link(state: State) -> str:
    links = [(number, one.link) for number, one in enumerate(state.devices or ()) if one.link]
    return "; ".join(f"GPU {n}: {now} of {most} PCIe lanes" for n, (now, most) in links if now < most)


@_rule(
    "wrong results",
    "drain the node and run the vendor's memory diagnostics",
    "devices",
    per_device="uncorrected_errors",
    severity="fail",
)
def memory_errors(state: State) -> str:
    bad = [f"GPU {n}: {one.uncorrected_errors}" for n, one in enumerate(state.devices or ()) if one.uncorrected_errors]
    return f"uncorrected memory errors: {', '.join(bad)}" if bad else ""


@_rule("the process is killed", "end other processes, or use a machine with more memory", "memory_available_gib")
def low_memory(state: State) -> str:
    return f"{state.memory_available_gib:.1f} GiB of host memory are available" if (state.memory_available_gib or 0) < 2 else ""


@_rule("the process is killed although memory is free", "raise the limit of the container or of the job", "memory_limit_gib")
def container_memory(state: State) -> str:
    limit = state.memory_limit_gib or math.inf
    return f"the container may use {limit:.1f} GiB" if limit < 8 else ""


@_rule("everything is slow", "use less host memory: fewer workers, smaller shuffle buffers", "swap_used_gib")
def swapping(state: State) -> str:
    return f"{state.swap_used_gib:.1f} GiB of swap are in use" if (state.swap_used_gib or 0) > 1 else ""


@_rule("a data-loader worker ends with a bus error", "start the container with --ipc=host or --shm-size=16g", "shm_gib")
def small_shared_memory(state: State) -> str:
    return f"/dev/shm has {state.shm_gib:.2f} GiB" if (state.shm_gib or 0) < 1 else ""


@_rule("a write fails", "free space, or move HYPERION_RESULTS, HF_HOME and the compile caches", "disks", severity="fail")
def disk_full(state: State) -> str:
    full = [f"{place}: {free:.1f} GB" for place, (free, _) in (state.disks or {}).items() if free < 1]
    return f"nearly full: {', '.join(full)}" if full else ""


@_rule("a write fails although space is free", "remove small files, such as old caches", "disks", severity="fail")
def inodes_used_up(state: State) -> str:
    full = [f"{place}: {share:.1%}" for place, (_, share) in (state.disks or {}).items() if share < 0.01]
    return f"free inodes: {', '.join(full)}" if full else ""


@_rule("compilation hangs or fails on many ranks", "set the variables to folders on a disk of this node", "file_systems")
def cache_on_network(state: State) -> str:
    there = [f"{name} ({kind})" for name, kind in (state.file_systems or {}).items() if kind in NETWORK_FILE_SYSTEMS]
    return f"on a network file system: {', '.join(there)}" if there else ""


@_rule("compiled code cannot be loaded", "set TMPDIR and the compile caches to folders without noexec", "noexec")
def no_execution(state: State) -> str:
    return f"mounted with noexec: {', '.join(state.noexec or ())}" if state.noexec else ""


@_rule(
    "RDMA cannot register memory", "set memlock to unlimited in limits.conf, or --ulimit memlock=-1", "memlock_gib", "infiniband"
)
def locked_memory(state: State) -> str:
    low = state.infiniband and (state.memlock_gib or 0) < 1
    return f"at most {state.memlock_gib:.3g} GiB can be locked, and there is an InfiniBand adapter" if low else ""


@_rule("too many open files", "ulimit -n 65536", "open_files")
def few_open_files(state: State) -> str:
    return f"at most {state.open_files:.0f} open files" if (state.open_files or 0) < 1024 else ""


@_rule("ranks do not find each other", "name an interface that exists on every node", "interfaces", severity="fail")
def absent_interface(state: State) -> str:
    wrong = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = state.variables.get(name, "")
        # For NCCL, "=eth0" means exactly this name, "^docker" excludes names, and "eth" is a prefix. gloo takes exact names.
        wanted = [] if value.startswith("^") else [part for part in value.lstrip("=").split(",") if part]
        exact = value.startswith("=") or name.startswith("GLOO")
        found = [part for part in wanted if any(own == part if exact else own.startswith(part) for own in state.interfaces or ())]
        if wanted and not found:
            wrong.append(f"{name}={value}")
    return f"{', '.join(wrong)}, but the interfaces are {', '.join(state.interfaces or ())}" if wrong else ""


@_rule(
    "torchrun ends with 'Address already in use'", "choose another MASTER_PORT, or end that process", "port_used", severity="fail"
)
def port_in_use(state: State) -> str:
    return f"port {state.variables.get('MASTER_PORT')} is in use" if state.port_used else ""


@_rule(
    "torchrun ends at the start", "set MASTER_PORT to a number from 1024 to 65535, or use torchrun --standalone", severity="fail"
)
def invalid_port(state: State) -> str:
    port = state.variables.get("MASTER_PORT", "")
    return f"MASTER_PORT={port} is not a port" if port and not is_port(port) else ""


@_rule("nodes do not find this node", "correct /etc/hosts, or set MASTER_ADDR to an address of the network", "own_address")
def own_name(state: State) -> str:
    several = state.variables.get("WORLD_SIZE", "1") != state.variables.get(
        "LOCAL_WORLD_SIZE", state.variables.get("WORLD_SIZE", "1")
    )
    wrong = several and (not state.own_address or (state.own_address or "").startswith("127."))
    return f"the own host name resolves to {state.own_address or 'nothing'} in a job with several nodes" if wrong else ""


@_rule("local requests fail or are slow", "add localhost,127.0.0.1 to no_proxy")
def proxied_loopback(state: State) -> str:
    lower = {name.lower(): value for name, value in state.variables.items()}
    proxy, excluded = lower.get("http_proxy"), lower.get("no_proxy", "")
    direct = "localhost" in excluded or excluded.strip() == "*"  # an asterisk alone excludes every address
    return f"http_proxy={proxy} also applies to this machine" if proxy and not direct else ""


@_rule("torch.compile fails or is not used", "install the Triton that this torch requires", "triton", "build")
def triton_missing(state: State) -> str:
    return state.triton or "" if state.build is not None and state.build.kind != "cpu" else ""


@_rule(
    "torch.compile fails",
    "apt install g++, or set CXX to the path of one compiler, without options and without ccache",
    "compiler",
)
def compiler_missing(state: State) -> str:
    named = state.variables.get("CXX")
    why = "there is no g++ in PATH" if named is None else f"CXX={named} is not a program, and torch.compile takes it as one path"
    return "" if state.compiler else why


@_rule("Triton cannot build its launcher", "apt install python3-dev", "python_header", "build")
def header_missing(state: State) -> str:
    gpu = state.build is not None and state.build.kind != "cpu"
    return "Python.h is not installed" if gpu and not state.python_header else ""


@_rule(
    "a data set cannot be loaded",
    "`hyperion data verify` names the records; then prepare the data again",
    "damaged_data",
    severity="fail",
)
def damaged_data(state: State) -> str:
    return f"missing or truncated: {', '.join((state.damaged_data or ())[:5])}" if state.damaged_data else ""


@_rule("the CPU is slow", "cpupower frequency-set -g performance", "governor", "clock_driver")
def slow_governor(state: State) -> str:
    lowest = state.governor == "powersave" and state.clock_driver not in _OWN_GOVERNORS
    return f"the governor powersave of {state.clock_driver} keeps the CPU at its lowest clock" if lowest else ""


@_rule("steps have long pauses", "sysctl kernel.numa_balancing=0 (AMD recommends it for Instinct)", "numa_balancing")
def numa_balancing(state: State) -> str:
    return "the kernel moves pages between NUMA nodes" if state.numa_balancing and state.kernel.amd_archs else ""


@_rule("programs with several GPUs hang", "add iommu=pt to the command line of the kernel", "kernel_command")
def iommu(state: State) -> str:
    words = (state.kernel_command or "").split()
    passes = "iommu=pt" in words or "amd_iommu=off" in words or "intel_iommu=off" in words
    return "the IOMMU is not in pass-through mode" if len(state.kernel.amd_archs) > 1 and not passes else ""


@_rule("threads wait for each other", "set OMP_NUM_THREADS to the cores of a rank", "cores_allowed")
def too_many_threads(state: State) -> str:
    threads, ranks = (state.variables.get(name, "") for name in ("OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"))
    numbers = all(re.fullmatch("[0-9]{1,9}", text) for text in (threads, ranks or "1"))
    total = int(threads) * int(ranks or 1) if numbers else 0
    return f"{total} threads on {state.cores_allowed:g} cores" if total > (state.cores_allowed or math.inf) else ""


@_rule("packages of another environment are imported", "set PYTHONNOUSERSITE=1", "user_site")
def user_packages(state: State) -> str:
    return "packages in the user's site-packages are visible here" if state.user_site else ""


@_rule("symbols are missing, or versions are mixed", "unset LD_LIBRARY_PATH: wheels find their own libraries", "library_shadows")
def shadowed_libraries(state: State) -> str:
    return f"loaded before the libraries of the wheel: {', '.join(state.library_shadows or ())}" if state.library_shadows else ""
