"""Golden cases that are not run, each with its reason. A row that covers no case is an error."""

from golden_cases import Exclusion

LOSSES = "later, in: Every loss the field uses, equal to the peers' own numbers"
PPO = "later, in: PPO whole: rewards, GAE, critic, value loss, and verl's losses on model outputs"
OTHER_ALGORITHM = "an algorithm that rlloss does not offer"
DIVIDES_BY_ZERO = "verl divides by zero in a metric where every weight is 0"
OTHERS_ERRORS = "the text of another library's errors"

EXCLUSIONS = (
    # XTuner
    Exclusion("advantages:.*", LOSSES),
    # verl
    Exclusion("core_algos policy loss '.*'", LOSSES),
    Exclusion(r"core_algos\.compute_.*_advantage(_return)?", LOSSES),
    Exclusion(r"core_algos\.(agg_loss|kl_penalty)", LOSSES),
    Exclusion(r"rollout_corr_helper\..*", DIVIDES_BY_ZERO, name=r".*/sequence_0\.9_1\.1_bn/s1"),
    Exclusion(r"core_algos\.(compute_value_loss|compute_rewards|AdaptiveKLController|FixedKLController)", PPO),
    Exclusion(r"(workers\.utils|ray_trainer|utils\.metric)\..*", PPO),
    Exclusion(r"torch_functional(\.masked_var| masked_sum.*)", PPO),
    # TRL
    Exclusion(r"GRPOTrainer(?! vLLM importance).*", LOSSES),
    Exclusion(r"RLOOTrainer.*", LOSSES),
    Exclusion(r"experimental (gspo_token GRPO|DPPO|GMPO|AsyncGRPO|IWOPD)Trainer.*", LOSSES),
    Exclusion(r"trl\.(kernels|rewards|trainer\.utils)\..*", LOSSES),
    Exclusion(r"(PPOTrainer|AdaptiveKLController|RunningMoments)\..*", PPO),
    Exclusion(r"experimental PPOTrainer.*", PPO),
    Exclusion(r"trl\.core\..*", PPO),
    Exclusion(r"experimental (NashMD|XPO|MiniLLM)Trainer.*", OTHER_ALGORITHM),
    Exclusion(r"experimental\.sdpo\..*", OTHER_ALGORITHM),
    # Liger
    Exclusion(r"(LigerFusedLinearGRPOLoss|triton_grpo_loss) error behaviour.*", OTHERS_ERRORS),
    Exclusion(r"LigerFusedLinearGRPOLoss \(.*", LOSSES),
    Exclusion(r"triton_grpo_loss \(.*", LOSSES),
    Exclusion(r"(chunked_loss\.fused_linear_ppo|fused_selective_log_softmax).*", LOSSES),
)
