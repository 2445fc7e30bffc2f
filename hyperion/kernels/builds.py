"""Compile Triton kernels for GPUs that need not be present, and report registers, spills, shared memory and instructions.

The values for AMD GPUs come from the assembly, whose metadata the driver reads when it loads the kernel. The values for NVIDIA
GPUs come from the binary. They are read with `cuobjdump`, which is part of Triton.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton  # pyright: ignore[reportMissingImports] - only PyTorch's GPU builds contain it
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture with the limits of one multiprocessor (NVIDIA) or compute unit (AMD).

    Args:
        name: name of the architecture.
        backend: "cuda" or "hip".
        target: identifier that Triton uses: the compute capability (NVIDIA) or the name of the architecture (AMD).
        threads: number of threads of a warp, which AMD calls a wavefront.
        shared_bytes: largest shared memory of a program in bytes. AMD calls this memory LDS.
        matrix: regular expression that matches a matrix instruction in the assembly.
    """

    name: str
    backend: str
    target: int | str
    threads: int
    shared_bytes: int
    matrix: str


ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture("gfx90a", "hip", "gfx90a", 64, 64 << 10, r"\bv_mfma_\w+"),
        Architecture("gfx942", "hip", "gfx942", 64, 64 << 10, r"\bv_mfma_\w+"),
        Architecture("sm_90", "cuda", 90, 32, 227 << 10, r"\bwgmma\.mma_async\S*"),
    )
}


@dataclass(frozen=True)
class Build:
    """A kernel and everything that the compiler needs for it.

    Args:
        name: name of the configuration in tables.
        kernel: the kernel, a function with the decorator `triton.jit`.
        signature: type of each argument that is not a constant, in Triton's notation.
        constants: value of each compile-time constant.
        warps: number of warps.
        options: further compiler options, such as `num_stages`.
        matrix: if True, the kernel must contain matrix instructions.
        aligned: if True, all sizes are multiples of 16. The addresses of tensors are always multiples of 16.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    options: dict[str, Any] = field(default_factory=dict)
    matrix: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel.

    Args:
        registers: number of vector registers of a thread. On AMD GPUs, accumulation registers are included.
        spills: on AMD GPUs, the number of spilled registers of a thread. On NVIDIA GPUs, the size in bytes of the stack and the
            local memory of a thread. Spilled registers are stored there, so a kernel with 0 bytes does not spill.
        shared_bytes: shared memory of a program in bytes.
        occupancy: number of warps that can be resident at the same time, on each of the four vector units of a compute unit (AMD)
            or on each multiprocessor (NVIDIA). Only whole programs can be resident.
        matrix_instructions: number of matrix instructions in the code.
        matrix_name: name of the most frequent matrix instruction, or "".
    """

    registers: int
    spills: int
    shared_bytes: int
    occupancy: float
    matrix_instructions: int
    matrix_name: str

    def faults(self, build: Build, architecture: Architecture) -> list[str]:
        """Return the reasons why this build must not be shipped for this architecture. The list is empty if it may be shipped."""
        faults = []
        if self.spills:
            faults.append(f"{self.spills} spills")
        if self.shared_bytes > architecture.shared_bytes:
            faults.append(f"{self.shared_bytes} bytes of shared memory, {architecture.shared_bytes} are available")
        if build.matrix and not self.matrix_instructions:
            faults.append("no matrix instruction")
        if build.warps * architecture.threads > 1024:
            # CUDA and HIP both allow at most 1024 threads in a block.
            faults.append(f"{build.warps * architecture.threads} threads, 1024 are allowed")
        return faults


def compile_build(build: Build, architecture: Architecture) -> Resources:
    """Compile a kernel and return its resources."""
    arguments = dict(build.signature) | dict.fromkeys(build.constants, "constexpr")
    signature = {name: arguments[name] for name in build.kernel.arg_names}
    aligned = [name for name, kind in build.signature.items() if kind.startswith("*") or (kind == "i32" and build.aligned)]
    source = triton.compiler.ASTSource(
        fn=build.kernel,
        signature=signature,
        constexprs=build.constants,
        # At a launch, Triton detects which arguments are multiples of 16 and uses wide loads for them. Without a launch, this
        # must be specified.
        attrs={(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget(architecture.backend, architecture.target, architecture.threads)
    compiled = triton.compile(source, target=target, options={"num_warps": build.warps} | build.options)
    return (_amd if architecture.backend == "hip" else _nvidia)(compiled, build, architecture)


def _matrix(text: str, architecture: Architecture) -> tuple[int, str]:
    found = re.findall(architecture.matrix, text)
    return len(found), max(set(found), key=found.count) if found else ""


def _amd(compiled: Any, build: Build, architecture: Architecture) -> Resources:
    text = compiled.asm["amdgcn"]

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        assert found, f"{pattern} is not in the assembly of {build.name}"
        return int(found[1])

    return Resources(
        registers=number(r"\.vgpr_count:\s+(\d+)"),
        spills=number(r"\.vgpr_spill_count:\s+(\d+)") + number(r"\.sgpr_spill_count:\s+(\d+)"),
        shared_bytes=compiled.metadata.shared,
        occupancy=_resident_waves(number(r"; Occupancy: (\d+)"), compiled.metadata.shared, build.warps, architecture),
        matrix_instructions=_matrix(text, architecture)[0],
        matrix_name=_matrix(text, architecture)[1],
    )


def _nvidia(compiled: Any, build: Build, architecture: Architecture) -> Resources:
    program = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        # cuobjdump is another process that opens the file by its name, so the buffer of this process must be flushed first.
        file.flush()
        listing = subprocess.run([program, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", listing)[1]) for name in ("REG", "STACK", "LOCAL"))  # pyright: ignore
    shared = compiled.metadata.shared
    # The regular expression matches the PTX name of the instruction; in machine code it has another name.
    count, name = _matrix(compiled.asm["ptx"], architecture)
    return Resources(registers, stack + local, shared, _resident_warps(registers, shared, build.warps), count, name)


def _resident_waves(by_registers: int, shared: int, warps: int, architecture: Architecture) -> float:
    """Return how many warps of a kernel can be resident on each of the four vector units of a compute unit of CDNA 2 or 3.

    Args:
        by_registers: number of warps for which a vector unit has registers, as the compiler states it. The compiler does not
            count the LDS, because Triton allocates it at the launch.
        shared: LDS of a program in bytes.
        warps: number of warps of a program, which are distributed evenly over the vector units.
        architecture: the architecture; a compute unit has as much LDS as a program may use.
    """
    programs = 4 * by_registers // warps
    if shared:
        programs = min(programs, architecture.shared_bytes // shared)
    return programs * warps / 4


def _resident_warps(registers: int, shared: int, warps: int) -> int:
    """Return how many warps of a kernel can be resident on a multiprocessor of compute capability 9.0.

    A multiprocessor has four partitions with 16,384 registers each, and 228 KiB of shared memory. Registers are allocated to
    warps in units of 256. The system reserves 1 KiB of shared memory per program. At most 64 warps and 32 programs can be
    resident.

    Source: CUDA C++ Programming Guide, technical specifications per compute capability.
    """
    # Round up to the allocation unit.
    of_warp = -(-registers * 32 // 256) * 256
    programs = min(4 * (16384 // of_warp) // warps, (228 << 10) // (shared + 1024), 64 // warps, 32)
    return programs * warps
