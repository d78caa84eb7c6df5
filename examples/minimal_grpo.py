"""One optimiser step of GRPO in a loop of your own: a tiny model, two micro-batches, exact token weights."""

import torch
from torch import nn

from rlloss import GRPOLossConfig, GRPOLossContext, LogProbConfig, metrics

torch.manual_seed(0)
vocabulary, width = 100, 32
backbone = nn.Sequential(nn.Embedding(vocabulary, width), nn.Linear(width, width), nn.Tanh())
head = nn.Linear(width, vocabulary, bias=False)
optimizer = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-2)

# Two micro-batches of two responses each: prompt tokens are ignored, the label of a token is the next token.
micro_batches = []
for _ in range(2):
    input_ids = torch.randint(0, vocabulary, (2, 12))
    labels = input_ids.roll(-1, dims=1)
    labels[:, :4] = labels[:, -1] = -100
    micro_batches.append({"input_ids": input_ids, "shifted_labels": labels, "advantages": torch.tensor([1.0, -1.0])})

# Log-probs of the policy before the step, by the same head.
log_prob_cfg = LogProbConfig(mode="chunk")
with torch.no_grad():
    for batch in micro_batches:
        batch["old_logprobs"] = log_prob_cfg.build(batch).forward(backbone(batch["input_ids"]), head.weight).loss

loss_cfg = GRPOLossConfig(policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28}, mode="chunk")
for epoch in range(3):
    contexts = GRPOLossContext.build_batches([loss_cfg.build(batch) for batch in micro_batches])
    extras = []
    for context, batch in zip(contexts, micro_batches, strict=True):
        loss, (_, extra) = context.forward(backbone(batch["input_ids"]), head.weight)
        loss.backward()  # nothing to divide: the losses of the micro-batches add up to the loss of the step
        extras.append(extra)
    optimizer.step()
    optimizer.zero_grad()
    step = metrics.reduce(metrics.merge(extras))
    print(
        f"epoch {epoch}: loss {step['loss']:+.4f}, ratio {step['ratio_mean']:.4f}, clipped {step['clip_frac_high']:.2f}"
    )
