"""One optimiser step on two ranks is the step of one process: torchrun --nproc-per-node 2 examples/two_ranks.py.

Three steps in a row: each rank with sequences of its own under FSDP2, each sequence cut over both ranks, and the
vocabulary cut over both ranks. Without torchrun the file starts its two ranks itself.
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rlloss import GRPOLossConfig, LMHead, metrics

WORDS, WIDTH = 64, 16
config = GRPOLossConfig(policy_loss_cfg={"loss_type": "gspo"}, mode="chunk", loss_reduction="sample")


def sequence(seed: int, length: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Hidden states and batch of one sequence; its first three tokens are prompt."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, length, WIDTH, generator=generator)
    labels = torch.randint(0, WORDS, (1, length), generator=generator)
    labels[:, :3] = -100
    old = -4.0 + 0.1 * torch.randn(1, length, generator=generator)
    batch = {"shifted_labels": labels, "old_logprobs": old, "advantages": torch.tensor([1.0 - seed])}
    return hidden, {**batch, "num_tokens": torch.tensor([length])}


SEQUENCES = [sequence(0, 7), sequence(3, 12)]


def make_head() -> LMHead:
    torch.manual_seed(0)
    return LMHead(WIDTH, WORDS)


def one_process() -> tuple[float, torch.Tensor]:
    """Both sequences in one list of micro-batches, counted on each rank alone."""
    head, alone = make_head(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))["one"].get_group()
    contexts = [config.build(batch) for _, batch in SEQUENCES]
    contexts = config.loss_ctx_cls.build_batches(contexts, group=alone)
    losses = [head(hidden, context).loss for (hidden, _), context in zip(SEQUENCES, contexts, strict=True)]
    torch.stack(losses).sum().backward()
    return float(sum(losses).detach()), head.weight.grad


def data_parallel(rank: int) -> tuple[float, torch.Tensor]:
    """One sequence on each rank; FSDP2 averages the gradients, and the loss counts over both."""
    head = make_head()
    fully_shard(head, mesh=init_device_mesh("cpu", (2,)))
    head.set_unshard_in_backward(False)  # in chunk mode every gradient exists after forward
    hidden, batch = SEQUENCES[rank]
    (context,) = config.loss_ctx_cls.build_batches([config.build(batch)])
    output = head(hidden, context)
    output.loss.backward()
    assert metrics.reduce(output.extra)["sequences"] == 2, "metrics are those of both ranks"
    return float(output.loss.detach()), head.weight.grad.full_tensor()


def sequence_parallel(rank: int) -> tuple[float, torch.Tensor]:
    """Each sequence is cut over both ranks; labels are shifted already, so nothing crosses the cut."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))["sp"]
    head = make_head()
    contexts = [config.build(batch, sp_mesh=mesh) for _, batch in SEQUENCES]
    losses = []
    for (hidden, _), context in zip(SEQUENCES, config.loss_ctx_cls.build_batches(contexts), strict=True):
        width = context.loss_kwargs.shifted_labels.shape[1]
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, 2 * width - hidden.shape[1]))
        losses.append(head(padded[:, rank * width :][:, :width], context).loss)
    torch.stack(losses).sum().backward()
    dist.all_reduce(head.weight.grad)
    return float(sum(losses).detach()), head.weight.grad / 2


def vocabulary_parallel(rank: int) -> tuple[float, torch.Tensor]:
    """Each rank holds half of the words and sees every token, so only one of the two ranks is counted."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    weight = make_head().weight.detach().chunk(2)[rank].requires_grad_()
    contexts = [config.build(batch) for _, batch in SEQUENCES]
    contexts = config.loss_ctx_cls.build_batches(contexts, group=mesh["dp"].get_group())
    pairs = zip(SEQUENCES, contexts, strict=True)
    losses = [context.forward(hidden, weight, vocab_mesh=mesh["tp"]).loss for (hidden, _), context in pairs]
    torch.stack(losses).sum().backward()
    halves = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(halves, weight.grad)
    return float(sum(losses).detach()), torch.cat(halves)


def run() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    expected, gradient = one_process()
    for step in (data_parallel, sequence_parallel, vocabulary_parallel):
        loss, found = step(rank)
        gap = float((found - gradient).abs().max() / gradient.abs().max())
        if rank == 0:
            print(f"{step.__name__:>20}: loss {loss:+.6f} (one process {expected:+.6f}), gradients differ by {gap:.0e}")
        assert abs(loss - expected) < 1e-6 and gap < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        run()
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        print(done.stdout, end="")
        if done.returncode:
            sys.exit(done.stderr)
