"""Observe a training run of any framework: embedding inputs, optimizer updates, collectives, step times, memory and energy.

An adapter calls `start` before its first step, `step` after each optimizer step, and `finish` at the end, on every rank. All
other values are measured in the run, most of them with PyTorch hooks, so they describe what the run did and not what the adapter
intended. The measurement ends with the last step of the work: a copy of the final state is not part of it, and neither are the
steps that are traced afterwards.
"""

import contextlib
import hashlib
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperion.engines.record import Group, Record
from hyperion.engines.work import Work
from hyperion.hardware.telemetry import Sampler, reader_for
from hyperion.measure.memory_use.tensor_memory import PeakMemoryRegion
from hyperion.measure.steps.step_parts import StepParts, StepTracer
from hyperion.processes import world

REPORT_INTERVAL_S = 1.0
_LONGEST_REASON = 500
_HASHING_THREADS = 4  # each of them holds the copy of a tensor
_OPTIONS = ("weight_decay", "betas", "eps", "amsgrad", "decoupled_weight_decay")
_REDUCTIONS = ("allreduce", "all_reduce", "reduce_scatter")


class Observer:
    """Observer of one rank. `finish` combines its record with those of the other ranks.

    Args:
        work: the training work of the run.
        stack: name of the framework and its variant.
        packages: import names of the packages whose versions are recorded.
        folder: folder to which the final state is written.
        on_step: called on rank 0 after the first step, and then at most once per second. The arguments are the number of finished
            steps and the loss of rank 0, which is None if rank 0 does not know it.
    """

    def __init__(
        self,
        work: Work,
        stack: str,
        packages: Sequence[str],
        folder: Path,
        on_step: Callable[[int, float | None], object] = lambda step, loss: None,
    ):
        self.work, self.stack, self.packages, self.folder, self._on_step = work, stack, packages, folder, on_step
        self.here = world()
        self._device = torch.device(self.here.device.torch_device)
        self._losses: list[float | None] = []
        self._norms: list[float | None] = []
        self._squares: list[float] = [0.0]
        self._ends_s: list[float] = []
        self._reported_s = -float("inf")
        self._inputs: list[list[Tensor]] = [[]]
        self._tokens = 0
        # For each id of a parameter: the parameter, the number of its elements that this rank counts, the distinct options of its
        # parameter group in the run, and its optimizer.
        self._updated: dict[int, tuple[Tensor, float, list[dict[str, Any]], torch.optim.Optimizer]] = {}
        self._rates: dict[int, list[float]] = {}
        self._counts: dict[int, int] = {}  # number of updates of each parameter
        self._collectives = _Collectives()
        self._memory = PeakMemoryRegion(self.here.device)
        self._sampler: Sampler | None = None
        self._energy_steps = 0
        self._used: _Used | None = None  # None until the last step of the work has ended
        self._seen: _Seen | None = None
        self._tracer: StepTracer | None = None
        self._trace: StepParts | None = None
        self._untraced = ""

    @property
    def device(self) -> str:
        """The device of this rank, such as "cpu" or "cuda:0"."""
        return str(self._device)

    def start(
        self,
        engine: object,
        embedding: nn.Module | None,
        state: dict[str, Tensor],
        readers: int = 1,
        own_share: Callable[[Tensor], float] | None = None,
    ) -> None:
        """Start the record, directly before the first step. All ranks must call this method.

        Args:
            engine: the object that trains. Its class is recorded.
            embedding: the module that receives the token ids, of shape [b, sequence_length] or [b, sequence_length + 1]. None on
                a rank without an embedding, such as a later pipeline stage.
            state: the current state dict with Hugging Face names, complete on rank 0. Other ranks may pass an empty dict.
            readers: number of ranks that receive the same row, such as the size of a tensor-parallel group.
            own_share: function that returns the share of a parameter's elements that this rank counts: 1 / n if n ranks hold the
                same values. By default, it is computed from the number of elements on all ranks.
        """
        self._engine = f"{type(engine).__module__}.{type(engine).__qualname__}"
        self._readers, self._own_share = readers, own_share
        self._parameters = sum(tensor.numel() for tensor in state.values())
        self._initial = sha256_of_state(state) if self.here.rank == 0 else ""
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._on_update)]
        if embedding is not None:
            self._handles.append(embedding.register_forward_pre_hook(self._on_input))
        self._memory.__enter__()
        self._collectives.__enter__()
        self._start_s = self._now()

    def step(self, loss: float | Tensor | None, norm: float | Tensor | None, tokens: int) -> None:
        """Record the end of an optimizer step. A step after the last one of a work with traced steps is traced instead.

        Args:
            loss: mean loss over this rank's tokens of the step, or over all its tokens; None on a rank that does not know it.
            norm: gradient norm before clipping, as returned by the framework's function; None if it returned none.
            tokens: number of scored tokens of this rank in the step, as counted by the framework or its data loader.
        """
        if self._seen is not None:
            self._end_traced_step()
            return
        if self._sampler is not None:
            self._energy_steps += 1
        # Measure energy in the second half of the steps only, after compilation and warm-up. The sampler starts, with its first
        # reading, before the end of the step, so that the next step does not contain the time that this takes.
        elif len(self._ends_s) + 1 == self.work.steps // 2:
            self._now()
            reader = reader_for(self.here.device)
            reader()
            self._sampler = Sampler(self.here.device, reader=reader)
            self._sampler.__enter__()
        self._ends_s.append(self._now())
        if len(self._ends_s) == 1:
            self._collectives.__exit__(None, None, None)
        self._losses.append(None if loss is None else float(loss))
        self._norms.append(None if norm is None else float(norm))
        self._tokens += tokens
        self._squares.append(0.0)
        self._inputs.append([])
        # Not after each step, because the time of a report is part of the next step.
        if self.here.rank == 0 and self._ends_s[-1] - self._reported_s >= REPORT_INTERVAL_S:
            self._reported_s = self._ends_s[-1]
            self._on_step(len(self._ends_s), self._losses[-1])
        if len(self._ends_s) == self.work.steps:
            self._used = self._end_use()
            if self.work.traced:
                self._seen = self._end_observation()
                self._start_tracer()

    def finish(self, state: dict[str, Tensor]) -> dict[str, Any]:
        """End the record, and return it for all ranks combined as a JSON-serializable dict. All ranks must call this method.

        Args:
            state: the final state dict with Hugging Face names, complete on rank 0. Other ranks may pass an empty dict. It is not
                used if the work is timed.
        """
        used = self._used or self._end_use()  # a run may make fewer steps than the work has
        seen = self._seen or self._end_observation()
        unreadable = used.unreadable
        if self._tracer is not None:
            self._give_up_trace(RuntimeError("the run ended before its last traced step"))
        if self._untraced:
            unreadable = unreadable | {"trace": self._untraced}
        mine = {
            "losses": self._losses,
            "norms": self._norms,
            "rows": seen.rows,
            "times_s": list(np.diff([self._start_s, *self._ends_s])),
            "squares": self._squares,
            "tokens": self._tokens,
            "groups": seen.groups,
            "updates": seen.updates,
            "reduced": self._collectives.reduced,
            "memory": used.memory_gib,
            "energy_j": used.energy_j,
        }
        ranks = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(ranks, mine)
        final = ""
        if self.here.rank == 0 and not self.work.timed:
            final = str(save_state(self.folder / "final.safetensors", state))
        return self._combined(ranks, final, unreadable).as_dict()

    def finish_after(self, error: Exception) -> dict[str, Any] | None:
        """Return the record of a run that failed in a traced step, with the error as the reason why there is no trace.

        Return None if another part of the run failed, or if other ranks may wait for this one.
        """
        if self._seen is None or self._trace is not None or self.here.size > 1:
            return None
        self._give_up_trace(error)
        return self.finish({})

    def _end_use(self) -> "_Used":
        """End the measurement of memory and energy."""
        self._memory.__exit__(None, None, None)
        peak = self._memory.peak
        energy_j, unreadable = None, {} if peak.gib is not None else {"peak_memory_gib": peak.reason}
        if self._sampler is not None:
            self._sampler.__exit__(None, None, None)
            telemetry = self._sampler.telemetry
            power_w = telemetry.power_w
            if telemetry.energy_j is not None and telemetry.window_s > 0:
                # The energy counter was last read up to `interval_s` before the end of the last step.
                power_w = telemetry.energy_j / telemetry.window_s
            if power_w is not None:
                energy_j = power_w * (self._ends_s[-1] - self._ends_s[-1 - self._energy_steps])
            else:
                unreadable["energy_j"] = telemetry.unreadable.get("power_w", "no reading")
        return _Used(peak.gib, energy_j, unreadable)

    def _end_observation(self) -> "_Seen":
        """Remove the hooks, and return what they have read."""
        for handle in self._handles:
            handle.remove()
        return _Seen([self._row_numbers(parts) for parts in self._inputs], self._groups(), self._updates())

    def _start_tracer(self) -> None:
        if self.here.rank != 0:
            return
        try:
            self._tracer = StepTracer(self.here.device, self.work.traced)
            self._tracer.start()
        except Exception as error:  # the profiler may raise any exception, and the record does not depend on it
            self._give_up_trace(error)

    def _end_traced_step(self) -> None:
        self._now()
        if self._tracer is None:
            return
        try:
            if self._tracer.end_step():
                self._trace, self._tracer = self._tracer.parts(), None
        except Exception as error:
            self._give_up_trace(error)

    def _give_up_trace(self, error: Exception) -> None:
        self._untraced = f"not traced: {type(error).__name__}: {error}"[:_LONGEST_REASON]
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            with contextlib.suppress(Exception):  # the first error is the reason
                tracer.stop()

    def _combined(self, ranks: list[dict[str, Any]], final: str, unreadable: dict[str, str]) -> Record:
        # Without `own_share`, each element counts 1 / copies, where copies is the number of ranks that hold it.
        held = sum(group.elements for rank in ranks for group in rank["groups"])
        copies = 1.0 if self._own_share is not None else float(max(1, round(held / max(1, self._parameters_everywhere()))))
        merged: dict[tuple, float] = {}
        for rank in ranks:
            for group in rank["groups"]:
                key = tuple(vars(group).values())[1:]  # all but the number of elements
                merged[key] = merged.get(key, 0.0) + group.elements / copies
        steps = len(self._losses)
        peak_unknown = any(rank["memory"] is None for rank in ranks)
        return Record(
            stack=self.stack,
            ranks=len(ranks),
            versions=versions_of(self.packages),
            engine=self._engine,
            device=self.here.device.name,
            losses=[_mean(rank["losses"][step] for rank in ranks) for step in range(steps)],
            norms=[_first(rank["norms"][step] for rank in ranks) for step in range(steps)],
            clipped_norms=[(sum(rank["squares"][step] for rank in ranks) / copies) ** 0.5 for step in range(steps)],
            step_times_s=[float(max(rank["times_s"][step] for rank in ranks)) for step in range(steps)],
            initial_sha256=self._initial,
            rows=[self._read_rows(ranks, step) for step in range(steps)],
            counted_tokens=sum(rank["tokens"] for rank in ranks) // self._readers,
            groups=[Group(elements, *key) for key, elements in sorted(merged.items(), key=lambda item: -item[1])],
            optimizer_steps=max(rank["updates"] for rank in ranks),
            reduced=ranks[0]["reduced"],
            peak_memory_gib=None if peak_unknown else max(rank["memory"] for rank in ranks),
            energy_j=None if any(rank["energy_j"] is None for rank in ranks) else sum(rank["energy_j"] for rank in ranks),
            energy_steps=self._energy_steps,
            final_file=final,
            trace=self._trace,
            unreadable=unreadable,
        )

    def _parameters_everywhere(self) -> int:
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._parameters
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self._parameters)
        return max(counts)

    def _read_rows(self, ranks: list[dict[str, Any]], step: int) -> list[int]:
        """Return the sorted row numbers of a step. A row that several ranks read by design counts once."""
        numbers = sorted(number for rank in ranks for number in rank["rows"][step])
        return numbers[:: self._readers]

    def _row_numbers(self, parts: list[Tensor]) -> list[int]:
        if not hasattr(self, "_known_rows"):
            length = self.work.sequence_length
            self._known_rows = {row[:length].tobytes(): number for number, row in enumerate(np.asarray(self.work.tokens()))}
        rows = [row for part in parts for row in np.atleast_2d(part.cpu().numpy())]
        length = self.work.sequence_length
        return [self._known_rows.get(np.ascontiguousarray(row[:length]).astype(np.int64).tobytes(), -1) for row in rows]

    def _on_input(self, module: nn.Module, arguments: tuple) -> None:
        # Clone the input, because a framework may reuse its buffer for the next batch.
        self._inputs[-1].append(arguments[0].detach().clone())

    def _on_update(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Read the groups and gradients that an optimizer is about to use. Sharded optimizers call `step` once per group."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                tensor, gradient = _local(parameter), _local(parameter.grad)
                share = 1.0 if self._own_share is None else self._own_share(parameter)
                options = {name: group[name] for name in _OPTIONS if name in group}
                seen = self._updated[id(parameter)][2] if id(parameter) in self._updated else []
                if options not in seen:
                    seen.append(options)
                self._updated[id(parameter)] = (parameter, tensor.numel() * share, seen, optimizer)
                rates, rate = self._rates.setdefault(id(parameter), []), _number(group.get("lr"))
                if rate is not None and rate not in rates:
                    rates.append(rate)
                self._counts[id(parameter)] = self._counts.get(id(parameter), 0) + 1
                if not (self.work.timed and len(self._ends_s) >= self.work.steps // 2):
                    self._squares[-1] += share * _sum_of_squares(gradient)

    def _groups(self) -> list[Group]:
        elements: dict[tuple, float] = {}
        for key, (parameter, count, seen, optimizer) in self._updated.items():
            kind = type(optimizer)
            for options in seen:
                identity = (
                    # Another optimizer lacks some of these options. The judge then names the optimizer.
                    _number(options.get("weight_decay")) or 0.0,
                    tuple(map(float, options.get("betas", ()))),
                    _number(options.get("eps")),
                    tuple(self._rates[key]),
                    str(_local(parameter).dtype).removeprefix("torch."),
                    f"{kind.__module__}.{kind.__qualname__}",
                    _flag(options.get("amsgrad")),
                    # apex, Transformer Engine and DeepSpeed keep this option in the optimizer, under another name.
                    _flag(options.get("decoupled_weight_decay", getattr(optimizer, "adam_w_mode", None))),
                )
                # Each element counts once in total, so a parameter whose options change counts in equal parts.
                elements[identity] = elements.get(identity, 0.0) + count / len(seen)
        return [Group(count, *identity) for identity, count in elements.items()]

    def _updates(self) -> int:
        """Return the number of updates. Most optimizers have this number in the state of each parameter, but SGD does not."""
        counts = [
            optimizer.state.get(parameter, {}).get("step", self._counts[key])
            for key, (parameter, _, _, optimizer) in self._updated.items()
        ]
        return int(max(counts, default=0))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class _Used:
    """Memory and energy of a rank up to its last step; see `Record`."""

    memory_gib: float | None
    energy_j: float | None
    unreadable: dict[str, str]


@dataclass(frozen=True)
class _Seen:
    """What the hooks of a rank have read; see `Record`."""

    rows: list[list[int]]
    groups: list[Group]
    updates: int


class _Collectives(TorchDispatchMode):
    """Count the elements of reductions, by dtype.

    A dispatch mode is used, because DDP starts reductions from C++. Replaced Python functions would not see them.
    """

    def __init__(self):
        super().__init__()
        self.reduced: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and any(word in func.name() for word in _REDUCTIONS):
            # Count the largest tensor: the input of a reduce-scatter is larger than its output; an all-reduce has only one list.
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            largest = max(tensors, key=Tensor.numel, default=None)
            if largest is not None:
                name = str(largest.dtype).removeprefix("torch.")
                self.reduced[name] = self.reduced.get(name, 0) + largest.numel()
        return func(*args, **(kwargs or {}))


def sha256_of_state(state: dict[str, Tensor]) -> str:
    """Return the SHA-256 of the names and the hashes of the float32 values of a state dict, ordered by name."""

    def hashed(name: str) -> bytes:
        return hashlib.sha256(state[name].detach().float().cpu().contiguous().numpy().data).digest()

    digest, names = hashlib.sha256(), sorted(state)
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:  # hashlib and copies from a device release the interpreter lock
        for name, value in zip(names, pool.map(hashed, names), strict=True):
            digest.update(name.encode() + b"\0" + value)
    return digest.hexdigest()


def save_state(file: Path, state: dict[str, Tensor]) -> Path:
    """Write a state dict with Hugging Face names to a safetensors file in float32, and return the path."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in state.items()}, file)
    return file


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that this process has imported. Packages that were not imported are omitted."""
    found = {}
    for name in packages:
        if name in sys.modules:
            top = name.split(".")[0]
            try:
                found[name] = importlib.metadata.version(top)
            except importlib.metadata.PackageNotFoundError:
                # The distribution has another name. Finding it reads the metadata of all packages, which takes a second.
                owners = importlib.metadata.packages_distributions().get(top, [])
                version = importlib.metadata.version(owners[0]) if owners else ""
                found[name] = version or getattr(sys.modules[name], "__version__", "unknown")
    return found


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a distributed tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(tensor: Tensor) -> float:
    """Return the sum of the squared elements, computed in float64.

    On a GPU, the norm in float64 copies its input. A framework may store all gradients in one tensor, whose copy would be counted
    as peak memory of the framework. So the norm is computed in parts.
    """
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in tensor.reshape(-1).split(1 << 24)]
    return sum(float(norm) ** 2 for norm in norms)


def _flag(value: object) -> bool | None:
    return None if value is None else bool(value)


def _number(value: Any) -> float | None:
    """Return the value of an option as a number, or None if it is absent or has another form, as the pair `eps` of Adafactor."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
