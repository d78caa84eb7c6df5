"""The same loss in three modes: equal numbers, and what each of them holds in memory at its peak."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlloss import GRPOLossConfig, GRPOLossContext


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


torch.manual_seed(0)
tokens, width, vocabulary = 2560, 16, 5000
hidden, weight = torch.randn(1, tokens, width), torch.randn(vocabulary, width) / 4
labels = torch.randint(0, vocabulary, (1, tokens)).masked_fill(torch.rand(1, tokens) < 0.1, -100)
batch = {"shifted_labels": labels, "advantages": torch.randn(1, tokens), "old_logprobs": torch.full((1, tokens), -8.5)}

for mode in ("eager", "chunk", "liger"):
    context = GRPOLossConfig(mode=mode, chunk_size=256).build(batch)
    GRPOLossContext.build_batches([context])
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with LargestTensor() as watcher:
        loss = context.forward(h, w).loss
        loss.backward()
    share = watcher.elements / (tokens * vocabulary)
    print(
        f"{mode:<6} loss {loss.item():+.6f}  |dW| {w.grad.norm().item():.6f}  "
        f"largest tensor {share:.2f} of the whole logits"
    )
