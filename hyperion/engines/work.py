"""The work that each framework must perform: one initial state, one token file, and optimizer steps on its rows."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hyperion.errors import HyperionError
from hyperion.measure.steps.step_parts import WARM_UP_STEPS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = ("fp32", "bf16")
TOKENS, WEIGHTS, CONFIG = "tokens.npy", "model.safetensors", "config.json"


@dataclass(frozen=True)
class Work:
    """The training work of a run.

    A row has `sequence_length + 1` tokens. The inputs are all but the last token, and the targets are all but the first.

    Step i (counted from 0) uses rows i·B to (i+1)·B - 1 of the token file, where B is `batch_size`. Of R data-parallel ranks,
    rank r uses the r-th of R equal, contiguous parts of these rows. The optimizer is AdamW, with decoupled weight decay on
    tensors of two or more dimensions and none on vectors. The learning rate is constant. The loss of a step is the mean over all
    its tokens. Gradients are clipped so that the L2 norm of the whole batch's gradient is at most `clip_norm`.

    Args:
        folder: folder with the initial state in Hugging Face format (config.json, model.safetensors) and tokens.npy.
        steps: number of optimizer steps.
        batch_size: number of rows in a step, summed over all ranks and micro-batches.
        sequence_length: number of scored tokens in a row.
        dtype: number format of matrix products, "fp32" or "bf16". The optimizer updates float32 weights in both cases.
        learning_rate, betas, eps, weight_decay: options of AdamW.
        clip_norm: largest allowed gradient norm.
        micro_batches: number of parts into which each rank divides its rows of a step.
        timed: if True, gradient norms at the optimizer are read only in the first half of the steps, because reading them takes
            time, and the final state is not written, because that takes longer than the steps of a large model.
        traced: number of steps that are traced after the other ones; see `all_steps`. It needs `timed`, because a final state
            would be that after the traced steps.
        fused: whether AdamW updates all parameters in one fused kernel. Otherwise it uses torch's `foreach` implementation.
    """

    folder: str
    steps: int
    batch_size: int
    sequence_length: int
    dtype: str = "fp32"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    micro_batches: int = 1
    timed: bool = False
    traced: int = 0
    fused: bool = False

    def __post_init__(self):
        if self.traced and not self.timed:
            raise HyperionError(
                f"{self.traced} steps are traced after a run that is not timed, so the final state would be that of other steps",
                where="Work",
                next_step="set timed to True, or traced to 0",
            )
        if self.dtype not in DTYPES:
            raise HyperionError(
                f"the number format of the work is {self.dtype!r}",
                where="Work",
                next_step=f"choose {' or '.join(DTYPES)}; adapters would train in float32 with any other name",
            )

    @classmethod
    def of(cls, values: dict) -> "Work":
        """Return the work from a dict that `as_dict` returned and that may have been stored as JSON."""
        return cls(**{**values, "betas": tuple(values["betas"])})

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-serializable dict."""
        return {**asdict(self), "betas": list(self.betas)}

    @property
    def step_tokens(self) -> int:
        """Number of scored tokens in a step, summed over all ranks."""
        return self.batch_size * self.sequence_length

    @property
    def all_steps(self) -> int:
        """Number of steps that an adapter performs: `steps`, and then the traced steps with those that start the tracer.

        Only the first `steps` steps are part of the record and of its times. The others repeat the rows from the first step.
        """
        return self.steps + (WARM_UP_STEPS + self.traced if self.traced else 0)

    def tokens(self) -> np.ndarray:
        """Return the memory-mapped token file, int64 of shape [rows, sequence_length + 1]; see `stored_tokens`."""
        return stored_tokens(Path(self.folder))

    def row_numbers(self, step: int, rank: int = 0, ranks: int = 1) -> list[range]:
        """Return the row numbers of each micro-batch of a rank in a step (counted from 0)."""
        each = self.batch_size // (ranks * self.micro_batches)
        first = step % self.steps * self.batch_size + rank * each * self.micro_batches
        return [range(first + part * each, first + (part + 1) * each) for part in range(self.micro_batches)]

    def micro_batch_list(self, step: int, rank: int = 0, ranks: int = 1, device: str = "cpu") -> list[Tensor]:
        """Return the micro-batches of a rank in a step, each int64 of shape [b, sequence_length + 1]."""
        stored = self.tokens()
        parts = self.row_numbers(step, rank, ranks)
        return [torch.from_numpy(np.array(stored[part.start : part.stop])).to(device) for part in parts]

    def whole_batch(self, step: int, rank: int = 0, ranks: int = 1, device: str = "cpu") -> Tensor:
        """Return all rows of a rank in a step, int64 of shape [B / ranks, sequence_length + 1]."""
        return torch.cat(self.micro_batch_list(step, rank, ranks, device))

    def require_divisible(self, ranks: int) -> None:
        """Raise a HyperionError if the rows of a step cannot be divided equally, or if the token file has the wrong shape."""
        if self.batch_size % (ranks * self.micro_batches):
            raise HyperionError(
                f"a batch of {self.batch_size} rows cannot be divided into {ranks} ranks x {self.micro_batches} micro-batches",
                where="Work",
                next_step="choose a multiple of their product as batch_size",
            )
        shape, wanted = self.tokens().shape, self.steps * self.batch_size
        if shape[0] < wanted or shape[1] != self.sequence_length + 1:
            raise HyperionError(
                f"tokens.npy has the shape {list(shape)}, but {wanted} rows of {self.sequence_length + 1} tokens are needed",
                where=Path(self.folder) / TOKENS,
                next_step="write the token file again for this work",
            )

    def load_model(self, device: str = "cpu") -> "PreTrainedModel":
        """Return transformers' model with the initial state, such as a Llama, in float32 and in training mode."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, local_files_only=True)
        return model.to(device).train()

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return json.loads((Path(self.folder) / CONFIG).read_text("utf-8"))

    def parameter_groups(self, model: nn.Module) -> list[dict]:
        """Return two parameter groups for AdamW: matrices with weight decay, vectors without."""
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ]

    def adamw(self, model: nn.Module, **how: Any) -> torch.optim.AdamW:
        """Return torch's AdamW for this work.

        Args:
            model: model whose parameters are updated.
            how: further arguments of AdamW. They override `fused`.
        """
        options = {"fused": self.fused, "foreach": not self.fused, **how}
        groups = self.parameter_groups(model)
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps, **options)


def stored_tokens(folder: Path) -> np.ndarray:
    """Return the memory-mapped token file of a folder.

    Raises:
        HyperionError: the file is missing, or is not an array of integers with rows of at least two tokens.
    """
    file, next_step = folder / TOKENS, "write the folder with hyperion.engines.work.write_work_folder"
    try:
        found = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise HyperionError(f"the token file cannot be read: {error}", where=file, next_step=next_step) from error
    if found.ndim != 2 or found.shape[1] < 2 or not np.issubdtype(found.dtype, np.integer):
        what = f"the token file has the shape {list(found.shape)} and the dtype {found.dtype}, not rows of integers"
        raise HyperionError(what, where=file, next_step=next_step)
    return found


def write_work_folder(folder: Path, model: "PreTrainedModel", tokens: np.ndarray) -> None:
    """Write the initial state and the token file of a `Work` to its folder.

    Args:
        folder: an existing folder.
        model: the initial state, a model of transformers in float32, such as a Llama.
        tokens: int64 of shape [rows, sequence_length + 1]. Rows must differ in their first `sequence_length` tokens, because the
            observer identifies a row by them.
    """
    starts = np.ascontiguousarray(tokens[:, :-1])
    if len(np.unique(starts, axis=0)) != len(starts):
        raise HyperionError(
            "two rows of tokens are equal, so the order in which a framework reads them cannot be observed",
            where=folder / TOKENS,
            next_step="choose longer rows, or other tokens",
        )
    model.save_pretrained(folder)
    np.save(folder / TOKENS, tokens.astype(np.int64), allow_pickle=False)


def distinct_rows(stream: np.ndarray, count: int, length: int) -> np.ndarray:
    """Return int64 rows of shape [count, length + 1] whose first `length` tokens differ from each other.

    The rows are consecutive in the stream. A row that repeats an earlier one is left out.
    """
    whole = len(stream) // (length + 1)
    rows = np.asarray(stream[: whole * (length + 1)]).reshape(whole, length + 1)[: 2 * count].astype(np.int64)
    _, first = np.unique(rows[:, :length], axis=0, return_index=True)
    chosen = rows[np.sort(first)][:count]
    if len(chosen) < count:
        raise HyperionError(
            f"the text has only {len(chosen)} different rows of {length + 1} tokens, but {count} are needed",
            where="tokens of the training split",
            next_step="choose fewer steps, a smaller batch or shorter rows",
        )
    return chosen
