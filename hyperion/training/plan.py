"""How long to train, and when to look."""

from dataclasses import dataclass

from hyperion.errors import HyperionError, require_number


@dataclass(frozen=True)
class Plan:
    """How long to train, and when to look.

    Attributes:
        epochs: passes over the loader; or
        steps: optimizer steps (exactly one of the two is given).
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        checkpoint_every: steps between checkpoints; None saves only when told to stop, and at the end.
        keep: checkpoints kept.
    """

    epochs: int | None = None
    steps: int | None = None
    evaluate_every: int = 1
    checkpoint_every: int | None = None
    keep: int = 2

    def __post_init__(self):
        if (self.epochs is None) == (self.steps is None):
            raise HyperionError("give epochs or steps, one of them", where="Plan", next_step="for example Plan(epochs=3)")
        for name in ("epochs", "steps", "evaluate_every", "checkpoint_every", "keep"):
            if (value := getattr(self, name)) is not None:
                require_number(name, value, "Plan", whole=True, at_least=1)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole plan."""
        return self.steps if self.steps is not None else self.epochs * steps_per_epoch
