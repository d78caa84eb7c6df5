"""The parts of a run: task split, scores, seeded sampling, layout of a rollout, advantages, checkpoints."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path

import pytest
import torch

from rlloss.errors import BatchError, ConfigError, RLLossError
from rlloss.functional.advantages import grpo_advantages
from rlloss.training import checkpoint
from rlloss.training.checkpoint import Checkpoints, random_states, restore_random_states
from rlloss.training.config import OptimizerConfig, RolloutConfig, TaskConfig
from rlloss.training.model import Policy, load_policy
from rlloss.training.optimizer import learning_rate, make_optimizer, optimizer_tensors
from rlloss.training.phase import label_logprobs
from rlloss.training.rollout import IGNORE, greedy, prompt_seed, sample
from rlloss.training.supervised import supervised_batch
from rlloss.training.tasks import Task
from training.helpers import tiny_config


@pytest.fixture(scope="module")
def task() -> Task:
    return Task(tiny_config().task)


@pytest.fixture(scope="module")
def policy(task: Task) -> Policy:
    torch.manual_seed(0)
    texts = [text for question in task.train for text in (question.prompt, question.answer)]
    return load_policy(tiny_config().model, [*texts, "=-+"], "cpu")


def test_train_and_heldout_are_disjoint() -> None:
    task = Task(TaskConfig(options={"max_terms": 2, "max_digits": 2}, pool=4000, heldout=200))
    train = {question.entry["question"] for question in task.train}
    heldout = {question.entry["question"] for question in task.heldout}
    assert len(heldout) == len(task.heldout) == 200
    assert len(train) == len(task.train)
    assert not train & heldout


def test_the_split_does_not_depend_on_the_pool() -> None:
    small, large = (Task(TaskConfig(pool=pool, heldout=20)) for pool in (1000, 2000))
    train = {question.prompt for question in large.train}
    assert not train & {question.prompt for question in small.heldout}


def test_scores_are_those_of_the_task(task: Task) -> None:
    question = next(q for q in task.train if q.answer == "12")
    assert task.score("12", question) == 1.0
    assert task.score(" 012 ", question) == 1.0
    assert task.score("13", question) == 0.0
    assert task.score("128", question) == pytest.approx(2 / 3)  # partial credit of the task's own scorer
    assert task.score("", question) == 0.0


def test_exact_reward_leaves_partial_credit_out() -> None:
    settings = {**tiny_config().task.model_dump(), "reward": "exact", "answer_pattern": r"<a>(.*?)</a>"}
    task = Task(TaskConfig(**settings))
    question = next(q for q in task.train if q.answer == "12")
    assert task.reward("I think <a>3</a>, no, <a> 12</a>.", question) == 1.0
    assert task.reward("<a>128</a>", question) == 0.0
    assert task.reward("12", question) == 0.0


def test_a_prompt_is_sampled_alike_in_any_batch(policy: Policy, task: Task) -> None:
    config = RolloutConfig(group_size=3, max_new_tokens=4)
    prompts = [policy.encode(question.prompt) for question in task.train[:5]]
    seeds = [prompt_seed(0, 0, place) for place in range(5)]
    together = sample(policy, prompts, seeds, config)
    for place in range(5):
        alone = sample(policy, [prompts[place]], [seeds[place]], config)
        assert alone.texts == together.texts[3 * place : 3 * place + 3]
    in_parts = sample(policy, prompts, seeds, RolloutConfig(group_size=3, max_new_tokens=4, batch_size=6))
    assert in_parts.texts == together.texts
    assert torch.equal(in_parts.labels, together.labels)


def test_another_seed_step_or_prompt_samples_otherwise() -> None:
    seeds = {prompt_seed(seed, step, prompt) for seed in (0, 1) for step in (0, 1) for prompt in (0, 1)}
    assert len(seeds) == 8


def test_samples_follow_the_softmax(policy: Policy) -> None:
    """First tokens of 4000 samples against the model's own probabilities: within five standard errors."""
    prompt = policy.encode("1+2=")
    count, temperature = 4000, 0.7
    config = RolloutConfig(group_size=count, max_new_tokens=1, batch_size=count, temperature=temperature)
    rollout = sample(policy, [prompt], [1], config)
    first = rollout.labels[:, len(prompt) - 1]
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt])).logits[0, -1] / temperature
    expected = logits.softmax(-1)
    share = torch.bincount(first, minlength=len(expected)) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert bool(((share - expected).abs() <= 5 * error + 1e-9).all())
    drawn = rollout.rollout_logprobs[:, len(prompt) - 1]
    torch.testing.assert_close(drawn, expected.log()[first], rtol=1e-5, atol=1e-5)


def test_layout_of_a_rollout(policy: Policy) -> None:
    prompts = [policy.encode("1+2="), policy.encode("12=")]
    rollout = sample(policy, prompts, [1, 2], RolloutConfig(group_size=2, max_new_tokens=4))
    ids, mask, labels = rollout.tokens.input_ids, rollout.tokens.attention_mask, rollout.labels
    assert rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert mask[2, 0] == 0 and rollout.tokens.position_ids[2, 1] == 0
    for row in range(4):
        place = labels[row] != IGNORE
        assert int(place.nonzero()[0]) == 3  # the last token of the prompt predicts the first of the response
        spoken = labels[row][place].tolist()
        assert policy.decode([spoken])[0] == rollout.texts[row]
        assert not set(spoken[:-1]) & set(policy.eos_ids)
        assert ids[row][mask[row] == 1].tolist() == [*prompts[row // 2], *spoken][: int(mask[row].sum())]
    again = label_logprobs(policy, rollout.tokens, labels, 3, 1.0)
    torch.testing.assert_close(again, rollout.rollout_logprobs, rtol=0, atol=5e-6)


def test_greedy_is_the_most_likely_answer(policy: Policy) -> None:
    prompt = policy.encode("1+2=")
    text = greedy(policy, [prompt], 3, 8)[0]
    ids = list(prompt)
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(policy.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in policy.eos_ids:
            break
    assert policy.decode([ids[len(prompt) :]])[0] == text


def test_supervised_batch_closes_the_answers(policy: Policy) -> None:
    pairs = [(policy.encode("1+2="), policy.encode("3")), (policy.encode("12="), policy.encode("12"))]
    tokens, labels = supervised_batch(policy, pairs)
    for row, (prompt, answer) in enumerate(pairs):
        assert labels[row][labels[row] != IGNORE].tolist() == [*answer, policy.eos_ids[0]]
        assert tokens.input_ids[row][tokens.attention_mask[row] == 1].tolist()[: len(prompt)] == prompt


def test_learning_rate_rises_and_falls() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_fraction=0.25)
    rates = [learning_rate(config, step, 40) for step in range(40)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == max(rates[3:6]) <= 1.0
    assert rates[-1] == pytest.approx(0.25)
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_an_optimiser_starts_with_the_state_that_adamw_makes() -> None:
    """A checkpoint fills it in place, before the first step."""
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    mine = make_optimizer(ours, config)
    plain = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=config.betas,
    )
    for model, optimizer in ((ours, mine), (theirs, plain)):
        model(torch.ones(3)).square().sum().backward()
        optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)
    expected = {f"optimizer.weight.{name}": value for name, value in plain.state[theirs.weight].items()}
    expected |= {f"optimizer.bias.{name}": value for name, value in plain.state[theirs.bias].items()}
    found = optimizer_tensors(mine)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 3.0, 5.0])
    groups = torch.tensor([7, -2, 7, 7, -2])
    mean, std = 4 / 3, ((1 / 9 + 16 / 9 + 25 / 9) / 2) ** 0.5
    expected = torch.tensor([(1 - mean) / std, 0.0, -mean / std, (3 - mean) / std, 0.0])
    torch.testing.assert_close(grpo_advantages(rewards, groups), expected, rtol=1e-5, atol=1e-6)
    plain = grpo_advantages(rewards, groups, normalize_std=False)
    torch.testing.assert_close(plain, expected * std, rtol=1e-6, atol=1e-6)


def test_equal_rewards_have_advantage_zero_exactly() -> None:
    advantages = grpo_advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long))
    assert torch.equal(advantages, torch.zeros(7))


def test_a_group_of_one_is_zero_with_a_warning() -> None:
    rewards, groups = torch.tensor([0.5, 1.0, 0.0]), torch.tensor([0, 1, 1])
    with pytest.warns(UserWarning, match="1 of 2 groups"):
        assert grpo_advantages(rewards, groups)[0] == 0.0
    assert grpo_advantages(rewards, groups, singleton="raw")[0] == 0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(BatchError, match=r"rewards\[1\]"):
        grpo_advantages(torch.tensor([0.0, bad]), torch.tensor([0, 0]))


def test_advantages_check_their_shapes() -> None:
    with pytest.raises(BatchError, match="both be"):
        grpo_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(BatchError, match="integers"):
        grpo_advantages(torch.zeros(2), torch.zeros(2))


def test_checkpoints_keep_the_newest_and_ignore_halves(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (8, 9, 10):
        checkpoints.save(step, {"value": torch.full((3,), float(step))}, {"a": step})
    assert [path.name for path in checkpoints.saved()] == ["step_00000009", "step_00000010"]
    half = tmp_path / ".partial-step_00000011"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step_00000012").mkdir()  # without its last file
    value = torch.zeros(3)
    checkpoints.load({"value": value})
    assert torch.equal(value, torch.full((3,), 10.0)) and checkpoints.facts() == {"a": 10}
    checkpoints.save(11, {"value": torch.full((3,), 11.0)}, {"a": 11})
    checkpoints.load({"value": value})
    assert torch.equal(value, torch.full((3,), 11.0)) and not half.exists()


def test_a_write_that_is_cut_off_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The system itself stops the write, as on a full disk: no file may grow beyond 20 kB."""
    resource = pytest.importorskip("resource")
    checkpoints = Checkpoints(tmp_path, keep=1)
    value = torch.ones(3)
    checkpoints.save(1, {"value": value}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RLLossError, match=r"step 2 cannot be written(.|\n)*File too large(.|\n)*--resume"):
            checkpoints.save(2, {"value": torch.zeros(9000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    found = torch.zeros(3)
    checkpoints.load({"value": found})
    assert torch.equal(found, value)
    with pytest.raises(RLLossError, match="cannot be read"):
        checkpoints.load({"another": found})


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "run.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_checkpoint_that_the_disk_has_changed_is_named(tmp_path: Path, name: str, damage: str) -> None:
    """One other bit in a file of tensors is another number, which torch reads without a word."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"value": torch.arange(4000.0)}, {"seed": 1})
    path = tmp_path / "step_00000001" / name
    before = path.read_bytes()
    middle = len(before) // 2
    changed = before[:middle] + bytes([before[middle] ^ 1]) + before[middle + 1 :]
    path.write_bytes({"flip": changed, "cut": before[:middle], "empty": b""}[damage])
    with pytest.raises(RLLossError, match=r"step_00000001 cannot be read(.|\n)*Remove that folder"):
        checkpoints.facts()
        checkpoints.load({"value": torch.zeros(4000)})


def test_a_checksum_is_that_of_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "BLOCK", 1000)
    data, path = bytes(range(250)) * 10, tmp_path / "file"
    path.write_bytes(data)
    assert checkpoint._sum(path) == zlib.crc32(data)
    for place in (0, 999, 1000, 2499):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        assert checkpoint._sum(path) != zlib.crc32(data)


def test_every_file_of_a_checkpoint_has_a_checksum(tmp_path: Path) -> None:
    Checkpoints(tmp_path, keep=1).save(1, {"value": torch.ones(3)}, {})
    folder = tmp_path / "step_00000001"
    sums = [name for path in folder.glob("sums_*") for name in json.loads(path.read_text())]
    assert sorted(sums) == sorted(path.name for path in folder.iterdir() if not path.name.startswith("sums_"))


def test_loading_from_nothing_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without --resume"):
        Checkpoints(tmp_path, keep=1).facts()


def test_random_states_come_back() -> None:
    numpy = pytest.importorskip("numpy")

    def draw() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    states = random_states()
    first = draw()
    assert draw() != first
    restore_random_states(states)
    assert draw() == first
