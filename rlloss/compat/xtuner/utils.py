"""XTuner's helpers: sequence-parallel splits, and losses on logits in chunks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlloss.distributed import all_gather, rank
from rlloss.heads.per_chunk import LogitsLoss, evaluate_per_chunk


def sp_split(tensor: Tensor, sp_mesh: DeviceMesh, split_dim: int, padding_value: Any) -> Tensor:
    """Returns this rank's part of a tensor that is padded to a multiple of the mesh and cut along a dimension."""
    ranks = sp_mesh.size()
    if ranks == 1:
        return tensor
    padding = list(tensor.shape)
    padding[split_dim] = -tensor.shape[split_dim] % ranks
    padded = torch.cat([tensor, tensor.new_full(padding, padding_value)], dim=split_dim)
    return padded.chunk(ranks, dim=split_dim)[rank(sp_mesh.get_group())]


def sp_gather(tensor: Tensor, sp_mesh: DeviceMesh, dim: int) -> Tensor:
    """Joins the parts of all ranks of a mesh along a dimension, without a graph; all parts have one shape."""
    if sp_mesh.size() == 1:
        return tensor
    return all_gather(tensor.transpose(0, dim), sp_mesh.get_group()).transpose(0, dim)


class ChunkLoss:
    """A loss on logits, chunk by chunk along T, with XTuner's call. A bias of the head is allowed."""

    @staticmethod
    def apply(
        hidden_states: Tensor,
        head_weight: Tensor,
        head_bias: Tensor | None,
        loss_forward: LogitsLoss,
        loss_kwargs_chunks: Sequence[Any],
        chunk_size: int,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Sums a loss over chunks; the graph of one chunk lives at a time.

        Args:
            hidden_states: `[B, T, H]`.
            head_weight: `[V, H]`.
            head_bias: `[V]` or None.
            loss_forward: `(hidden_states, head_weight, head_bias, loss_kwargs) -> (loss, (logits, extra))`.
            loss_kwargs_chunks: The kwargs of each chunk, `loss_kwargs.chunk(chunk_size)`.
            chunk_size: Tokens of a chunk.

        Returns:
            The summed loss, and `extra`, its tensors stacked over chunks.
        """
        tensors = (hidden_states, head_weight, head_bias)
        return evaluate_per_chunk(loss_forward, tensors, loss_kwargs_chunks, chunk_size)
