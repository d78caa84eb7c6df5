"""Training for real: rollout, rewards, supervised warm start, GRPO, evaluation, checkpoints.

Guided tour, in reading order: `config` (what a run is made of), `tasks` (questions and scores), `model` (backbone and
head of a transformers model), `rollout` (sampling), `phase` (what a phase is), `supervised` and `grpo` (the phases),
`run` (phases one after another), `checkpoint`, `logging`, `interrupt`.
"""
