"""Check the data of several ranks: each rank trains on its own part of each batch, and all ranks evaluate the same batches.

Wrong data would not fail, but give a wrong result: a run on n copies of a batch, or an evaluation of a part of the split. Ranks
with loaders of different lengths would wait for each other until a timeout. All ranks must call these functions.
"""

import hashlib
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hyperion.checkpoints import gathered, rank_and_size
from hyperion.errors import HyperionError


def require_equal_lengths(what: str, loader: Any, where: str) -> None:
    """Raise a HyperionError on all ranks if the ranks' loaders have different numbers of batches.

    Args:
        what: name of the loader, for the error message.
        loader: loader of this rank. If its length is not known, it is not compared.
        where: the part of the run, for the error message.
    """
    # A DataLoader of an IterableDataset has a method __len__ that raises TypeError, which length_hint ignores.
    lengths = {rank: length for rank, length in enumerate(gathered(operator.length_hint(loader, -1))) if length >= 0}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{length} on rank {rank}" for rank, length in lengths.items())
        raise HyperionError(
            f"{what} has different numbers of batches: {each}",
            where=where,
            next_step="give all ranks the same number of batches, for example by dropping the last rows: "
            "rows[: len(rows) // size * size]",
        )


def require_own_parts(batch: Any, where: str) -> None:
    """Raise a HyperionError on all ranks if two ranks got the same batch, so that they would compute the same gradient."""
    if rank_and_size()[1] == 1:
        return
    first_with: dict[bytes, int] = {}
    for rank, fingerprint in enumerate(gathered(_fingerprint(batch))):
        if fingerprint is not None and (other := first_with.setdefault(fingerprint, rank)) != rank:
            raise HyperionError(
                f"ranks {other} and {rank} got the same batch, but each rank must train on its own part of each batch",
                where=where,
                next_step="split the data in the loader, for example rows[rank::size] with the rank and the size of "
                "hyperion.processes.world(), or torch.utils.data.DistributedSampler",
            )


def require_same_batch(batch: Any, where: str) -> None:
    """Raise a HyperionError on all ranks if the ranks got different batches."""
    if rank_and_size()[1] == 1:
        return
    fingerprints = gathered(_fingerprint(batch))
    different = next((rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]), None)
    if different is not None:
        raise HyperionError(
            f"ranks 0 and {different} got different batches, but every rank must iterate over the whole held-out split",
            where=where,
            next_step="make the loader of the held-out split the same on all ranks; the ranks share its batches themselves",
        )


def _fingerprint(batch: Any) -> bytes | None:
    """Return a hash of all tensors of a batch, or None if it has none."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest() if tensors else None
