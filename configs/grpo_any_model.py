"""GRPO on a model folder saved by transformers and any task of reasoning-gym.

    rlloss train configs/grpo_any_model.py --set model.folder=PATH --set task.name=spell_backward

Without `model.folder` a small Qwen3 with a random start takes its place, which shows that everything runs.
"""

from rlloss import GRPOLossConfig
from rlloss.training.config import (
    EvaluationConfig,
    GRPOConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)

config = TrainConfig(
    task=TaskConfig(name="spell_backward", pool=2_000, heldout=100, prompt="{question}\n"),
    model=ModelConfig(folder=None),
    grpo=GRPOConfig(
        steps=100,
        rollout=RolloutConfig(prompts=16, group_size=8, max_new_tokens=32),
        updates_per_epoch=1,
        micro_batch_size=16,
        optimizer=OptimizerConfig(lr=1e-6, betas=(0.9, 0.99)),
        loss=GRPOLossConfig(
            policy_loss_cfg={"loss_type": "vanilla", "cliprange_low": 0.2, "cliprange_high": 0.28},
            use_kl_loss=True,
            kl_loss_type="k3",
            kl_loss_coef=0.001,
            mode="chunk",
        ),
    ),
    evaluation=EvaluationConfig(every=20, batch_size=32),
)
