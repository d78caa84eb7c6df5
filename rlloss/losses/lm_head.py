"""A head that runs the loss inside its module, where a sharding wrapper has gathered the weight."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class LMHead(nn.Linear):
    """`nn.Linear` from hidden states to logits, or to the loss of a context.

    FSDP2 gathers the weight around `forward` of a module, so a loss that reads the weight must run in there. In chunk
    mode all of its gradients exist after forward, and the weight need not be gathered a second time:

        fully_shard(model.lm_head)
        model.lm_head.set_unshard_in_backward(False)    # chunk mode only
        output = model.lm_head(hidden_states, loss_ctx)

    Leave `output_dtype` of the mixed-precision policy at None: it would round the loss. A head whose weight is tied to
    the embeddings is no unit of its own: shard it with the module that holds both.

    Args:
        in_features: Hidden size H.
        out_features: Vocabulary V; with a `vocab_mesh` the words of this rank (V where the weight becomes a `DTensor`).
        bias: Whether there is one.
        device: Of the weight.
        dtype: Of the weight.
        vocab_mesh: Mesh of the ranks that the vocabulary is cut over, or None; see `BaseLossContext.forward`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        vocab_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.vocab_mesh = vocab_mesh

    def forward(self, hidden: Tensor, loss_ctx: Any = None, **arguments: Any) -> Any:  # type: ignore[override]
        """Returns logits `[..., V]`, or with a context what its `forward` returns.

        Args:
            hidden: `[B, T, H]`.
            loss_ctx: A calibrated context, or None.
            **arguments: More arguments of the context's `forward`, such as a value head.
        """
        if loss_ctx is None:
            return super().forward(hidden)
        if self.vocab_mesh is not None:
            arguments["vocab_mesh"] = self.vocab_mesh
        return loss_ctx.forward(hidden, self.weight, self.bias, **arguments)
