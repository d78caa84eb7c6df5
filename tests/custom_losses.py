"""Policy losses that are reached by their dotted path only."""


def clipped_above(log_prob, old_log_prob, advantages, policy_loss_cfg):
    """A loss of each token with one parameter from the plain dict."""
    return -advantages * (log_prob - old_log_prob).exp().clamp(max=policy_loss_cfg.get("cap", 10.0))
