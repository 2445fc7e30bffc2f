"""Self-marking exercises for the chapter on kernels. Each of the first three starts from a kernel with a classic mistake."""

import math
from collections.abc import Callable

import pandas as pd
import torch
from torch import Tensor

from hyperion.chapter.exercises import Question, explains_errors
from hyperion.errors import HyperionError
from hyperion.kernels.operations import attention_reference

SCORES_GIB = Question(16 * 16384**2 * 2 / 2**30, "heads times positions squared times the bytes of a number, divided by 2^30")

_LEFT_OVER = 777.0  # value of the memory outside the matrices


@explains_errors
def judge_softmax(my_softmax: Callable[[Tensor], Tensor]) -> pd.DataFrame:
    """Test a softmax over the rows of a float32 matrix.

    Returns:
        A table with one line for each kind of input: the largest error, and whether it is small enough.

    Args:
        my_softmax: function that takes a matrix and returns the softmax of each of its rows.
    """
    torch.manual_seed(0)
    small = torch.randn(3, 50)
    masked = small.clone()
    masked[:, 40:] = -math.inf
    inputs = {
        "small numbers": small,
        "numbers around 1000": small + 1000,
        "numbers around -1000": small - 1000,
        "one number far above the others": torch.where(torch.arange(50) == 7, 300.0, small),
        "masked numbers, minus infinity": masked,
        "rows of different size": small + torch.tensor([[0.0], [1000.0], [-1000.0]]),
    }
    lines = []
    for name, x in inputs.items():
        error = (my_softmax(x.clone()).double() - torch.softmax(x.double(), 1)).abs().max().item()
        lines.append({"input": name, "largest error": error, "right": error < 1e-6})
    return pd.DataFrame(lines)


class ToyPointer:
    """Pointer to a matrix in a larger memory, as a kernel receives it: elements are addressed by their offset from the first one.

    Args:
        matrix: the matrix, stored in row-major order.

    Attributes:
        read_outside: True if elements around the matrix were read. On a GPU, such a read may be illegal.
    """

    def __init__(self, matrix: Tensor):
        self._shape, size = matrix.shape, matrix.numel()
        self._memory = torch.full((3 * size + 64,), _LEFT_OVER, dtype=torch.float64)
        self._first, self._size = size, size
        self._memory[size : 2 * size] = matrix.double().flatten()
        self.read_outside = False

    def load(self, offsets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the values at these offsets. Where the mask is False, nothing is read, and the result is 0."""
        offsets, inside = self._places(offsets, mask)
        outside = (offsets < self._first) | (offsets >= self._first + self._size)
        self.read_outside |= bool((inside & outside).any())
        return torch.where(inside, self._memory[torch.where(inside, offsets, 0)], 0.0)

    def store(self, offsets: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
        """Write values to these offsets. Where the mask is False, nothing is written."""
        offsets, inside = self._places(offsets, mask)
        self._memory[offsets[inside]] = values.double().expand(offsets.shape)[inside]

    @property
    def matrix(self) -> Tensor:
        """The current content of the matrix."""
        return self._memory[self._first : self._first + self._size].view(self._shape)

    @property
    def intact_outside(self) -> bool:
        """True if the memory around the matrix is unchanged."""
        around = torch.cat([self._memory[: self._first], self._memory[self._first + self._size :]])
        return bool((around == _LEFT_OVER).all())

    def _places(self, offsets: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        offsets = offsets + self._first
        inside = torch.ones_like(offsets, dtype=torch.bool) if mask is None else mask.expand(offsets.shape)
        wrong = inside & ((offsets < 0) | (offsets >= len(self._memory)))
        if wrong.any():
            raise HyperionError(
                f"illegal memory access at offset {int(offsets[wrong][0]) - self._first} of a matrix of {self._size} elements",
                where="ToyPointer",
                next_step="mask the offsets outside of the matrix",
            )
        return offsets, inside


Block = Callable[[ToyPointer, ToyPointer, ToyPointer, int, int, int, int, int, int], None]


@explains_errors
def judge_product(my_block: Block) -> pd.DataFrame:
    """Test a kernel that computes one block of a matrix product C = A·B, for shapes that are not multiples of the block size.

    Args:
        my_block: function of (a, b, c, m, n, k, row, column, size). The first three are ToyPointers to A[m, k], B[k, n] and
            C[m, n]. The function writes the block of C that starts at `row` and `column`, with at most `size` rows and columns.

    Returns:
        A table with one line for each shape: whether C is correct, the memory around C unchanged and none around A and B read,
        and what was observed.
    """
    torch.manual_seed(0)
    size, lines = 8, []
    for m, n, k in ((16, 16, 5), (13, 16, 5), (16, 11, 5), (3, 2, 9)):
        exact_a, exact_b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
        a, b, c = ToyPointer(exact_a), ToyPointer(exact_b), ToyPointer(torch.full((m, n), math.nan))
        try:
            for row in range(0, m, size):
                for column in range(0, n, size):
                    my_block(a, b, c, m, n, k, row, column, size)
            equal = bool(torch.allclose(c.matrix, exact_a @ exact_b, atol=1e-12))
            seen = f"product {'right' if equal else 'wrong'}, memory around C {'intact' if c.intact_outside else 'overwritten'}"
            seen += ", read outside of A or B" if a.read_outside or b.read_outside else ""
        except HyperionError as error:
            equal, seen = False, error.what
        right = equal and c.intact_outside and not a.read_outside and not b.read_outside
        lines.append({"shape": f"{m} x {n} x {k}, blocks of {size}", "right": right, "seen": seen})
    return pd.DataFrame(lines)


@explains_errors
def judge_mask(my_visible: Callable[[Tensor, Tensor], Tensor]) -> pd.DataFrame:
    """Test the mask of causal attention.

    Args:
        my_visible: function of (query, key), two tensors of positions that broadcast against each other. It returns True where
            the query may attend to the key.

    Returns:
        A table with one line for each property: whether it holds, and what was observed.
    """
    torch.manual_seed(0)
    T, D = 24, 16
    q, k, v = (torch.randn(1, 1, T, D, dtype=torch.float64) for _ in range(3))
    position = torch.arange(T)
    hidden = ~my_visible(position[:, None], position[None, :])

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(D)).masked_fill(hidden, -math.inf).softmax(-1) @ v

    output = attend(k, v)
    error = (output - attention_reference(q, k, v)).abs().max().item()
    later_k, later_v = k.clone(), v.clone()
    later_k[..., T // 2 :, :], later_v[..., T // 2 :, :] = 5.0, 5.0
    change = (attend(later_k, later_v) - output)[..., : T // 2, :].abs().max().item()
    itself = not bool(hidden.diagonal().any())
    return pd.DataFrame(
        [
            {"property": "no number is NaN", "right": not bool(output.isnan().any()), "seen": f"{int(output.isnan().sum())} NaN"},
            {"property": "equal to float64", "right": error < 1e-12, "seen": f"largest error {error:.2g}"},
            {"property": "later tokens change nothing", "right": change == 0, "seen": f"largest change {change:.2g}"},
            {"property": "a token sees itself", "right": itself, "seen": "yes" if itself else "no"},
        ]
    )
