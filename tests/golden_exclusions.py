"""Golden cases that are not run, each with its reason. A row that covers no case is an error."""

from golden_cases import Exclusion

FEW = "an error there; here whitening and variance of fewer than two numbers are defined"
SKIPPED = "0 * inf = NaN there; here a ratio beyond the threshold makes no step, and its gradient is finite"
OTHER_ALGORITHM = "an algorithm that rlloss does not offer"
DIVIDES_BY_ZERO = "verl divides by zero in a metric where every weight is 0"
INFINITE_OLD = "DESIGN.md section 9: a token with an infinite log-prob is dropped, from counts too"
NAN_ROW = "verl's gspo: a NaN at a masked position takes the gradient of its whole row"
BF16 = "verl computes in bfloat16 what it is given in it; log-probs are float32 here before anything is computed"
COUNTED = "verl refuses what is counted here: a data-parallel size without counts"
NO_TOKENS = "verl divides by a given count of 0, which is a named error here"
LUSPO = "Liger's luspo averages over padding; TRL's, the same formula over tokens, is what is reproduced"
NO_LABEL = "Liger gives -log Z for an ignored label, which is 0 here"
ALONE = "a group of one is an error there, and has advantage 0 with a warning here"
NO_TOKEN = "no valid token is an error there, and gives 0 here"
OTHERS_ERRORS = "the text of another library's errors"

EXCLUSIONS = (
    # verl
    Exclusion("core_algos policy loss '(?!gpg).*'", INFINITE_OLD, name="edge/neginf_old_valid/.*"),
    Exclusion("core_algos policy loss '(clip|kl)_cov'", INFINITE_OLD, name="edge/neginf_new_valid/.*"),
    Exclusion("core_algos policy loss 'gspo'", NAN_ROW, name="edge/nan_(old|new)_at_masked/.*"),
    Exclusion("core_algos policy loss '.*'", BF16, name="edge/bf16_logprobs/.*"),
    Exclusion("core_algos policy loss 'vanilla'", COUNTED, name="edge/dp2_without_counts/.*"),
    Exclusion("core_algos policy loss 'vanilla'", NO_TOKENS, name="edge/zero_batch_num_tokens/.*"),
    Exclusion(r"core_algos\.compute_grpo_passk_outcome_advantage", ALONE, name=r".*/groups_4_3_1/.*"),
    Exclusion(r"core_algos\.compute_reinforce_plus_plus_baseline_.*", NO_TOKEN, name=r".*edge_all_masked.*"),
    Exclusion(r"rollout_corr_helper\..*", DIVIDES_BY_ZERO, name=r".*/sequence_0\.9_1\.1_bn/s1"),
    Exclusion(r"torch_functional\.masked_var", FEW),
    # TRL
    Exclusion(r"PPOTrainer\.loss.*", SKIPPED, name="loss_ratio_inf"),
    Exclusion(r"experimental (NashMD|XPO|MiniLLM)Trainer.*", OTHER_ALGORITHM),
    Exclusion(r"experimental\.sdpo\..*", OTHER_ALGORITHM),
    # Liger
    Exclusion(r"(LigerFusedLinearGRPOLoss|triton_grpo_loss) error behaviour.*", OTHERS_ERRORS),
    Exclusion(r"chunked_loss\.fused_linear_ppo\._selective_logprob_forward \(.*", NO_LABEL),
    Exclusion(r"LigerFusedLinearGRPOLoss \(.*", LUSPO, name="chunked_luspo_(token|sequence_[dk]|emptyrow).*"),
    Exclusion(r"triton_grpo_loss \(.*", LUSPO, name="triton_luspo_.*"),
)
