"""Every metric and table that a run can record, with its unit and meaning; `reference.py` writes the page.

A word in capitals is a part that differs from run to run: `val/test_score/SOURCE`.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    """A number that a run records after a step."""

    name: str
    unit: str
    meaning: str
    when: str = ""  # the condition under which it is recorded; '' = in every step


class Table(NamedTuple):
    """Rows that a run records after a step."""

    name: str
    columns: str
    meaning: str


def _spread(name: str, unit: str, meaning: str, when: str = "") -> list[Metric]:
    return [
        Metric(f"{name}/{end}", unit, f"{word} {meaning}", when)
        for end, word in (("mean", "Mean"), ("max", "Largest"), ("min", "Smallest"))
    ]


def _learning(prefix: str) -> list[Metric]:
    return [
        Metric(f"{prefix}grad_norm", "-", "Norm of the gradient before clipping", "an update was not skipped"),
        Metric(f"{prefix}lr", "-", "Learning rate of this step"),
        Metric(f"{prefix}skipped_updates", "mini-batches", "Updates skipped because loss or gradient was not finite"),
        Metric(f"{prefix}empty_minibatches", "mini-batches", "Mini-batches without a response token"),
        Metric(f"{prefix}idle_minibatches", "mini-batches", "Mini-batches whose gradient is 0"),
    ]


_OFF_POLICY = "the engine's log-probabilities are known"
_GATE = "the gate checks the samples"
_FILTER = "`filter_groups.enable`"
_PARTIAL = "`rollout.partial.enable`"
_EPISODES = "`environment.name` is set"
_MIRROR = "after an upload to `default_hdfs_dir`"
_HELD_OUT = "validation is due and has files"
_SEVERAL = "several responses to a prompt"
_FAILURES = "after a failed save"
_PEAK = "the peak is known (`trainer.peak_tflops`)"
_IN_KL = "`use_kl_in_reward`"
_CRITIC = "there is a critic"
_MODEL = "there is a reward model"

GROUPS: Mapping[str, Sequence[Metric]] = {
    "At a glance": [
        Metric("val/score", "reward", "Mean of `val/test_score/SOURCE` over the sources", "in MLflow, of a validation"),
        Metric("train/reward", "reward", "As `critic/score/mean`", "in MLflow"),
        Metric("train/kl", "nats", "As `actor/reward_kl_penalty`, or `actor/kl_loss`, or `actor/ppo_kl`", "in MLflow"),
        Metric("time/step", "s", "As `timing_s/step`", "in MLflow"),
    ],
    "Scores and advantages": [
        *_spread("critic/score", "reward", "score of a response"),
        *_spread("critic/rewards", "reward", "score less length penalty and KL penalty"),
        *_spread("critic/advantages", "-", "advantage of a response token"),
        *_spread("critic/baselines", "reward", "reward of a greedy response", "`adv_estimator=remax`"),
    ],
    "Actor": [
        Metric("actor/pg_loss", "-", "Policy loss"),
        Metric(
            "actor/entropy_loss",
            "nats per token",
            "Entropy in the update",
            "`entropy_coeff` is not 0",
        ),
        Metric("actor/pg_clipfrac", "0-1", "Share of tokens that the loss clips or drops"),
        Metric("actor/pg_clipfrac_lower", "0-1", "Share of tokens that `clip_ratio_c` clips"),
        Metric("actor/ppo_kl", "nats per token", "KL of the policy before and in the update, estimated"),
        Metric("actor/kl_loss", "nats per token", "KL to the reference in the loss", "`use_kl_loss`"),
        Metric(
            "actor/ptx_loss",
            "nats per token",
            "Cross-entropy of the supervised pairs",
            "`actor.ptx_files`",
        ),
        Metric("actor/entropy", "nats per token", "Entropy of the policy before the update"),
        Metric(
            "actor/router_agreement",
            "0-1",
            "Share of the replayed choices of experts that the actor's routers make too",
            "`routing_replay` is not none",
        ),
        Metric("actor/reward_kl_penalty", "nats per token", "Mean KL penalty of a response's tokens", _IN_KL),
        Metric("actor/reward_kl_penalty_coeff", "-", "Weight of the KL penalty in the reward", _IN_KL),
        *_learning("actor/"),
    ],
    "Critic": [
        Metric("critic/vf_loss", "squared reward", "Value loss", _CRITIC),
        Metric("critic/vf_clipfrac", "0-1", "Share of tokens whose value is clipped", _CRITIC),
        Metric("critic/vpred_mean", "reward", "Mean value in the update", _CRITIC),
        Metric("critic/vf_explained_var", "at most 1", "Share of the returns' variance that values explain", _CRITIC),
        *_spread("critic/returns", "reward", "return at a response token", _CRITIC),
        *_spread("critic/values", "reward", "value at a response token before the update", _CRITIC),
        *[metric._replace(when=metric.when or _CRITIC) for metric in _learning("critic/")],
    ],
    "Lengths": [
        *_spread("response_length", "tokens", "length of a response"),
        Metric("response_length/clip_ratio", "0-1", "Share of responses that reached the length limit"),
        *_spread("prompt_length", "tokens", "length of a prompt"),
    ],
    "Reward": [
        Metric("reward/masked_rate", "0-1", "Share of responses without a score"),
        Metric("reward/timeout_rate", "0-1", "Share of responses whose reward exceeded `timeout_s`", "rules"),
        Metric("reward/error_rate", "0-1", "Share of responses whose reward raised an error or died", "rules"),
        Metric("reward/slowest_s", "s", "Longest time to score a response", "rules"),
        Metric("reward/model/mean", "reward", "Mean score of the reward model, before its weight", _MODEL),
        Metric("reward/model/max", "reward", "Largest score of the reward model", _MODEL),
        Metric("reward/model/min", "reward", "Smallest score of the reward model", _MODEL),
        Metric(
            "reward/NAME/mean",
            "your own",
            "Mean of the number NAME of your reward function",
            "the reward returns a dictionary",
        ),
    ],
    "Dynamic sampling": [
        Metric("train/num_gen_batches", "batches", "Sampled batches of prompts", _FILTER),
        Metric("train/num_groups_kept", "prompts", "Prompts to learn from", _FILTER),
        Metric("train/num_groups_alike", "prompts", "Prompts whose responses score alike", _FILTER),
        Metric("train/num_groups_surplus", "prompts", "Prompts with differing scores beyond the batch", _FILTER),
        Metric("train/sampled_score/mean", "reward", "Mean score of all sampled responses", _FILTER),
    ],
    "Generation": [
        Metric("episode/turns/mean", "turns", "Mean number of turns", _EPISODES),
        Metric("episode/turns/max", "turns", "Most turns", _EPISODES),
        Metric(
            "episode/observed_tokens/mean",
            "tokens",
            "Mean number of observed tokens",
            _EPISODES,
        ),
        Metric(
            "episode/stop/REASON",
            "0-1",
            "Share of episodes that end by REASON: `done`, `turns`, `tokens`, `timeout` or `failed`",
            _EPISODES,
        ),
        Metric("rollout/occupancy", "0-1", "Share of the engine's slots that drew a sample"),
        Metric("rollout/staleness/mean", "steps", "Mean age of the weights of a token", _PARTIAL),
        Metric("rollout/staleness/max", "steps", "Largest age of the weights of a token", _PARTIAL),
        Metric("rollout/complete_prompts", "prompts", "Prompts that the step learns from", _PARTIAL),
        Metric("rollout/carried_share", "0-1", "Share of prompts that continue in the next step", _PARTIAL),
        Metric("rollout/recomputed_tokens", "tokens", "Tokens whose keys were computed again", _PARTIAL),
        Metric("rollout/wasted_tokens", "tokens", "Response tokens dropped for their age", _PARTIAL),
    ],
    "Agreement of engine and trainer": [
        Metric(
            "training/rollout_probs_diff_mean", "probability", "Mean difference of a token's probability", _OFF_POLICY
        ),
        Metric(
            "training/rollout_probs_diff_max", "probability", "Largest difference of a token's probability", _OFF_POLICY
        ),
        Metric(
            "training/rollout_probs_diff_std",
            "probability",
            "Standard deviation of that difference",
            _OFF_POLICY,
        ),
        Metric("training/rollout_mismatch", "-", "Mean of min(d², 1) / 2, d: difference of log-probabilities", _GATE),
        Metric("training/rollout_mismatch_limit", "-", "Mismatch above which the run stops", _GATE),
        Metric("training/rollout_mismatch_left_out", "0-1", "Share of responses left out for their mismatch", _GATE),
        Metric("rollout_corr/kl", "nats per token", "KL(engine, trainer), estimated by -d", _OFF_POLICY),
        Metric("rollout_corr/k3_kl", "nats per token", "KL(engine, trainer), estimated by exp(d) - d - 1", _OFF_POLICY),
        Metric("rollout_corr/chi2_token", "-", "Chi-square divergence, over tokens", _OFF_POLICY),
        Metric("rollout_corr/chi2_seq", "-", "Chi-square divergence, over responses", _OFF_POLICY),
        Metric("rollout_corr/training_ppl", "-", "Perplexity of a response under the trainer", _OFF_POLICY),
        Metric("rollout_corr/training_log_ppl", "nats per token", "Logarithm of `training_ppl`", _OFF_POLICY),
        Metric("rollout_corr/rollout_ppl", "-", "Perplexity of a response under the engine", _OFF_POLICY),
        Metric("rollout_corr/rollout_log_ppl", "nats per token", "Logarithm of `rollout_ppl`", _OFF_POLICY),
        Metric("rollout_corr/log_ppl_diff", "nats per token", "Trainer's less engine's log-perplexity", _OFF_POLICY),
        Metric("rollout_corr/log_ppl_abs_diff", "nats per token", "Absolute value of that difference", _OFF_POLICY),
        Metric("rollout_corr/ppl_ratio", "-", "Trainer's perplexity divided by the engine's", _OFF_POLICY),
        Metric(
            "rollout_corr/rollout_is_mean",
            "-",
            "Mean importance weight before normalisation",
            "`rollout_is`",
        ),
        Metric(
            "rollout_corr/rollout_is_ratio_fraction_high",
            "0-1",
            "Share of tokens above the largest weight",
            "`rollout_is`",
        ),
        Metric("rollout_corr/rollout_rs_masked_fraction", "0-1", "Share of tokens that are rejected", "`rollout_rs`"),
        Metric(
            "sync/check_probs_diff_mean",
            "probability",
            "Mean difference of a token's probability",
            "the sync is checked",
        ),
        Metric(
            "sync/check_probs_diff_max",
            "probability",
            "Largest difference of a token's probability",
            "the sync is checked",
        ),
    ],
    "Validation": [
        Metric("val/test_score/SOURCE", "reward", "Mean score of a data source", _HELD_OUT),
        Metric("val/SOURCE/mean@N", "reward", "Mean score of a data source", _SEVERAL),
        Metric("val/SOURCE/std@N", "reward", "Standard deviation among a prompt's responses", _SEVERAL),
        Metric("val/SOURCE/best@K/mean", "reward", "Expected best score of K of the N responses", _SEVERAL),
        Metric(
            "val/SOURCE/maj@N", "reward", "Score of the most frequent final answer", "the reward returns final answers"
        ),
        Metric("val/best_score", "reward", "Best mean over data sources so far", _HELD_OUT),
        Metric("val/best_step", "step", "Step of the best score", _HELD_OUT),
        Metric("val/episode/turns/mean", "turns", "As `episode/turns/mean`, for validation", _EPISODES),
        Metric("val/episode/turns/max", "turns", "As `episode/turns/max`, for validation", _EPISODES),
        Metric("val/episode/observed_tokens/mean", "tokens", "As `episode/observed_tokens/mean`", _EPISODES),
        Metric("val/episode/stop/REASON", "0-1", "As `episode/stop/REASON`, for validation", _EPISODES),
        Metric("val/reward/masked_rate", "0-1", "As `reward/masked_rate`, for validation", _HELD_OUT),
        Metric("val/reward/timeout_rate", "0-1", "As `reward/timeout_rate`, for validation", _HELD_OUT),
        Metric("val/reward/error_rate", "0-1", "As `reward/error_rate`, for validation", _HELD_OUT),
        Metric("val/reward/model/mean", "reward", "As `reward/model/mean`, for validation", _MODEL),
        Metric("val/reward/model/max", "reward", "As `reward/model/max`, for validation", _MODEL),
        Metric("val/reward/model/min", "reward", "As `reward/model/min`, for validation", _MODEL),
        Metric("val/reward/NAME/mean", "your own", "As `reward/NAME/mean`, for validation", _HELD_OUT),
        Metric(
            "val/archive/failures",
            "0 or 1",
            "1 if the disk refused the samples",
            "`trainer.rollout_data_dir`",
        ),
    ],
    "Time and throughput": [
        Metric("timing_s/step", "s", "The whole step"),
        Metric("timing_s/gen", "s", "Generation, with the sync"),
        Metric("timing_s/sync", "s", "The sync, part of `gen`"),
        Metric("timing_s/sync_check", "s", "Check of the sync, part of `gen`", "the sync is checked"),
        Metric("timing_s/gen_max", "s", "Greedy responses, part of `gen`", "`adv_estimator=remax`"),
        Metric("timing_s/reward", "s", "Wait for the reward after generation"),
        Metric("timing_s/dump_rollout_generations", "s", "Writing the samples", "`trainer.rollout_data_dir`"),
        Metric("timing_s/old_log_prob", "s", "Log-probabilities of the actor", "the update does not give them"),
        Metric("timing_s/ref", "s", "Log-probabilities of the reference"),
        Metric("timing_s/values", "s", "Values of the critic"),
        Metric("timing_s/adv", "s", "Rewards and advantages"),
        Metric("timing_s/update_critic", "s", "Updates of the critic", _CRITIC),
        Metric("timing_s/update_actor", "s", "Updates of the actor", "after `critic_warmup`"),
        Metric("timing_s/testing", "s", "Validation", _HELD_OUT),
        Metric("timing_s/save_checkpoint", "s", "Saving; with `async_save` the copy alone", "a save is due"),
        Metric("perf/total_num_tokens", "tokens", "Tokens of the step, over all ranks"),
        Metric("perf/throughput", "tokens/s per rank", "`perf/total_num_tokens` per second and rank"),
        Metric("perf/tflop", "TFLOP", "Work of the models, over all ranks, without recomputation"),
        Metric("perf/mfu", "0-1", "`perf/tflop` over the peak of all devices in the step", _PEAK),
        Metric(
            "perf/mfu/actor",
            "0-1",
            "`perf/mfu` of the actor's updates",
            _PEAK,
        ),
        Metric("perf/mfu/critic", "0-1", "`perf/mfu` of the critic's updates", f"{_PEAK}, and {_CRITIC}"),
        Metric("perf/max_host_memory_gb", "GB", "Most host memory of a rank since its start"),
        Metric(
            "perf/max_memory_allocated_gb",
            "GB",
            "Most memory of torch on a GPU in the step",
            "on CUDA",
        ),
        Metric(
            "perf/time_lost_to_stragglers",
            "s",
            "Mean wait of a rank for the slowest",
            "several ranks",
        ),
    ],
    "Files": [
        Metric("checkpoint/failed_saves", "saves", "Failed saves of this job", _FAILURES),
        Metric("checkpoint/mirrored_step", "step", "Newest checkpoint in the mirror", _MIRROR),
        Metric("checkpoint/mirror_bytes", "bytes", "Size of that upload", _MIRROR),
        Metric("checkpoint/mirror_s", "s", "Time of that upload", _MIRROR),
        Metric("checkpoint/mirror_failures", "uploads", "Failed uploads of this job", _MIRROR),
        Metric("archive/failures", "0 or 1", "1 if the disk refused the samples", "`trainer.rollout_data_dir`"),
    ],
    "Supervised fine-tuning": [
        Metric("sft/loss", "nats per token", "Cross-entropy of the response tokens"),
        Metric("val/loss", "nats per token", "Cross-entropy of the held-out response tokens", _HELD_OUT),
    ],
    "Training of a reward model": [
        Metric("reward_model/loss", "nats", "Bradley-Terry loss"),
        Metric("reward_model/accuracy", "0-1", "Share of pairs in the right order"),
        Metric("reward_model/margin/mean", "reward", "Mean difference of the two scores"),
        Metric("reward_model/score/mean", "reward", "Mean score of all responses"),
        Metric("val/accuracy", "0-1", "As `reward_model/accuracy`, over the held-out pairs", _HELD_OUT),
        Metric("val/margin/mean", "reward", "As `reward_model/margin/mean`, over the held-out pairs", _HELD_OUT),
        Metric("val/score/mean", "reward", "As `reward_model/score/mean`, over the held-out pairs", _HELD_OUT),
    ],
    "Training from files": _learning(""),
}
"""Heading of the page -> its metrics."""

TABLES = (
    Table("val/generations", "prompt_id, prompt, response, score", "The first samples of a validation"),
    Table("data/prompts", "files, prompts, left out", "Prompts used and prompts longer than the limit"),
)


@cache
def _patterns() -> Sequence[tuple[re.Pattern[str], Metric]]:
    metrics = [metric for group in GROUPS.values() for metric in group]
    return [(re.compile(_pattern(metric.name)), metric) for metric in metrics]


def _pattern(name: str) -> str:
    counts = re.sub(r"\b[NK]\b", r"\\d+", name)
    return re.sub(r"\b[A-Z]{2,}\b", ".+", counts)


def describe(name: str) -> Metric | None:
    """Return the description of a metric that a run recorded; None if there is none."""
    matching = [metric for pattern, metric in _patterns() if pattern.fullmatch(name)]
    return min(matching, key=lambda metric: metric.name != name, default=None)
