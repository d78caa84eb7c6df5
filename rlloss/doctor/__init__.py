"""Tries a loss on a few sequences, and says in plain words what does not hold, with the smallest input that shows it.

from rlloss.doctor import check_loss, sequence, step

findings = check_loss(loss_cfg)
a, b = sequence(log_prob=[-1.0], advantages=[1.0]), sequence(log_prob=[-2.0, -1.0], advantages=[-1.0, -1.0])
assert step(loss_cfg, [a], [b]).distance(step(loss_cfg, [a, b])) < 1e-10
"""

from rlloss.doctor.behaviour import against, slope_gap
from rlloss.doctor.checks import CHECKS
from rlloss.doctor.examine import Finding, check_loss, loss_of
from rlloss.doctor.sequences import ignored_sequence, sequence
from rlloss.doctor.step import How, Outcome, step
from rlloss.doctor.writes import written

__all__ = [
    "CHECKS",
    "Finding",
    "How",
    "Outcome",
    "against",
    "check_loss",
    "ignored_sequence",
    "loss_of",
    "sequence",
    "slope_gap",
    "step",
    "written",
]
