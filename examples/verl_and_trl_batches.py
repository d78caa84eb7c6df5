"""One PPO batch, seen once as verl's workers see it and once as TRL's old trainer sees it: the same gradients.

verl holds jagged sequences `prompt | response` without padding, and response tensors beside them; its losses take what
the engine computed for every token. TRL pads `query | response` on the right and shifts everything by one token. Both
end in the same contexts, so the gradients of backbone, head and value head are equal.

    python examples/verl_and_trl_batches.py
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rlloss import ActorCriticLossConfig, ActorCriticLossContext
from rlloss.compat import verl

VOCABULARY, WIDTH, CLIP, CLIP_VALUE, VF_COEF = 11, 8, 0.2, 0.2, 0.1
PROMPTS = [[1, 2, 3], [4, 5], [6, 1, 2, 3]]
RESPONSES = [[5, 6, 1, 7], [3, 9], [8, 8, 2]]
TOOL_MASK = [[1, 1, 0, 1], [1, 1], [1, 1, 1]]  # 0: text of a tool, which the policy did not write


class Model(nn.Module):
    """A causal backbone (the mean over the prefix) with a head and a value head, float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
        self.value = nn.Linear(WIDTH, 1, dtype=torch.float64)

    def hidden(self, ids: Tensor) -> Tensor:
        counts = torch.arange(1, ids.shape[-1] + 1, dtype=torch.float64)[:, None]
        return torch.tanh(self.embedding(ids).cumsum(-2) / counts + self.embedding(ids))

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]


def jagged(rows: list[Tensor]) -> Tensor:
    """A nested tensor of rows of unequal length."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def rollout() -> dict[str, list[Tensor]]:
    """What a rollout left: one tensor for each response and name."""
    generator = torch.Generator().manual_seed(1)

    def normal(name: str, shift: float) -> list[Tensor]:
        return [torch.randn(len(r), generator=generator, dtype=torch.float64) * 0.3 + shift for r in RESPONSES]

    return {name: normal(name, shift) for name, shift in (("old", -2.4), ("A", 0.2), ("V", 0.0), ("R", 0.5))}


def as_verl(model: Model, given: dict[str, list[Tensor]]) -> Tensor:
    """Jagged data, a dict or a TensorDict; the engine has log-probs and values of every token of every sequence."""
    log_probs, values = [], []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        ids = torch.tensor(prompt + response)
        hidden = model.hidden(ids)
        following = ids.roll(-1)  # the last entry is about no token of this sequence, and is never used
        log_probs.append(model.head(hidden).log_softmax(-1).gather(-1, following[:, None]).squeeze(-1))
        values.append(model.value(hidden).squeeze(-1))
    mask = jagged([torch.tensor(row) for row in TOOL_MASK])
    data = {
        "prompts": jagged([torch.tensor(p) for p in PROMPTS]),
        "responses": jagged([torch.tensor(r) for r in RESPONSES]),
        "response_mask": mask,
        "old_log_probs": jagged(given["old"]),
        "advantages": jagged(given["A"]),
        "values": jagged(given["V"]),
        "returns": jagged(given["R"]),
    }
    counts = {"dp_size": 1, "batch_num_tokens": int(mask.values().sum()), "global_batch_size": len(RESPONSES)}
    data = as_tensordict(data, counts)
    actor = SimpleNamespace(clip_ratio=CLIP, clip_ratio_c=1e9, loss_agg_mode="token-mean")
    critic = SimpleNamespace(cliprange_value=CLIP_VALUE, loss_agg_mode="token-mean")
    policy_loss, metrics = verl.ppo_loss(actor, {"log_probs": jagged(log_probs)}, data)
    value_loss, more = verl.value_loss(critic, {"values": jagged(values)}, data)
    for name, metric in (metrics | more).items():
        print(f"  {name:<24}{metric.aggregate() if isinstance(metric, verl.Metric) else metric:.4f}")
    return policy_loss + VF_COEF * value_loss


def as_tensordict(tensors: dict[str, Tensor], counts: dict[str, int]) -> Any:
    """A TensorDict, where that package is installed; a plain dict does as well."""
    try:
        from tensordict import TensorDict
    except ImportError:
        return {**tensors, **counts}
    data = TensorDict(tensors, batch_size=[len(RESPONSES)])
    for name, value in counts.items():
        data.set_non_tensor(name, value)
    return data


def as_trl(model: Model, given: dict[str, list[Tensor]]) -> Tensor:
    """Right-padded rows `query | response`; entry t of everything is about token t + 1."""
    width = max(len(p) + len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True))
    ids = torch.zeros(len(PROMPTS), width, dtype=torch.int64)
    labels = torch.full((len(PROMPTS), width - 1), -100)
    batch = {name: torch.zeros(len(PROMPTS), width - 1, dtype=torch.float64) for name in given}
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        start, end = len(prompt) - 1, len(prompt) - 1 + len(response)
        labels[row, start:end] = torch.tensor(response).masked_fill(torch.tensor(TOOL_MASK[row]) == 0, -100)
        for name, values in given.items():
            batch[name][row, start:end] = values[row]
    config = ActorCriticLossConfig(
        policy_loss_cfg={"cliprange_low": CLIP, "cliprange_high": CLIP},
        cliprange_value=CLIP_VALUE,
        vf_coef=VF_COEF,
        mode="chunk",
    )
    names = {"old_logprobs": "old", "advantages": "A", "values": "V", "returns": "R"}
    context = config.build({"shifted_labels": labels, **{ours: batch[name] for ours, name in names.items()}})
    (context,) = ActorCriticLossContext.build_batches([context])
    hidden = model.hidden(ids)[:, :-1]
    loss, (_, extra) = context.forward(
        hidden, model.head.weight, value_weight=model.value.weight, value_bias=model.value.bias
    )
    for name in ("policy_loss", "value_loss", "clip_frac_low", "clip_frac_high", "explained_variance"):
        print(f"  {name:<24}{float(extra[name]):.4f}")
    return loss


def main() -> None:
    """Prints both losses and the largest difference of a gradient."""
    given = rollout()
    found = []
    for name, view in (("verl, jagged", as_verl), ("TRL, padded", as_trl)):
        print(f"{name}:")
        model = Model()
        loss = view(model, given)
        loss.backward()
        found.append((loss.item(), model.gradients()))
        print(f"  loss                    {loss.item():.6f}")
    gap = max(float((a - b).abs().max()) for a, b in zip(found[0][1], found[1][1], strict=True))
    print(f"largest difference of a gradient: {gap:.1e}")
    assert abs(found[0][0] - found[1][0]) < 1e-12
    assert gap < 1e-12


if __name__ == "__main__":
    main()
