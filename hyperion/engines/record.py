"""What a run did: the values that `Observer` read from the run, not what an adapter was asked to do."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Group:
    """Parameters that the optimizer updated with the same options, read when its `step` was called.

    Args:
        elements: number of elements over all ranks, each counted once. Padding of sharded tensors is included.
        weight_decay, betas, eps: options of the group.
        learning_rates: all learning rates that were used, in order and without repetition.
        dtype: dtype of the updated tensors, such as "float32".
        optimizer: class of the optimizer, such as "torch.optim.adamw.AdamW".
    """

    elements: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    learning_rates: tuple[float, ...]
    dtype: str
    optimizer: str


@dataclass(frozen=True)
class Record:
    """What a run did, on all ranks together.

    Args:
        stack: name of the framework with its variant.
        ranks: number of ranks.
        versions: version of each package that the framework needs, of the imported modules.
        engine: class of the object that trains, such as "deepspeed.runtime.engine.DeepSpeedEngine".
        device: name of the device.
        losses: loss of each step, mean over ranks of the reported losses.
        norms: gradient norm of each step before clipping, as the framework's own function returned it. None if it reports none.
        clipped_norms: gradient norm of each step that the optimizer received, computed from its gradients.
        step_times_s: time from the end of one step to the end of the next, on the slowest rank, with a synchronized device.
        initial_sha256: hash of the state before the first step, in Hugging Face names and order.
        rows: numbers of the rows of each step that the embedding received, over all ranks, sorted. -1 is an unknown row.
        counted_tokens: tokens that the framework or its adapter counted, over all ranks and steps.
        groups: groups of the optimizer.
        optimizer_steps: number of updates, from the optimizer's own state.
        reduced: elements of gradients that the collectives of the first step reduced on a rank, by dtype.
        peak_memory_gib: largest peak of a rank: allocated device memory, or resident memory of the process on a CPU. None if the
            system does not report it.
        energy_j: energy of the steps after the first half, None if it cannot be read.
        energy_steps: number of steps of `energy_j`.
        final_file: file with the final state in Hugging Face names.
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
    unreadable: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can represent."""
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Record":
        """Return the record from the dict that `as_dict` returns, after it was JSON."""
        known = {item.name: values[item.name] for item in fields(cls)}
        groups = [
            Group(**{**group, "betas": tuple(group["betas"]), "learning_rates": tuple(group["learning_rates"])})
            for group in values["groups"]
        ]
        return cls(**{**known, "groups": groups})
