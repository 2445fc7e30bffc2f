"""Devices, the number formats in which they compute matrix products, and the peak rate that limits each format.

Sources: the vendors' instruction set references; AMD, "Data types and precision support" (rocm.docs.amd.com, 2025-10).
"""

from dataclasses import dataclass

from hyperion.errors import HyperionError

# Names of the peak rates in data sheets. A name consists of the number format and, if two kinds of arithmetic unit support the
# format, the kind of unit.
PATHS = ("fp64_vector", "fp64_matrix", "fp32_vector", "fp32_matrix", "tf32", "fp16", "bf16", "fp8", "int8")
FP8_OCP = ("fp8_e4m3fn", "fp8_e5m2")
FP8_FNUZ = ("fp8_e4m3fnuz", "fp8_e5m2fnuz")
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", *FP8_OCP, *FP8_FNUZ, "int8")
# Number formats of rows: those of matrix products, those of quantized weights, and those of data that are only moved.
ROW_DTYPES = (*DTYPES, "int4", "nf4", "uint8", "int16", "int32", "int64", "complex64", "complex128")

_ALIASES = {
    "float64": "fp64",
    "double": "fp64",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}

# GPUs whose matrix units support fp64 or fp32 operands. Other GPUs compute matrix products of these formats on vector units.
_FP64_MATRIX = {"sm_80", "sm_90", "sm_100", "sm_103", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"}
_FP32_MATRIX = {"gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"}
_CDNA3 = {"gfx940", "gfx941", "gfx942"}

# All processors that PyTorch supports have a clock in this range. A clock in kHz or GHz is outside the range.
_CLOCKS_MHZ = (50, 20_000)


class HardwareError(HyperionError):
    """Raised if a device cannot be used or described."""


@dataclass(frozen=True)
class Device:
    """One device as PyTorch enumerates it.

    Args:
        kind: 'cuda' (NVIDIA), 'rocm' (AMD) or 'cpu'.
        index: device index in PyTorch.
        name: name of the device.
        arch: architecture, such as 'sm_90', 'gfx90a' or 'x86_64'.
        memory_bytes: size of the memory.
        compute_units: number of SMs, CUs or cores that PyTorch or the operating system reports. On Radeon cards PyTorch reports
            pairs of CUs.
        last_level_cache_bytes: size of the last-level cache, or None.
        torch_device: name for `torch.device`, such as 'cuda:0'.
        max_clock_mhz: maximum clock that the driver reports, or None.
        nominal_clock_mhz: base clock of a CPU, or None.
        uuid, pci_address: identification of a GPU, or None.
        isa: the instruction sets of a CPU that are in `cpu.RELEVANT_FLAGS`. Empty for a GPU.
        vendor: vendor of the device.
        family: family number of a CPU, or None.
    """

    kind: str
    index: int
    name: str
    arch: str
    memory_bytes: int
    compute_units: int | None
    last_level_cache_bytes: int | None
    torch_device: str
    max_clock_mhz: float | None = None
    nominal_clock_mhz: float | None = None
    uuid: str | None = None
    pci_address: str | None = None
    isa: tuple[str, ...] = ()
    vendor: str = ""
    family: int | None = None

    def __post_init__(self):
        """Check that the clocks are in MHz. A clock in another unit would lead to a wrong limit.

        Raises:
            HardwareError: the value of a clock is too small or too large to be in MHz.
        """
        for name in ("max_clock_mhz", "nominal_clock_mhz"):
            clock_mhz = getattr(self, name)
            if clock_mhz is not None and not _CLOCKS_MHZ[0] <= clock_mhz <= _CLOCKS_MHZ[1]:
                raise HardwareError(
                    f"{name} is {clock_mhz:g}, which is not a clock in MHz",
                    where=self.name,
                    next_step="the driver may report kHz, Hz or nothing: convert the value, or use None",
                )

    def supports(self, dtype_name: str) -> tuple[bool, str]:
        """Return (whether this device supports matrix products of this data type, explanation).

        Args:
            dtype_name: name of the data type. 'fp8' means any fp8 format.
        """
        rules = {"cuda": _cuda_supports, "rocm": _rocm_supports, "cpu": _cpu_supports}
        return rules[self.kind](self, canonical_dtype(dtype_name))


def canonical_dtype(name: str) -> str:
    """Return the short name of a data type, such as 'bf16' for 'torch.bfloat16' and 'bfloat16'.

    Raises:
        HyperionError: the data type is unknown.
    """
    short = str(name).removeprefix("torch.").lower()
    short = _ALIASES.get(short, short)
    if short not in DTYPES:
        raise HyperionError(f"Unknown data type {name!r}.", next_step=f"Use one of {', '.join(DTYPES)}.")
    return short


def fp8_format(device: Device) -> str | None:
    """Return the fp8 format with 4 exponent bits that the device supports.

    It is 'fp8_e4m3fn' (OCP), 'fp8_e4m3fnuz' (CDNA 3), or None if the device supports neither.
    """
    for dtype in ("fp8_e4m3fn", "fp8_e4m3fnuz"):
        if device.supports(dtype)[0]:
            return dtype
    return None


# First compute capability with tensor cores for the format: Volta, Turing and Ampere. For fp8 it is 8.9 (Ada).
_FIRST_TENSOR_CORES = {"fp16": 70, "int8": 75, "bf16": 80, "tf32": 80}


def gemm_path(dtype_name: str, device: Device) -> str:
    """Return the name of the peak (one of PATHS) that limits a matrix product (GEMM) of this data type on this device.

    For example, fp32 GEMMs run on the matrix units of CDNA GPUs, but on the vector units of NVIDIA GPUs, Radeon cards and CPUs.
    """
    dtype = canonical_dtype(dtype_name)
    if dtype == "fp64":
        return "fp64_matrix" if device.arch in _FP64_MATRIX else "fp64_vector"
    if dtype == "fp32":
        return "fp32_matrix" if device.arch in _FP32_MATRIX else "fp32_vector"
    return "fp8" if dtype.startswith("fp8") else dtype


def has_matrix_units(device: Device, dtype: str) -> bool:
    """Return True if the device is a GPU with matrix units for products in "fp16" or "bf16".

    These are tensor cores of NVIDIA GPUs, and MFMA or WMMA instructions of AMD GPUs. Without them, a 16-bit format saves memory
    but hardly any time.
    """
    if device.kind == "cuda":
        return int(device.arch.removeprefix("sm_")) >= _FIRST_TENSOR_CORES[dtype]
    # CDNA has MFMA instructions; RDNA 3 and 4 (gfx11, gfx12) have WMMA instructions.
    return device.kind == "rocm" and (device.arch in _FP32_MATRIX or device.arch.startswith(("gfx11", "gfx12")))


def _cuda_supports(device: Device, dtype: str) -> tuple[bool, str]:
    capability = int(device.arch.removeprefix("sm_"))
    if dtype in ("fp64", "fp32"):
        return True, "native"
    if dtype in FP8_FNUZ:
        return False, "fnuz fp8 formats exist on AMD CDNA 3 only; NVIDIA GPUs multiply float8_e4m3fn and float8_e5m2"
    first = _FIRST_TENSOR_CORES.get(dtype, 89)
    if capability >= first:
        return True, f"tensor cores of {device.arch}"
    if dtype in ("fp16", "bf16") and capability >= 53:
        return True, f"without tensor cores on {device.arch} (they take {dtype} from sm_{first} on)"
    return False, f"{device.arch} has no {dtype} tensor cores (from sm_{first} on)"


def _rocm_supports(device: Device, dtype: str) -> tuple[bool, str]:
    arch = device.arch
    matrix = has_matrix_units(device, "bf16")
    if dtype in ("fp64", "fp32"):
        return True, "native"
    if dtype == "tf32":
        if arch in _CDNA3:
            return True, "XF32 matrix instructions of CDNA 3"
        why = "CDNA 4 removed the XF32 instructions" if arch == "gfx950" else f"{arch} has no TF32 or XF32 instructions"
        return False, f"{why}; the product runs in fp32 or is emulated in bf16"
    if dtype.startswith("fp8"):
        return _rocm_fp8(arch, dtype)
    if not matrix and dtype in ("bf16", "int8"):
        return dtype == "bf16", f"no {dtype} matrix instructions on {arch}" + ("; emulated" if dtype == "bf16" else "")
    return True, f"matrix instructions of {arch}" if matrix else f"packed vector instructions of {arch}"


def _rocm_fp8(arch: str, dtype: str) -> tuple[bool, str]:
    if arch in _CDNA3:
        if dtype in FP8_OCP:
            return False, f"{arch} multiplies the fnuz fp8 formats; use float8_e4m3fnuz or float8_e5m2fnuz"
        return True, f"fnuz fp8 matrix instructions of {arch}"
    if arch == "gfx950" or arch.startswith("gfx12"):
        if dtype in FP8_FNUZ:
            return False, f"{arch} multiplies the OCP fp8 formats; use float8_e4m3fn or float8_e5m2"
        return True, f"OCP fp8 matrix instructions of {arch}"
    return False, f"{arch} has no fp8 matrix instructions"


def _cpu_supports(device: Device, dtype: str) -> tuple[bool, str]:
    flags = set(device.isa)
    if dtype in ("fp64", "fp32"):
        return True, "native"
    if dtype == "tf32":
        return False, "TF32 is a format of GPU matrix units; a CPU multiplies in fp32"
    if dtype.startswith("fp8"):
        return (False, "this CPU has no fp8 instructions: PyTorch would convert the operands to fp32, which measures fp32")
    native = {
        "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
        "fp16": ("amx_fp16", "avx512_fp16"),
        "int8": ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm"),
    }[dtype]
    present = [flag for flag in native if flag in flags]
    return True, f"native ({present[0]})" if present else "emulated: converted to wider types first"
