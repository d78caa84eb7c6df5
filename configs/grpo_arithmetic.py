"""Sums and differences of two numbers: a supervised warm start, then GRPO. A few minutes on two cores."""

from rlloss import CELossConfig, GRPOLossConfig
from rlloss.training.config import (
    EvaluationConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SupervisedConfig,
    TaskConfig,
    TrainConfig,
)

config = TrainConfig(
    seed=0,
    task=TaskConfig(
        name="chain_sum",
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        pool=30_000,
        heldout=600,
        prompt="{expression}=",
        replace={" ": ""},
    ),
    model=ModelConfig(layers=2, hidden=128, heads=8, kv_heads=8, mlp=256),
    supervised=SupervisedConfig(
        steps=560,
        target_loss=0.33,
        questions=3_000,
        batch_size=128,
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=30, final_fraction=0.3),
        loss=CELossConfig(mode="chunk", loss_reduction="token"),
    ),
    grpo=GRPOConfig(
        steps=450,
        rollout=RolloutConfig(prompts=256, group_size=4, max_new_tokens=5),
        updates_per_epoch=2,
        skip_zero_advantages=True,
        optimizer=OptimizerConfig(lr=1.2e-3, warmup_steps=15, final_fraction=0.05, betas=(0.9, 0.99)),
        loss=GRPOLossConfig(
            policy_loss_cfg={"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.28},
            mode="chunk",
            loss_reduction="token",
        ),
    ),
    evaluation=EvaluationConfig(every=20),
)
