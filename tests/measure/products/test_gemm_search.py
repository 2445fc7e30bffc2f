"""The search finds the best shape of landscapes with waves, noise and drift, within its time; and it runs on this CPU."""

import functools
import hashlib
import itertools
import math

import numpy as np
import pytest
import torch

from hyperion.errors import HyperionError
from hyperion.hardware import Telemetry, detect_cpu
from hyperion.measure import Finalist, Gemm, RefusedProduct, Timing, Verification, search_gemm
from hyperion.measure.products.gemm_search import (
    FINALISTS,
    ShapeRanking,
    SharedOperands,
    fastest_first,
    flops_of,
    grid,
    search_shapes,
    shape_effects,
)

SEEDS = range(20)


@pytest.fixture(scope="module")
def cpu():
    return detect_cpu()


class Landscape:
    """A machine of `units` that multiply tiles: its rate falls where the last wave is not full, and differs by layout.

    Its clock follows the temperature: it starts high, falls with the work done, and swings; every sample has noise, now and
    then a large one.
    """

    def __init__(self, seed: int, peak_tflops: float, units: int = 132, tile: tuple[int, int] = (128, 256)):
        self.seed, self.peak, self.units, self.tile = seed, peak_tflops * 1e12, units, tile
        self.random, self.time = np.random.default_rng(seed), 0.0
        self.rate = functools.cache(self._rate)

    def _rate(self, shape) -> float:
        """FLOP/s without drift and noise."""
        m, n, k = shape
        tiles = math.ceil(m / self.tile[0]) * math.ceil(n / self.tile[1])
        full = tiles / (self.units * math.ceil(tiles / self.units))
        return self.peak * full * k / (k + 500) * (1 - 0.03 * self._habit(m, n, 0)) * (1 - 0.01 * self._habit(n, k, m))

    def _habit(self, *sizes) -> float:
        """0 to 1, of this machine and these sizes: which kernel a library takes looks like chance, and stays the same."""
        digest = hashlib.sha256(repr((self.seed, sizes)).encode()).digest()
        return int.from_bytes(digest[:4], "big") / 2**32

    def clock_share(self) -> float:
        return 0.93 + 0.07 * math.exp(-self.time / 2) + 0.02 * math.sin(2 * math.pi * self.time / 3)

    def seconds(self, shape) -> float:
        noise = self.random.lognormal(0, 0.01) * (1.3 if self.random.random() < 0.02 else 1)
        taken = flops_of(shape) / (self.rate(shape) * self.clock_share()) * noise
        self.time += taken + 3e-5
        return taken

    def best(self, largest=8192, step=1024) -> float:
        return max(self.rate(shape) for shape in grid(largest, step))

    # What `search_shapes` asks of a clock.
    def now(self) -> float:
        return self.time

    def sample(self, functions, flush, count):
        if flush is not None:
            for _ in range(count * len(functions)):
                flush()
        rounds = [[self.seconds(function.shape) for function in functions] for _ in range(count)]
        return [list(series) for series in zip(*rounds, strict=True)]

    def in_a_row(self, function, count):
        return None


class Imagined:
    """A product of a landscape, which has no numbers to be wrong about."""

    def __init__(self, shape):
        self.shape = shape

    def first_call(self):
        pass

    def verify(self):
        return Verification("imagined", 0.0, 0.0)


def search(landscape, cpu, monkeypatch, time_limit_s=30.0, **options):
    # Flushing the real cache takes real time, of which the imagined machine knows nothing.
    from hyperion.measure.clock import timing
    from hyperion.measure.products import gemm_search

    for module in (gemm_search, timing):
        monkeypatch.setattr(module, "CacheFlush", functools.partial(timing.CacheFlush, elements=8))
    return search_shapes(Imagined, cpu, 8192, 1024, time_limit_s, clock=landscape, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_quick_machine_sees_every_shape_and_the_best_is_found(cpu, monkeypatch, seed):
    landscape = Landscape(seed, peak_tflops=750)
    ranking, finalists = search(landscape, cpu, monkeypatch)
    assert len(ranking) == 512 and len(finalists) <= FINALISTS
    assert landscape.rate(finalists[0].shape) >= 0.99 * landscape.best()
    assert landscape.time <= 30 and all(len(finalist.timing.samples_s) >= 30 for finalist in finalists)


def test_shapes_that_are_asked_for_are_finalists_once(cpu, monkeypatch):
    wanted = [(1024, 1024, 1024), (1000, 1000, 1000), (1024, 1024, 1024)]
    _, finalists = search(Landscape(0, peak_tflops=750), cpu, monkeypatch, also=wanted)
    shapes = [finalist.shape for finalist in finalists]
    assert all(shapes.count(shape) == 1 for shape in wanted)
    lengths = {len(finalist.timing.samples_s) for finalist in finalists}
    assert len(lengths) == 1  # in turn with the others


def test_a_shape_that_is_too_large_for_the_operands_is_refused(cpu):
    with pytest.raises(HyperionError, match="exceeds 64"):
        search_gemm("fp32", cpu, largest=64, step=32, also=[(65, 32, 32)])


@pytest.mark.parametrize(
    ("units", "tile", "seed"),
    [(132, (128, 256), seed) for seed in SEEDS]
    + [(units, tile, seed) for units, tile in ((110, (128, 128)), (304, (256, 256))) for seed in SEEDS[:8]],
)
def test_a_slow_machine_sees_some_shapes_and_the_best_is_found(cpu, monkeypatch, units, tile, seed):
    landscape = Landscape(seed, peak_tflops=12, units=units, tile=tile)
    ranking, finalists = search(landscape, cpu, monkeypatch, seed=seed)
    assert len(ranking) < 300 and landscape.time <= 30 * 1.05
    assert landscape.rate(finalists[0].shape) >= 0.99 * landscape.best()


def test_finalists_come_in_the_order_of_their_rates_and_close_ones_are_told_apart(cpu, monkeypatch):
    """The clock swings by 2 % either way while they are timed; rates 0.5 % apart keep their order."""
    for seed in range(5):
        landscape = Landscape(seed, 750)
        _, finalists = search(landscape, cpu, monkeypatch)
        rates = [landscape.rate(finalist.shape) for finalist in finalists]
        assert len(rates) == FINALISTS and all(later <= 1.005 * rate for rate, later in itertools.pairwise(rates))


def test_finalists_are_compared_within_their_rounds():
    """The first takes 0.4 % less, and the clock has two states, 10 % apart: a plain median may fall into either."""
    mistaken = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        state = random.permutation(np.resize([0.95, 1.05], 61))
        samples = [seconds * state * random.lognormal(0, 0.005, 61) for seconds in (1.0, 1.004)]
        finalists = [
            Finalist((64, 64, 64), Timing(taken, (), True, True, "interval", Telemetry()), Verification("", 0.0, 0.0))
            for taken in samples
        ]
        assert fastest_first(finalists) == [0, 1]
        mistaken += np.median(samples[0]) > np.median(samples[1])
    assert mistaken > 0


def test_the_same_seed_takes_the_same_way(cpu, monkeypatch):
    ways = [search(Landscape(5, 20), cpu, monkeypatch, seed=2)[0] for _ in range(2)]
    assert ways[0] == ways[1]


@pytest.mark.parametrize("tflops", [0.001, 0.05, 1.0])
def test_products_that_time_does_not_allow_are_not_tried(cpu, monkeypatch, tflops):
    landscape = Landscape(1, tflops)
    ranking, finalists = search(landscape, cpu, monkeypatch)
    tried = [flops_of(shape) / landscape.rate(shape) for shape, _ in ranking]
    least_s = flops_of((1024, 1024, 1024)) / landscape.rate((1024, 1024, 1024))
    assert finalists and len(finalists[0].timing.samples_s) >= 30
    # The least of all shapes is measured even where it takes longer than the limit.
    assert landscape.time <= max(30 * 1.05, 50 * least_s) and max(tried) <= max(0.5, least_s)


def test_exhaustive_means_every_shape_whatever_it_takes(cpu, monkeypatch):
    landscape = Landscape(2, peak_tflops=5)
    ranking, finalists = search(landscape, cpu, monkeypatch, exhaustive=True)
    assert len(ranking) == 512 and landscape.time > 30
    assert landscape.rate(finalists[0].shape) >= 0.99 * landscape.best()


def test_a_drift_larger_than_the_difference_of_shapes_is_divided_out():
    """The better of two shapes is sampled most while the clock is low: its plain median is the worse one."""
    random = np.random.default_rng(0)
    drift = np.linspace(0.0, -0.2, 320)
    early, late = [0.05, 0.35, *[0.15] * 4], [0.35, 0.05, *[0.15] * 4]
    places = np.concatenate([random.choice(6, 160, p=early), random.choice(6, 160, p=late)])
    truth = np.array([0.02, 0.0, -0.1, -0.2, 0.1, 0.3])
    values = truth[places] + drift + random.normal(0, 0.01, 320)
    plain = [np.median(values[places == shape]) for shape in (0, 1)]
    assert plain[0] < plain[1]
    found = shape_effects(places, values, 16)
    assert found[0] - found[1] == pytest.approx(0.02, abs=0.008)
    assert found[5] - found[3] == pytest.approx(0.5, abs=0.01)


def test_an_untouched_ranking_has_no_leaders():
    ranking = ShapeRanking(2048, 1024, sample=lambda shapes: [], now=lambda: 0.0)
    assert ranking.leaders(3) == [] and ranking.seen == set()


def test_the_grid_holds_every_multiple_once():
    assert len(grid(8192, 1024)) == len(set(grid(8192, 1024))) == 512
    assert grid(5, 2) == sorted(grid(5, 2), key=flops_of) and set(map(max, grid(5, 2))) == {2, 4}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_search_on_this_cpu(cpu, dtype):
    found = search_gemm(dtype, cpu, time_limit_s=1.5, largest=192, step=64, seed=1)
    assert found.shapes == 27 and 1 <= found.seen <= 27 and found.dtype == dtype and found.data == "normal"
    assert found.stopped == ("all shapes seen" if found.seen == 27 else "limit of 1.5 s")
    best = found.best
    assert best.verification.passed and best.tflops.n >= 30 and best.timing.cold
    assert best.tflops.ci_low <= best.tflops.value <= best.tflops.ci_high
    assert best is found.finalists[0] and {finalist.shape for finalist in found.finalists} <= {s for s, _ in found.ranking}
    m, n, k = best.shape
    assert f"{m}x{n}x{k}" in str(found) and found.backend in str(found) and f"{found.seen} of 27 shapes" in str(found)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "fp8_e4m3fn"])
def test_products_share_their_buffers_and_each_is_right(cpu, dtype):
    operands = SharedOperands(64, dtype, cpu)
    products = [operands.product(shape) for shape in ((64, 64, 64), (64, 16, 32), (16, 48, 64), (32, 1, 16))]
    assert len({product.a_MK.data_ptr() for product in products}) == len({p.c_MN.data_ptr() for p in products}) == 1
    assert all(product.verify().passed for product in products)
    # Each overwrites what the one before has left, so only the last output is right.
    assert not products[0]._verified().passed and products[-1]._verified().passed


@pytest.mark.slow
def test_a_wrong_winner_is_passed_over_and_none_at_all_is_an_error(cpu):
    found = search_gemm("fp32", cpu, time_limit_s=1.0, largest=128, step=64)
    wrong = [type(f)(f.shape, f.timing, Verification("float64 slice", float("nan"), 1e-5)) for f in found.finalists]
    spoilt = type(found)(**{**vars(found), "finalists": (wrong[0], *found.finalists[1:])})
    if len(found.finalists) > 1:
        assert spoilt.best is found.finalists[1]
    with pytest.raises(HyperionError, match="No finalist in fp32 passes the check of its output"):
        _ = type(found)(**{**vars(found), "finalists": tuple(wrong)}).best


def test_what_a_device_does_not_multiply_is_not_searched(cpu):
    for dtype in ("fp8", "tf32", "fp8_e4m3fn"):
        with pytest.raises(HyperionError, match="unsupported: "):
            search_gemm(dtype, cpu, largest=64, step=32)
    with pytest.raises(HyperionError, match="No multiple of 128"):
        search_gemm("fp32", cpu, largest=64, step=128)


def test_a_refused_shape_ends_the_search_with_the_librarys_words(cpu):
    def product(shape):
        made = Gemm(*shape, "fp32", cpu)
        made._multiply = lambda: torch.mm(made.a_MK, made.b_KN[:-1])
        return made

    with pytest.raises(RefusedProduct, match="refused a product of 16x16x16"):
        search_shapes(product, cpu, 32, 16, time_limit_s=1.0)
