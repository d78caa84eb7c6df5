"""What other libraries' names for losses and reductions stand for here.

>>> from rlloss.compat.names import TRL_LOSS_TYPES, VERL_LOSS_AGG_MODES
>>> TRL_LOSS_TYPES["dr_grpo"].reduction
'constant'
>>> VERL_LOSS_AGG_MODES["seq-mean-token-mean"].reduction
'sample'
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlloss.errors import require_known
from rlloss.losses.terms import Reduction
from rlloss.losses.totals import Totals

Total = Literal["tokens", "sequences", "step_tokens", "none"]
"""What a peer divides by: tokens of the micro-batch, its rows (masked ones too), tokens of the whole step, nothing."""


@dataclass(frozen=True)
class PeerLoss:
    """What a peer's name stands for.

    Attributes:
        policy_loss: Our `loss_type`, or None where the name is about the reduction only.
        reduction: Our `loss_reduction`.
        total: The count that the peer divides by, to be given as `Totals`.
        fields: The peer's option -> field of our policy loss config.
    """

    policy_loss: str | None
    reduction: Reduction
    total: Total
    fields: Mapping[str, str] = field(default_factory=dict)


_CLIP = {"epsilon": "cliprange_low", "epsilon_high": "cliprange_high", "delta": "delta"}
_TAU = {"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"}
_GAMMA = {f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}

TRL_LOSS_TYPES: dict[str, PeerLoss] = {
    "grpo": PeerLoss("vanilla", "sample", "sequences", _CLIP),
    "bnpo": PeerLoss("vanilla", "token", "tokens", _CLIP),
    "dr_grpo": PeerLoss("vanilla", "constant", "sequences", _CLIP),
    "dapo": PeerLoss("vanilla", "token", "step_tokens", _CLIP),
    "cispo": PeerLoss("cispo", "token", "step_tokens", {"epsilon_high": "ratio_cap"}),
    "sapo": PeerLoss("sapo", "sample", "sequences", _TAU),
    "luspo": PeerLoss("vanilla", "sequence_sum", "sequences", _CLIP),
    "vespo": PeerLoss("vespo", "token", "step_tokens", _GAMMA),
}
"""TRL 1.16's `loss_type`; Liger's are the same but for luspo, which it averages over padding."""

TRL_RATIOS = {"token": "token", "sequence": "sequence_mean", "sequence_token": "sequence_token"}
"""TRL's `importance_sampling_level` -> our `ratio`."""

VERL_LOSS_AGG_MODES: dict[str, PeerLoss] = {
    "token-mean": PeerLoss(None, "token", "step_tokens"),
    "token-sum": PeerLoss(None, "sum", "none"),
    "seq-mean-token-sum": PeerLoss(None, "sequence_sum", "sequences"),
    "seq-mean-token-sum-norm": PeerLoss(None, "constant", "sequences"),
    "seq-mean-token-mean": PeerLoss(None, "sample", "sequences"),
}
"""verl 0.9's `loss_agg_mode`."""

_VERL_CLIP = {"clip_ratio_low": "cliprange_low", "clip_ratio_high": "cliprange_high"}
_VERL_DPPO = {"clip_ratio_low": "divergence_low", "clip_ratio_high": "divergence_high", "clip_ratio_c": "ratio_cap"}
_VERL_GMPO = {"clip_ratio_low": "clip_log_ratio_low", "clip_ratio_high": "clip_log_ratio_high"}
_VERL_CLIP_COV = {name: name for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")}
_VERL_KL_COV = {name: name for name in ("kl_cov_ratio", "ppo_kl_coef")}

VERL_LOSS_MODES: dict[str, tuple[str, Mapping[str, str]]] = {
    "vanilla": ("vanilla", {**_VERL_CLIP, "clip_ratio_c": "clip_ratio_c"}),
    "dppo_tv": ("dppo_tv", _VERL_DPPO),
    "dppo_kl": ("dppo_kl", _VERL_DPPO),
    "gspo": ("gspo", _VERL_CLIP),
    "sapo": ("sapo", {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "gpg": ("reinforce", {}),
    "clip_cov": ("clip_cov", {**_VERL_CLIP, **_VERL_CLIP_COV}),
    "kl_cov": ("kl_cov", _VERL_KL_COV),
    "geo_mean": ("gmpo", _VERL_GMPO),
    "dro": ("dro", {"dro_beta": "beta"}),
    "cispo": ("cispo", _VERL_CLIP),
}
"""verl's `policy_loss.loss_mode` -> our `loss_type`, and verl's option -> our field. Its sapo and geo_mean ignore the
loss_agg_mode: they are `loss_reduction="sample"`, geo_mean over all rows."""


def trl_policy_loss(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translates TRL's GRPO options into a `policy_loss_cfg`.

    Args:
        options: `loss_type`, `importance_sampling_level`, `epsilon`, `epsilon_high`, `delta` and the options of sapo
            and vespo, as in TRL's GRPOConfig; a missing `epsilon_high` is `epsilon`, others are not used.

    Raises:
        UnknownNameError: TRL has no such loss type or level.
    """
    peer = _lookup("TRL loss_type", TRL_LOSS_TYPES, options["loss_type"])
    high = options.get("epsilon_high")
    given = {**options, "epsilon_high": options.get("epsilon") if high is None else high}
    fields = {ours: given[theirs] for theirs, ours in peer.fields.items() if given.get(theirs) is not None}
    fields["loss_type"] = peer.policy_loss
    if peer.policy_loss == "vanilla":
        fields["clip_ratio_c"] = None
    if peer.policy_loss != "vespo":
        level = options.get("importance_sampling_level", "token")
        fields["ratio"] = _lookup("TRL importance_sampling_level", TRL_RATIOS, level)
    return fields


@dataclass(frozen=True)
class TRLCounts:
    """What TRL knows of a micro-batch and its step.

    Attributes:
        rows: Rows of the micro-batch, masked ones too.
        tokens: Tokens of the micro-batch that count.
        items: `num_items_in_batch`, tokens of the whole generation batch over all processes.
        accumulation: `current_gradient_accumulation_steps`.
        per_generation: `steps_per_generation`; the accumulation in evaluation.
        processes: Ranks.
    """

    rows: int
    tokens: int
    items: float
    accumulation: int = 1
    per_generation: int = 1
    processes: int = 1


def trl_totals(loss_type: str, counts: TRLCounts) -> Totals:
    """The totals with which a micro-batch's loss equals TRL's, whose processes average their gradients.

    Raises:
        UnknownNameError: TRL has no such loss type.
    """
    peer = _lookup("TRL loss_type", TRL_LOSS_TYPES, loss_type)
    steps = counts.accumulation * counts.processes
    if peer.total == "sequences":
        return Totals(sequences=counts.rows * steps, world=counts.processes)
    if peer.total == "tokens":
        return Totals(tokens=max(counts.tokens, 1) * steps, world=counts.processes)
    tokens = max(counts.items, 1.0) * counts.accumulation / counts.per_generation
    return Totals(tokens=tokens, world=counts.processes)


def verl_totals(
    batch_num_tokens: float | None = None, global_batch_size: float | None = None, dp_size: int | None = None
) -> Totals:
    """The totals that verl's engine hands to `agg_loss`; what is None is counted."""
    return Totals(tokens=batch_num_tokens, sequences=global_batch_size, world=dp_size)


def verl_policy_loss(loss_mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Translates verl's actor options into a `policy_loss_cfg`.

    Args:
        loss_mode: verl's `policy_loss.loss_mode`.
        options: `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c` and the options of the loss; a bound
            that is None is `clip_ratio`.

    Raises:
        UnknownNameError: verl has no such loss, or it is bypass_mode, which is `rollout_is` here.
    """
    name, fields = _lookup("verl loss_mode", VERL_LOSS_MODES, loss_mode)
    both = options.get("clip_ratio")
    bounds = {side: options.get(side) for side in ("clip_ratio_low", "clip_ratio_high")}
    given = {**options, **{side: both if bound is None else bound for side, bound in bounds.items()}}
    found = {ours: given[theirs] for theirs, ours in fields.items() if given.get(theirs) is not None}
    return {"loss_type": name, **found}


def _lookup(kind: str, table: Mapping[str, Any], name: str) -> Any:
    require_known(kind, name, table)
    return table[name]
