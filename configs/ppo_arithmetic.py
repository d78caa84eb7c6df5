"""Sums of three digits: a short supervised warm start, then PPO with a critic. A few minutes on two cores."""

from rlloss import CELossConfig, PPOLossConfig, ValueLossConfig
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
from rlloss.training.ppo_config import CriticConfig, KLConfig, PPOConfig

config = TrainConfig(
    seed=0,
    task=TaskConfig(
        name="chain_sum",
        options={"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        pool=30_000,
        heldout=300,
        prompt="{expression}=",
        replace={" ": ""},
        reward="exact",
    ),
    model=ModelConfig(layers=2, hidden=128, heads=8, kv_heads=8, mlp=256),
    supervised=SupervisedConfig(
        steps=100,
        batch_size=128,
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=30),
        loss=CELossConfig(mode="chunk", loss_reduction="token"),
    ),
    grpo=GRPOConfig(steps=0),
    ppo=PPOConfig(
        steps=100,
        rollout=RolloutConfig(prompts=512, group_size=2, max_new_tokens=4),
        kl=KLConfig(coef=0.1, target=1.0, horizon=10_000),
        negative_scale=0.3,
        epochs=1,
        updates_per_epoch=4,
        target_kl=0.1,
        optimizer=OptimizerConfig(lr=6e-4, warmup_steps=10, betas=(0.9, 0.99)),
        critic=CriticConfig(
            optimizer=OptimizerConfig(lr=3e-4, warmup_steps=3, betas=(0.9, 0.99)),
            loss=ValueLossConfig(),
            warmup_steps=3,
        ),
        loss=PPOLossConfig(mode="chunk", entropy_metric=True),
    ),
    evaluation=EvaluationConfig(every=20),
)
