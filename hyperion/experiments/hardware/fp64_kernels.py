"""How fast are two kernels of scientific codes in double precision: Fourier transforms, and a stencil on a grid?

Both kernels perform few FLOPs per byte, so memory bandwidth limits them. Their shortest possible time is the time to read each
number once and to write each result once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.efficiency import expected_stream
from hyperion.chapter.rows import all_samples, bandwidth_limit, out_of_memory_reason, sample_frame, timed_row
from hyperion.hardware import Device
from hyperion.measure import Timing, Verification, error_of_rows, largest_error, relative_error, time_function
from hyperion.results import Row

FFT_1D, FFT_2D, STENCIL = "fft 1d", "fft 2d", "7-point stencil"
_DIMENSIONS = {FFT_1D: 1, FFT_2D: 2, STENCIL: 3}
# Weight of each of the six neighbours in the new value of a grid point. The scheme is stable for weights up to 1/6.
COUPLING = 0.1
# Number of arrays that a stencil step reads or writes in PyTorch: 2 for a scaling, and 3 for each of six in-place additions.
_STENCIL_ARRAYS = 2 + 6 * 3
# Transforms of up to 2¹² complex numbers need one pass over the data, because 64 KiB fit into a compute unit's shared memory.
_LOG2_POINTS_OF_A_PASS = 12
# Maximum number of complex numbers to compare with numpy. At least one transform is compared, even if it is longer.
_COMPARED_POINTS = 1 << 20
_EPS = torch.finfo(torch.float64).eps
_INSIDE = (slice(1, -1),) * 3


class Fp64KernelsOptions(Options):
    """Options for the `fp64_kernels` experiment.

    Args:
        points: maximum number of complex numbers per call. A call runs as many transforms as this number allows, at least one.
        lengths_1d, lengths_2d: lengths of the one-dimensional transforms, and of both sides of the two-dimensional ones.
        grid: length of each side of the stencil's grid, without its boundary.
        time_limit_s: timing budget in seconds for each kernel.
    """

    points: int
    lengths_1d: tuple[int, ...]
    lengths_2d: tuple[int, ...]
    grid: int
    time_limit_s: float


@dataclass(frozen=True)
class _Kernel:
    """A kernel that handles `count` arrays of `length` points along each dimension in one call."""

    name: str
    length: int
    count: int

    @property
    def points(self) -> int:
        return self.length ** _DIMENSIONS[self.name]

    @property
    def traffic_bytes(self) -> int:
        """Minimum memory traffic of a call in bytes: each number is read once, and each result is written once."""
        return 2 * self.count * self.points * (8 if self.name == STENCIL else 16)

    @property
    def passes(self) -> float:
        """Expected number of passes of a call over its data. A pass reads and writes all numbers once."""
        if self.name == STENCIL:
            return _STENCIL_ARRAYS / 2
        return _DIMENSIONS[self.name] * math.ceil(math.log2(self.length) / _LOG2_POINTS_OF_A_PASS)

    @property
    def columns(self) -> dict:
        return {"dtype": "fp64", "params": {"length": self.length, "count": self.count, "cache": "cold"}}


def forecast(context: Context) -> list[Forecast]:
    """Predict the bandwidth of each kernel, assuming that each pass over its data is as fast as a copy."""
    forecasts = []
    for kernel in _kernels(Fp64KernelsOptions.of(context)):
        expected = expected_stream(context, "copy", "fp64", kernel.traffic_bytes)
        expected = expected.divided_by(kernel.passes, f"{kernel.passes:g} passes, each as fast as a copy")
        forecasts.append(expected.forecast(kernel.name, "bandwidth_gb_s", **kernel.columns))
    return forecasts


def run(context: Context, report: Report) -> Result:
    """Time each kernel with flushed caches, and verify the output of the timed calls."""
    options = Fp64KernelsOptions.of(context)
    rows, frames, kernels = [], [], _kernels(options)
    for done, kernel in enumerate(kernels):
        report(done, len(kernels), kernel.name)
        try:
            call, verify = _prepare(kernel, context.device, context.seed)
            timing = time_function(call, context.device, time_limit_s=options.time_limit_s)
            rows += _rows(context, kernel, timing, verify())
            frames.append(sample_frame(timing, kernel.name, **kernel.columns))
        except torch.OutOfMemoryError as error:
            reason = out_of_memory_reason(error)
            rows.append(context.absent_row(kernel.name, "bandwidth_gb_s", reason, **kernel.columns))
    report(len(kernels), len(kernels), "done")
    return Result(rows, all_samples(frames))


EXPERIMENT = Experiment(forecast, run, options=Fp64KernelsOptions, forecast_reads=("bandwidth",))


def _kernels(options: Fp64KernelsOptions) -> list[_Kernel]:
    transforms = [(FFT_1D, length) for length in options.lengths_1d] + [(FFT_2D, length) for length in options.lengths_2d]
    kernels = [_Kernel(name, n, max(1, options.points // n ** _DIMENSIONS[name])) for name, n in transforms]
    return [*kernels, _Kernel(STENCIL, options.grid, 1)]


def _rows(context: Context, kernel: _Kernel, timing: Timing, verification: Verification) -> list[Row]:
    limit_gb_s, source = bandwidth_limit(context.device, kernel.traffic_bytes)
    # Work of a call for each metric, in GB or in units of 10¹² FLOPs. By convention, a transform counts as 5 N log2 N FLOPs.
    work = {"bandwidth_gb_s": kernel.traffic_bytes / 1e9}
    if kernel.name != STENCIL:
        work["fft_tflops"] = 5 * kernel.count * kernel.points * math.log2(kernel.points) / 1e12
    rows = []
    for metric, amount in work.items():
        rate = timing.estimate.map(lambda seconds, amount=amount: amount / seconds)
        limit = None if limit_gb_s is None else limit_gb_s * amount / work["bandwidth_gb_s"]
        rows.append(timed_row(context, kernel.name, metric, rate, timing, verification, (limit, source), **kernel.columns))
    return rows


def _prepare(kernel: _Kernel, device: Device, seed: int) -> tuple[Callable[[], None], Callable[[], Verification]]:
    """Return the function to time, and a function that verifies the output of its last call.

    The output is first filled with NaN, so that the verification detects elements that the calls do not write.
    """
    generator = torch.Generator(device.torch_device).manual_seed(seed)
    options: dict = {"generator": generator, "device": device.torch_device}
    if kernel.name == STENCIL:
        grid = torch.randn([kernel.length + 2] * 3, dtype=torch.float64, **options)
        output = torch.full_like(grid[_INSIDE], math.nan)
        return lambda: heat_step(grid, output), lambda: verify_step(grid, output)
    shape = [kernel.count, *[kernel.length] * _DIMENSIONS[kernel.name]]
    signals = torch.randn(shape, dtype=torch.complex128, **options)
    spectra: list[Tensor] = []

    def transform() -> None:
        spectra.clear()  # the allocator can then reuse the memory for the new output
        spectra.append(torch.fft.fftn(signals, dim=tuple(range(1, signals.ndim))))

    transform()
    spectra[0].fill_(math.nan)
    return transform, lambda: verify_transforms(signals, spectra[0])


def verify_transforms(signals: Tensor, spectra: Tensor) -> Verification:
    """Verify Fourier transforms with numpy and with Parseval's theorem.

    The first transforms are compared with numpy's results in float64. The energy of every spectrum is compared with the energy of
    its signal. The tolerance is the largest possible rounding error of a transform of N points: 7 log2 N unit roundoffs.

    Args:
        signals, spectra: complex tensors of the same shape [transforms, …].

    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, theorem 24.2.
    """
    points = signals[0].numel()
    tolerance = 7 * _EPS / 2 * math.log2(points)
    compared = slice(max(1, _COMPARED_POINTS // points))
    exact = np.fft.fftn(signals[compared].cpu().numpy(), axes=tuple(range(1, signals.ndim)))
    output, reference = (torch.view_as_real(t).flatten(1) for t in (spectra[compared].cpu(), torch.from_numpy(exact)))
    energies, of_signals = (torch.view_as_real(t).flatten(1).square().sum(1) for t in (spectra, signals))
    # The relative error of a norm is half of the relative error of its square.
    parseval = (energies / (points * of_signals) - 1).abs().max().item() / 2
    error = largest_error((error_of_rows(output, reference, tolerance), parseval))
    return Verification("numpy and Parseval", error, tolerance)


def heat_step(grid: Tensor, output: Tensor) -> None:
    """Compute one time step of the heat equation and write it to `output`.

    The new value of a point is u + COUPLING · (sum of (neighbour - u) over six neighbours).

    Args:
        grid: float64 values u with their boundary, shape [Z + 2, Y + 2, X + 2].
        output: tensor of shape [Z, Y, X] for the new values of the interior points.
    """
    torch.mul(grid[_INSIDE], 1 - 6 * COUPLING, out=output)
    for dimension in range(3):
        for neighbours in (slice(None, -2), slice(2, None)):
            place = _INSIDE[:dimension] + (neighbours,) + _INSIDE[dimension + 1 :]
            output.add_(grid[place], alpha=COUPLING)


def verify_step(grid: Tensor, output: Tensor) -> Verification:
    """Verify a time step of the heat equation with scipy and with an eigenfunction.

    The output is compared with scipy's result in float64. A step that starts from the eigenfunction must multiply it by the known
    factor. The tolerance allows 13 rounding errors of half an eps each. They are relative to terms whose sum of magnitudes is
    about twice the result.

    Args:
        grid, output: as for `heat_step`.
    """
    from scipy import ndimage  # slow to import

    weights = np.zeros((3, 3, 3))
    weights[:, 1, 1] = weights[1, :, 1] = weights[1, 1, :] = COUPLING
    weights[1, 1, 1] = 1 - 6 * COUPLING
    exact = torch.from_numpy(ndimage.correlate(grid.cpu().numpy(), weights)[_INSIDE])
    wave, factor = eigenfunction(output.shape[0])
    stepped = torch.full_like(output, math.nan)
    heat_step(wave.to(output.device), stepped)
    by_value = error_of_rows(output.cpu(), exact, 13 * _EPS)
    by_factor = relative_error(stepped.cpu(), factor * wave[_INSIDE])
    return Verification("scipy and eigenfunction", largest_error((by_value, by_factor)), 13 * _EPS)


def eigenfunction(length: int) -> tuple[Tensor, float]:
    """Return an eigenfunction of the stencil, and the factor by which one step multiplies it.

    The function has `length`³ interior points and a boundary of zeros. It is a product of three sines, with one, two and three
    half waves along the three dimensions. The factor therefore contains a different cosine for each dimension.
    """
    angles = [waves * math.pi / (length + 1) for waves in (1, 2, 3)]
    sines = [torch.sin(angle * torch.arange(length + 2, dtype=torch.float64)) for angle in angles]
    return torch.einsum("z,y,x->zyx", *sines), 1 - 6 * COUPLING + 2 * COUPLING * sum(map(math.cos, angles))
