"""Record of a run: values that `Observer` read from the run, not settings that the adapter received."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hyperion.measure.steps.step_parts import StepParts


@dataclass(frozen=True)
class Group:
    """Parameters that share optimizer options. The options are read when the optimizer's `step` is called.

    A parameter whose options change during the run is in one group for each of them, with an equal part of its elements.

    Args:
        elements: number of elements over all ranks, each counted once. It includes the padding of sharded tensors.
        weight_decay: option of the group; 0 if the optimizer has no such option.
        betas, eps: options of the group. Empty or None if the optimizer has no such option, as SGD, or has one of another form.
        learning_rates: distinct learning rates of the run, in order of first use. Empty if the optimizer computes its own.
        dtype: dtype of the updated tensors, such as "float32".
        optimizer: class of the optimizer, such as "torch.optim.adamw.AdamW".
        amsgrad: whether the largest second moment is used (AMSGrad). None if the optimizer does not state it.
        decoupled_weight_decay: whether weight decay is applied to the weights (AdamW) and not to the gradients (L2). None if the
            optimizer does not state it.
    """

    elements: float
    weight_decay: float
    betas: tuple[float, ...]
    eps: float | None
    learning_rates: tuple[float, ...]
    dtype: str
    optimizer: str
    amsgrad: bool | None = None
    decoupled_weight_decay: bool | None = None


@dataclass(frozen=True)
class Record:
    """Record of a run, combined over all ranks.

    Args:
        stack: name of the framework and its variant.
        ranks: number of ranks.
        versions: version of each package that the framework needs, if the run imported it.
        engine: class of the object that trains, such as "deepspeed.runtime.engine.DeepSpeedEngine".
        device: name of the device.
        losses: loss of each step, averaged over the ranks that report one.
        norms: gradient norm of each step before clipping, as returned by the framework's function. None if it returns none.
        clipped_norms: norm of the gradients that the optimizer received in each step.
        step_times_s: time of each step in seconds, from the end of the previous step, on the slowest rank, with a synchronized
            device.
        initial_sha256: SHA-256 of the state before the first step, with Hugging Face names.
        rows: sorted numbers of the rows that the embedding received in each step, over all ranks. -1 is an unknown row.
        counted_tokens: number of tokens as counted by the framework or its adapter, summed over all ranks and steps.
        groups: parameter groups of the optimizer.
        optimizer_steps: number of updates, read from the optimizer state, or counted if the optimizer keeps no such number.
        reduced: number of gradient elements that the collectives of the first step reduced on rank 0, by dtype.
        peak_memory_gib: largest peak of a rank in GiB up to its last step: allocated device memory, or on a CPU the resident
            memory of the process. None if it cannot be read.
        energy_j: energy of the last `energy_steps` steps in joules, summed over all ranks. None if it cannot be read.
        energy_steps: number of steps that `energy_j` covers.
        final_file: file with the final state dict with Hugging Face names; "" if the work is timed.
        trace: parts of the traced steps on rank 0. None if no step was traced.
        unreadable: for each value that could not be read, the reason. The key is the name of the value.
    """

    stack: str
    ranks: int
    versions: dict[str, str]
    engine: str
    device: str
    losses: list[float]
    norms: list[float | None]
    clipped_norms: list[float]
    step_times_s: list[float]
    initial_sha256: str
    rows: list[list[int]]
    counted_tokens: int
    groups: list[Group]
    optimizer_steps: int
    reduced: dict[str, int]
    peak_memory_gib: float | None
    energy_j: float | None = None
    energy_steps: int = 0
    final_file: str = ""
    trace: StepParts | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Record":
        """Return the record from a dict that `as_dict` returned and that may have been stored as JSON."""
        known = {item.name: values[item.name] for item in fields(cls)}
        groups = [
            Group(**{**group, "betas": tuple(group["betas"]), "learning_rates": tuple(group["learning_rates"])})
            for group in values["groups"]
        ]
        trace = None if known["trace"] is None else StepParts.of(known["trace"])
        return cls(**{**known, "groups": groups, "trace": trace})
