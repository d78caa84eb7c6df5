"""Sequence parallelism: which part of its rows a rank keeps of a batch."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.errors import BatchError
from rlloss.layout import Shard
from rlloss.losses.batch import packed_mapping
from rlloss.losses.kwargs import BaseLossKwargs, PerToken

K = TypeVar("K", bound=BaseLossKwargs)


def shard_of(data: Mapping[str, Any], sp_mesh: DeviceMesh | None) -> Shard | None:
    """Returns which part of a batch's rows this rank keeps; None where the mesh has one rank, or there is none.

    Raises:
        BatchError: The mesh has more than one dimension.
    """
    if sp_mesh is None or sp_mesh.size() == 1:
        return None
    if sp_mesh.ndim != 1:
        raise BatchError(
            f"sp_mesh has the dimensions {sp_mesh.mesh_dim_names or sp_mesh.ndim}, expected the sequence-parallel one "
            f"alone, such as mesh['sp']."
        )
    labels = packed_mapping(data).get("shifted_labels")
    length = int(labels.shape[-1]) if isinstance(labels, Tensor) and labels.ndim else 0
    return Shard(sp_mesh.get_group(), sp_mesh.get_local_rank(), sp_mesh.size(), length)


def split_over_ranks(kwargs: K, ignore_idx: int) -> K:
    """Returns a copy with this rank's part of the per-token tensors that have the length of whole rows.

    Args:
        kwargs: Kwargs with a shard, whose per-token tensors are whole, or this rank's part already.
        ignore_idx: Label of the padding.
    """
    shard = kwargs.shard
    changed: dict[str, Tensor] = {}
    if shard is None:
        return kwargs
    for name, value in kwargs.tensors().items():
        role = kwargs.role(name)
        if kwargs.is_per_token(name) and value.shape[1] == shard.length:
            pad = role.pad if isinstance(role, PerToken) else 0.0
            changed[name] = shard.split(value, ignore_idx if name == "shifted_labels" else pad)
    return kwargs.with_tensors(changed)
