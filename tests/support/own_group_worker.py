"""A script that opens a process group for tensors on GPUs alone, as many open one of NCCL's.

Started by `warm.spawn`, once per rank; there is no GPU, and the group stands for NCCL's in that it
takes no tensor in host memory:

    python own_group_worker.py FOLDER      FOLDER/plan.json; FOLDER/trained.0: empty, all went well
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopipe
from autopipe import Plan
from tests.support.pipes import close

Batch = dict[str, Tensor]


def inputs(rows: int) -> Batch:
    x = torch.arange(4.0 * rows).reshape(rows, 4)
    return {"input": x.sin(), "target": x.cos()}


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(outputs, batch["target"])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _for_gpus(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def main(folder: Path) -> None:
    dist.Backend.register_backend("for_gpus", _for_gpus, devices=["cuda"])
    dist.init_process_group("for_gpus")
    pipe = autopipe.parallelize(model(), Plan.load(folder / "plan.json"), loss=loss)
    plain, batch = model(), inputs(8)
    expected = loss(plain(batch["input"]), batch)
    expected.backward()
    close(pipe.step(batch), expected, "loss")
    for name, parameter in pipe.named_parameters():
        gradient = plain.get_parameter(name).grad
        assert parameter.grad is not None and gradient is not None
        close(parameter.grad, gradient, name)
    close(pipe.clip_grad_norm_(1.0), nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    dist.destroy_process_group()
    (folder / f"trained.{pipe.place.rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
