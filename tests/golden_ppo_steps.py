"""TRL's whole `PPOTrainer.step`: weights, texts and scores in; statistics and final weights out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from golden_cases import Case, assert_close, family, tensor
from golden_ppo import TOLERANCE, check, check_numbers, trl_advantages
from rlloss import ActorCriticLossConfig, ActorCriticLossContext, LogProbConfig
from rlloss.functional.controllers import AdaptiveKLController, FixedKLController
from rlloss.functional.moments import RunningMoments, clip_scores
from rlloss.functional.ppo_rewards import compute_rewards
from rlloss.training.ppo_stats import rollout_statistics, update_statistics

IGNORED = -100

# Flattened over minibatches with what other code leaves at masked positions.
NOT_COMPARED = ("ppo/policy/advantages", "ppo/policy/ratio", "ppo/learning_rate")


class TinyModel(nn.Module):
    """The recorded model: a mean over the prefix, one mixing layer, a head and a value head; float64."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.names = list(weights)
        self.weights = nn.ParameterList([nn.Parameter(tensor(weights[name])) for name in self.names])

    def weight(self, name: str) -> Tensor:
        return self.weights[self.names.index(name)]

    def hidden(self, ids: Tensor, attention: Tensor) -> Tensor:
        h = self.weight("emb.weight")[ids] * attention[..., None]
        c = h.cumsum(1) / attention.cumsum(1)[..., None].clamp(min=1)
        return torch.tanh((c + h) @ self.weight("mix.weight").T + self.weight("mix.bias"))


class Step:
    """One recorded trainer: its model, controller, moments, and the rows `query | response` padded on the right."""

    def __init__(self, case: Case) -> None:
        self.params, self.inputs = case.data["params"], case.data["inputs"]
        self.model, self.reference = TinyModel(self.inputs["init_weights"]), TinyModel(self.inputs["ref_weights"])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.params["lr"])
        p = self.params
        self.controller: Any = FixedKLController(p["init_kl_coef"])
        if p["adap_kl_ctrl"]:
            self.controller = AdaptiveKLController(p["init_kl_coef"], p["target"], p["horizon"])
        self.moments = RunningMoments()
        self.permutations = iter(self.inputs["permutations"])
        rows = [q + r for q, r in zip(self.inputs["queries"], self.inputs["responses"], strict=True)]
        width = max(map(len, rows))
        self.ids = torch.tensor([row + [p["pad_token"]] * (width - len(row)) for row in rows])
        self.attention = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        self.mask = torch.zeros(len(rows), width - 1)
        masks = self.inputs["response_masks"] or [[1] * len(r) for r in self.inputs["responses"]]
        for i, query in enumerate(self.inputs["queries"]):
            start = len(query) - 1
            self.mask[i, start : start + len(masks[i])] = torch.tensor(masks[i], dtype=torch.float32)
        clip = {"cliprange_low": p["cliprange"], "cliprange_high": p["cliprange"]}
        self.config = ActorCriticLossConfig(
            policy_loss_cfg=clip, vf_coef=p["vf_coef"], cliprange_value=p["cliprange_value"], entropy_metric=True
        )

    def states(self, model: TinyModel, rows: Tensor) -> Tensor:
        return model.hidden(self.ids[rows], self.attention[rows])[:, :-1]

    def log_probs(self, model: TinyModel) -> Tensor:
        """Of every token that is there, rounded to float32 as TRL keeps them."""
        labels = torch.where(self.attention[:, 1:] != 0, self.ids[:, 1:], IGNORED)
        context = LogProbConfig().build({"shifted_labels": labels})
        with torch.no_grad():
            return context.forward(self.states(model, torch.arange(len(labels))), model.weight("head.weight")).loss

    def scores(self) -> Tensor:
        scores = tensor(self.inputs["scores"])
        if self.params["use_score_scaling"]:
            self.moments.update(scores)
            scores = self.moments.scale(scores, center=self.params["use_score_norm"])
        return clip_scores(scores, self.params["score_clip"])

    def run(self) -> dict[str, Any]:
        """Makes one step and returns TRL's statistics."""
        p, everything = self.params, torch.arange(len(self.ids))
        old, ref = self.log_probs(self.model).float(), self.log_probs(self.reference).float()
        with torch.no_grad():
            states = self.states(self.model, everything)
            values = (states @ self.model.weight("v.weight")[0] + self.model.weight("v.bias")).float()
        scores = self.scores()
        kl_inputs = (old, ref) if p["kl_penalty"] != "full" else (self.spread(self.model), self.spread(self.reference))
        rewards = compute_rewards(scores, *kl_inputs, self.mask, self.controller.value, p["kl_penalty"])
        advantages, returns = trl_advantages(values, rewards.rewards, self.mask, p)
        batch = {"old_logprobs": old, "values": values, "advantages": advantages, "returns": returns}
        kl = (rewards.kl * self.mask).sum(1)
        found: dict[str, Any] = rollout_statistics(rewards, old, self.mask, scores)
        found |= {"objective/kl_dist": kl, "objective/kl_coef": self.controller.value}
        found |= {"objective/logprobs": old, "objective/ref_logprobs": ref}
        parts = list(self.updates(batch))
        means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        means["val/var_explained"] = 1.0 - means["val/error"] / means["returns/var"]
        self.controller.update(float(kl.mean()), len(scores))
        return {**found, **{f"ppo/{name}": value for name, value in means.items()}}

    def spread(self, model: TinyModel) -> Tensor:
        with torch.no_grad():
            states = self.states(model, torch.arange(len(self.ids)))
            return (states @ model.weight("head.weight").T).log_softmax(-1)

    def updates(self, batch: dict[str, Tensor]) -> Iterator[dict[str, float]]:
        """Epochs of backward batches of minibatches; the statistics of each minibatch."""
        p = self.params
        for _ in range(p["ppo_epochs"]):
            order = torch.tensor(next(self.permutations))
            for backward_batch in order.split(p["backward_batch_size"]):
                for rows in backward_batch.split(p["mini_batch_size"]):
                    found = self.minibatch(batch, rows)
                    yield found
                self.optimizer.step()
                self.optimizer.zero_grad()
            if p["early_stopping"] and found["policy/policykl"] > 1.5 * p["target_kl"]:
                return

    def minibatch(self, batch: dict[str, Tensor], rows: Tensor) -> dict[str, float]:
        part = {name: value[rows] for name, value in batch.items()}
        part["shifted_labels"] = torch.where(self.mask[rows] != 0, self.ids[rows, 1:], IGNORED)
        (context,) = ActorCriticLossContext.build_batches([self.config.build(part)])
        heads = (self.model.weight(name) for name in ("v.weight", "v.bias"))
        head = self.model.weight("head.weight")
        loss, (_, extra) = context.forward(self.states(self.model, rows), head, None, *heads)
        # Gradient accumulation averages the minibatches' own means there.
        (loss / self.params["gradient_accumulation_steps"]).backward()
        found = update_statistics(extra, self.params["vf_coef"])
        mask = self.mask[rows] != 0
        return {**found, "policy/advantages_mean": float(part["advantages"][mask].mean())}


@family(r"PPOTrainer\.step.*")
def whole_step(case: Case, _: None) -> None:
    step, out = Step(case), case.data["outputs"]
    for expected in out["stats_per_step"]:
        found, scalars = step.run(), {}
        for name, value in expected.items():
            if name in ("objective/logprobs", "objective/ref_logprobs"):
                check(found[name], value, step.mask, name)
            elif name == "objective/kl_dist":
                assert_close(found[name], value, TOLERANCE, name)
            elif name not in NOT_COMPARED and not name.startswith("tokens/queries") and not isinstance(value, list):
                scalars[name] = value
        # A minibatch of one token has no variance: NaN there, 0 here.
        assert {name for name, value in scalars.items() if value == "NaN"} <= {
            "ppo/returns/var",
            "ppo/val/var",
            "ppo/val/var_explained",
        }
        check_numbers(found, {name: value for name, value in scalars.items() if value != "NaN"})
    for name, expected in out["final_weights"].items():
        assert_close(step.model.weight(name), expected, TOLERANCE, name)
    assert_close(torch.tensor(step.controller.value).double(), out["kl_coef_after"], TOLERANCE, "kl_coef")
