"""Check one architecture: run a tiny model with random weights forward, backward and in generation, and compare with float64."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from hyperion.experiments.coverage.architecture_configs import ARCHITECTURES
from hyperion.experiments.coverage.rounding import Case, Derivatives, errors_over_tolerance

# The two largest logits count as a tie if they differ by less than this share of the largest magnitude. The share is about 1,000
# times the rounding error of float32.
TIE = 1e-4
_EMBEDDING_SCALE = 0.1


class _StaysInFloat64(TorchDispatchMode):
    """Replace float32 by float64 in the arguments of every operator.

    Many models convert some intermediate results to float32. The float64 reference must not lose precision in this way.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return func(*args, **kwargs)


@contextlib.contextmanager
def float64_arithmetic() -> Iterator[None]:
    """Context manager in which models compute in float64, even where they ask for float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _StaysInFloat64():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class TinyModel:
    """A tiny model on the device under test, and a float64 copy on the CPU.

    Args:
        name: key of `ARCHITECTURES`.
        model, reference: the model in float32, and its float64 copy.
        inputs: inputs, including labels, on the CPU.
    """

    name: str
    model: Any
    reference: Any
    inputs: dict[str, Any]

    @classmethod
    def build(cls, name: str, device: torch.device, seed: int) -> "TinyModel":
        """Build a model from its configuration. The weights are scaled so that the outputs depend on all inputs."""
        import transformers

        architecture = ARCHITECTURES[name]
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(name, **copy.deepcopy(architecture.sizes))
        model = getattr(transformers, architecture.auto).from_config(config).float().eval()
        generator = torch.Generator().manual_seed(seed)
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    # Embeddings are small, so that the last token alone does not determine the next one.
                    scale = parameter[0].numel() ** -0.5 * (_EMBEDDING_SCALE if parameter in embeddings else 1.0)
                    parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
        reference = copy.deepcopy(model).double()
        # The grouped matrix product of mixture-of-experts layers has no float64 kernel.
        if hasattr(reference.config, "_experts_implementation"):
            reference.set_experts_implementation("eager")
        return cls(name, model.to(device), reference, architecture.inputs(generator))

    def on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs on the model's device."""
        device = next(self.model.parameters()).device
        return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()}

    def case(self, read: Callable[[Any], object], inputs: dict[str, Any]) -> Case:
        """Return a model call with parameters, buffers and inputs as arguments. `read` selects the compared tensors."""
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())

        def call(state: dict[str, Tensor], inputs: dict[str, Any]) -> object:
            wide = next(iter(state.values())).dtype == torch.float64
            with float64_arithmetic() if wide else contextlib.nullcontext():
                chosen = self.reference if wide else self.model
                return read(torch.func.functional_call(chosen, state, kwargs=inputs))

        return Case(call, (state, self.on_device(inputs)), {})


def check_derivatives(tiny: TinyModel, seed: int, probes: int) -> dict[str, float]:
    """Return the largest ratio of an error to its tolerance, for each pass.

    The key "forward" contains the ratio for the loss and the logits, the key "backward" the ratio for their gradients.
    """
    case = tiny.case(lambda outputs: (outputs.loss, logits_of(outputs)), tiny.inputs)
    return errors_over_tolerance(case, torch.float32, seed, probes)


def logits_of(outputs: Any) -> Tensor:
    """Return the logits of a model. For a model that compares texts with images, these are the similarities of all pairs."""
    return outputs.logits_per_image if hasattr(outputs, "logits_per_image") else outputs.logits


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss with respect to the parameters.

    Args:
        finite: number of parameter tensors whose gradient is finite.
        bad: names of the parameters whose gradient contains NaN or infinity.
        missing: for each parameter without a gradient, its name and the reason.
    """

    finite: int
    bad: list[str]
    missing: dict[str, str]


def check_gradients(tiny: TinyModel) -> Gradients:
    """Compute the gradients of the loss. Also find the parameters that get no gradient, and the reason for each."""
    called: set[nn.Module] = set()
    hooks = [module.register_forward_hook(lambda module, *_: called.add(module)) for module in tiny.model.modules()]
    tiny.model.zero_grad()
    tiny.model(**tiny.on_device(tiny.inputs)).loss.backward()
    for hook in hooks:
        hook.remove()
    owners = {
        f"{prefix}.{name}".strip("."): module for prefix, module in tiny.model.named_modules() for name in module._parameters
    }
    finite, bad, missing = 0, [], {}
    for name, parameter in tiny.model.named_parameters():
        if not parameter.requires_grad:
            missing[name] = "does not require a gradient"
        elif parameter.grad is None:
            missing[name] = "its module runs without it" if owners[name] in called else "its module is not called"
        elif parameter.grad.isfinite().all():
            finite += 1
        else:
            bad.append(name)
    tiny.model.zero_grad()
    return Gradients(finite, bad, missing)


@dataclass(frozen=True)
class Generated:
    """Greedy generation with a cache, compared with forward passes over the whole sequence without a cache.

    Args:
        tokens: number of generated tokens.
        wrong: number of tokens that differ from the most probable token of the plain forward pass, excluding ties.
        ties: number of positions at which the two largest logits are closer than `TIE`.
        need_context: number of tokens that the model would choose differently if it saw only the last token. If it is 0, the
            check cannot detect a broken cache.
        ratio: largest error of the generated logits against float64, divided by its tolerance.
    """

    tokens: int
    wrong: int
    ties: int
    need_context: int
    ratio: float


def check_generation(tiny: TinyModel, new_tokens: int, seed: int, probes: int) -> Generated:
    """Generate tokens with a cache, and compare tokens and logits with plain forward passes."""
    given = tiny.on_device({name: one for name, one in tiny.inputs.items() if name != "labels"})
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "use_cache": True}
    # No token ends the generation, so that all sequences have the same length.
    for name in ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(tiny.model.generation_config, name, None)
    with torch.no_grad():
        answer = tiny.model.generate(**given, **options, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    logits = torch.stack(answer.logits, 1).float()
    sequences, new_tokens = answer.sequences, logits.shape[1]
    start = sequences.shape[1] - new_tokens
    # A decoder continues its input. An encoder-decoder model reads its input once and generates another sequence.
    text = "decoder_input_ids" if tiny.model.config.is_encoder_decoder else "input_ids"

    def forward(begin: int, end: int) -> Tensor:
        with torch.no_grad():
            return tiny.model(**given | {text: sequences[:, begin:end]}, use_cache=False).logits[:, -1].float()

    wrong = ties = need_context = 0
    for end in range(start, sequences.shape[1]):
        plain, chosen = forward(0, end), sequences[:, end]
        top = plain.topk(2).values
        tie = top[:, 0] - top[:, 1] < TIE * plain.abs().amax(1)
        ties += int(tie.sum())
        wrong += int(((plain.argmax(1) != chosen) & ~tie).sum())
        need_context += int((forward(end - 1, end).argmax(1) != chosen).sum())

    def generated(*_) -> Derivatives:
        return [logits], [], []

    inputs = given | {text: sequences[:, :-1], "use_cache": False}
    case = tiny.case(lambda outputs: outputs.logits[:, start - 1 :], inputs)
    with torch.no_grad():
        ratio = errors_over_tolerance(case, torch.float32, seed, probes, generated)["forward"]
    return Generated(chosen.numel() * new_tokens, wrong, ties, need_context, ratio)
