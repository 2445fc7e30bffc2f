"""Judge of equal work: lists every difference between the work of a run and that of the reference run."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hyperion.engines.record import Group, Record
from hyperion.engines.work import Work

# Relative tolerance for numbers of elements, because sharded tensors may be padded.
_PADDING = 0.05
_UPDATED = "float32"
_ALGORITHM = "AdamW"
# Classes that implement AdamW, and classes that do so only if their option says that weight decay is decoupled.
_ADAMW = {"torch.optim.adamw.AdamW"}
_ADAMW_IF_DECOUPLED = {
    "torch.optim.adam.Adam",
    "apex.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
}


@dataclass(frozen=True)
class Difference:
    """One difference between the work of a run and that of the reference run.

    Args:
        name: name of the difference, such as "learning rate".
        seen: value of the run, as text.
        expected: value of the reference run, as text.
    """

    name: str
    seen: str
    expected: str

    def __str__(self) -> str:
        return f"{self.name}: {self.seen} instead of {self.expected}"


def unequal(work: Work, record: Record, reference: Record, shifted_losses: dict[int, float] | None = None) -> list[Difference]:
    """Return every difference between the work of a run and that of the reference run. An empty list means equal work.

    Args:
        work: the work that both runs had to perform.
        record: record of the run.
        reference: record of the plain loop with the same initial state and tokens.
        shifted_losses: mean loss of the first step by distance between inputs and targets, from `first_losses`. Without it, a
            wrong label shift is only reported as a different first loss.
    """
    undecayed = sum(group.elements for group in reference.groups if not group.weight_decay)
    elements = sum(group.elements for group in reference.groups)
    found = [
        *_inputs(record, reference, work),
        *_loss(work, record, reference, shifted_losses or {}),
        *_gradients(work, record, reference),
        *other_settings(work, record, elements, undecayed),
    ]
    # Every other difference may change the gradients of later steps, so this one is named only if it has no other cause.
    return found or list(_later_gradients(work, record, reference))


def other_settings(work: Work, record: Record, elements: float, undecayed: float) -> list[Difference]:
    """Return every difference between what was observed in a run and the work that needs no reference run to be seen.

    Args:
        work: the work that the run had to perform.
        record: record of the run.
        elements: number of elements of the model, all of which the work updates.
        undecayed: number of those that the work updates without weight decay.
    """
    return [*_not_finite(record), *_clipping(work, record), *_optimizer(work, record, elements, undecayed)]


def _not_finite(record: Record) -> Iterable[Difference]:
    """Report the first loss or norm that is infinite or NaN. The other comparisons would accept a NaN."""
    series = {"loss": record.losses, "gradient norm": record.norms, "norm at the optimizer": record.clipped_norms}
    values = [(step, name, value) for name, each in series.items() for step, value in enumerate(each, 1) if value is not None]
    if wrong := [(step, name, value) for step, name, value in values if not math.isfinite(value)]:
        step, name, value = min(wrong)
        yield Difference("not finite", f"{name} of {value} in step {step}", "finite numbers")


def _inputs(record: Record, reference: Record, work: Work) -> Iterable[Difference]:
    if record.initial_sha256 != reference.initial_sha256:
        yield Difference("initial state", record.initial_sha256[:12], reference.initial_sha256[:12])
    if record.rows != reference.rows:
        step = next((i for i, pair in enumerate(zip(record.rows, reference.rows, strict=False)) if pair[0] != pair[1]), None)
        if step is None:
            yield Difference("data order", f"{len(record.rows)} steps of rows", f"{len(reference.rows)}")
        else:
            yield Difference("data order", f"rows {record.rows[step]} in step {step + 1}", f"{reference.rows[step]}")
    if record.counted_tokens != (tokens := sum(map(len, reference.rows)) * work.sequence_length):
        yield Difference("tokens counted", f"{record.counted_tokens:,}", f"{tokens:,}")
    if record.optimizer_steps != reference.optimizer_steps:
        yield Difference("optimizer steps", f"{record.optimizer_steps}", f"{reference.optimizer_steps}")


def _loss(work: Work, record: Record, reference: Record, shifted: dict[int, float]) -> Iterable[Difference]:
    """Compare the first loss, which depends only on the initial state, the rows, the label shift and the reduction."""
    first, expected, near = record.losses[0], reference.losses[0], first_loss_tolerance(work.dtype)
    if abs(first / expected - 1) <= near:
        return
    # Find the combination of label shift and loss reduction whose expected loss is closest to the observed one.
    factors = {1.0: "mean", float(work.step_tokens): "sum", 1.0 / work.micro_batches: "mean divided by the micro-batches"}
    choices = [(abs(first / (factor * loss) - 1), shift, factor) for shift, loss in shifted.items() for factor in factors]
    error, shift, factor = min(choices, default=(math.inf, 1, 1.0))
    if error > near:
        yield Difference("first loss", f"{first:.6g}", f"{expected:.6g}")
        return
    if shift != 1:
        yield Difference("label shift", f"{shift} (first loss {first:.6g})", f"1 ({expected:.6g})")
    if factor != 1.0:
        yield Difference("loss reduction", f"{factors[factor]} (first loss {first:.6g})", f"mean ({expected:.6g})")


def first_loss_tolerance(dtype: str) -> float:
    """Return the relative tolerance for the loss of the first step. All runs compute this loss from the same weights.

    A loss is the difference of a logit and of a mean over logits, which are smaller than the loss in a model with random weights.
    So the relative error of the loss is at most about that of one rounding of a logit, which is 2^-9 in bf16. In fp32, the order
    of the sums adds a few more roundings of 2^-24.
    """
    return 1e-5 if dtype == "fp32" else 2.0**-9


def _gradients(work: Work, record: Record, reference: Record) -> Iterable[Difference]:
    """Compare the norm of the first gradient."""
    norm, expected, near = record.norms[0], reference.norms[0], _near(work)
    if norm is None or expected is None:
        yield Difference("gradient norm", "not measured", "measured before clipping")
        return
    scale = norm / expected
    causes = {float(work.step_tokens): "sum over tokens", float(work.micro_batches): "sum over micro-batches"}
    causes |= {float(record.ranks): "sum over ranks", float(work.step_tokens / work.batch_size): "sum over the tokens of a row"}
    cause = next((text for factor, text in causes.items() if factor > 1 and abs(scale / factor - 1) < near), "")
    if cause:
        yield Difference("gradient reduction", f"{cause} (norm x {scale:.4g})", "mean over all tokens")
    elif abs(scale - 1) > near:
        yield Difference("gradient scale", f"first norm {norm:.4g}", f"{expected:.4g}")


def _later_gradients(work: Work, record: Record, reference: Record) -> Iterable[Difference]:
    """Compare the gradient norm of each step after the first that was measured in both runs."""
    pairs = zip(record.norms[1:], reference.norms[1:], strict=False)
    both = [(step, norm, expected) for step, (norm, expected) in enumerate(pairs, 2) if norm is not None and expected]
    other = [entry for entry in both if abs(entry[1] / entry[2] - 1) > _near(work)]
    if other:
        step, norm, expected = other[0]
        yield Difference("later gradients", f"norm {norm:.4g} in step {step} and others in {len(other)} steps", f"{expected:.4g}")


def _clipping(work: Work, record: Record) -> Iterable[Difference]:
    """Compare the norms at the optimizer with the limit, and the dtype of gradient reductions with that of the updates."""
    near = _near(work)
    limit = work.clip_norm * (1 + near)
    beyond = [step for step, value in enumerate(record.clipped_norms[: work.steps], 1) if value > limit]
    shares = [value / min(before, work.clip_norm) for value, before in _pairs(record)]
    if beyond:
        seen = f"norm {max(record.clipped_norms):.4g} at the optimizer in {len(beyond)} steps"
        yield Difference("gradient clipping", seen, f"at most {work.clip_norm:g}")
    elif min(shares, default=1.0) < 1 - near:
        yield Difference(
            "gradient clipping", f"gradients scaled to {min(shares):.4g} of the limited norm", f"limit {work.clip_norm:g}"
        )
    if other := {name: count for name, count in record.reduced.items() if name != _UPDATED and count > work.sequence_length}:
        yield Difference("reduction dtype", ", ".join(sorted(other)), _UPDATED)


def _pairs(record: Record) -> list[tuple[float, float]]:
    """Return (norm at the optimizer, reported norm) for each step that has both."""
    both = zip(record.clipped_norms, record.norms, strict=False)
    return [(value, before) for value, before in both if before is not None and value > 0]


def _optimizer(work: Work, record: Record, elements: float, undecayed: float) -> Iterable[Difference]:
    settings: tuple[tuple[str, Callable[[Group], str], str], ...] = (
        ("optimizer", _algorithm, _ALGORITHM),
        ("learning rate", lambda group: _rates(group.learning_rates), _numbers((work.learning_rate,))),
        ("betas", lambda group: _numbers(group.betas), _numbers(work.betas)),
        ("eps", lambda group: "" if group.eps is None else _numbers((group.eps,)), _numbers((work.eps,))),
        ("master dtype", lambda group: group.dtype, _UPDATED),
    )
    for name, choose, expected in settings:
        # Another algorithm may lack an option, as SGD lacks betas. The difference is then the optimizer, not the option.
        values = {choose(group) or "none" for group in record.groups if choose(group) or _algorithm(group) == _ALGORITHM}
        seen = ", ".join(sorted(values))
        if seen != expected and (seen or not record.groups):
            yield Difference(name, seen or "no optimizer was observed", expected)
    updated = sum(group.elements for group in record.groups)
    if record.groups and abs(updated - elements) > _PADDING * elements + record.ranks:
        yield Difference("updated elements", f"{updated:,.0f}", f"{elements:,.0f}")
    decays, expected = ({group.weight_decay for group in record.groups} - {0.0}), {work.weight_decay} - {0.0}
    if decays != expected:
        yield Difference("weight decay", _numbers(sorted(decays)) or "none", _numbers(expected) or "none")
        return
    without = sum(group.elements for group in record.groups if not group.weight_decay)
    if abs(without - undecayed) > _PADDING * undecayed + record.ranks:
        name = "decay on norms" if without < undecayed else "no decay on matrices"
        yield Difference(name, f"{without:,.0f} elements without decay", f"{undecayed:,.0f}")


def _algorithm(group: Group) -> str:
    """Return _ALGORITHM, or what differs from it. An option that an optimizer does not state has its default."""
    decoupled = group.decoupled_weight_decay
    if group.optimizer not in _ADAMW | _ADAMW_IF_DECOUPLED:
        return group.optimizer
    if decoupled is False or (decoupled is None and group.optimizer not in _ADAMW):
        return f"{group.optimizer} {'with L2 in the gradient' if decoupled is False else 'of unknown weight decay'}"
    return f"{group.optimizer} with AMSGrad" if group.amsgrad else _ALGORITHM


def _near(work: Work) -> float:
    """Return the relative tolerance of gradient norms."""
    return 0.02 if work.dtype == "fp32" else 0.1


def _rates(rates: tuple[float, ...]) -> str:
    return _numbers(rates) if len(rates) < 4 else f"{len(rates)} rates from {rates[0]:g} to {rates[-1]:g}"


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)
