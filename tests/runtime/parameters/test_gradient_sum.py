"""One sum per parameter and step, in buckets; ranks that disagree on None would wait for ever.

Sums over several ranks are told in `gradient_stories`.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopipe import ScheduleError
from autopipe.runtime.parameters import buckets, gradient_sum
from autopipe.runtime.parameters.gradient_sum import Bucket, GradientSum, all_reduce, total_norm
from tests.support.zero_told import Stories


class TestStories(Stories):
    file = "gradients"


# A world of one, in this process: what begins when.


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """All ranks of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


class Doubled:
    """Sums as if another rank had the same; notes the numbers that go in."""

    def __init__(self) -> None:
        self.begun: list[list[float]] = []

    def __call__(self, bucket: Bucket) -> Callable[[], object]:
        end = all_reduce(bucket)
        found = [p.grad for p in bucket.parameters if p.grad is not None]
        self.begun.append([float(number) for grad in found for number in grad.flatten()])
        for grad in found:
            grad.mul_(2)
        return end


def parameter(*values: float, grad: bool = True) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=torch.float32))
    made.grad = made.detach().clone() if grad else None
    return made


def test_in_reverse_order(group: dist.ProcessGroup) -> None:
    """Backward comes to the last parameter first."""
    first, last, alone = parameter(1, 1), parameter(2), parameter(3)
    doubled = Doubled()
    made = {"first": first, "alone": alone, "last": last}
    GradientSum(made, {"first": group, "last": group}, {}, doubled).finish()
    assert doubled.begun == [[2, 1, 1]]
    assert [p.grad.tolist() for p in (first, last, alone) if p.grad is not None] == [
        [2, 2],
        [4],
        [3],
    ]


def test_gradients_in_host_memory_are_summed_where_the_group_sends_from(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: NCCL was given the rows that ZeRO-3 keeps in host memory. Here another device stands for
    the GPU, and then a copy for what is on it."""
    own = torch.ones(2)
    assert buckets.on_group(own, group) is own
    with monkeypatch.context() as patched:
        patched.setattr(dist, "get_backend_config", lambda group: "meta:nccl")
        assert buckets.on_group(own, group).device.type == "meta"
    monkeypatch.setattr(gradient_sum, "on_group", lambda tensor, group: 2 * tensor)
    alone = parameter(1, 2)
    GradientSum({"alone": alone}, {"alone": group}, {}).finish()
    assert alone.grad is not None and alone.grad.tolist() == [2, 4]


def test_buckets(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8 bytes; a larger gradient has a bucket for itself."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8)
    made = {
        name: parameter(*[float(size)] * size)
        for name, size in zip("abcd", (1, 5, 1, 1), strict=True)
    }
    doubled = Doubled()
    GradientSum(made, dict.fromkeys(made, group), {}, doubled).finish()
    assert doubled.begun == [[1, 1], [5] * 5, [1]]


def test_a_bucket_has_one_dtype(group: dist.ProcessGroup) -> None:
    """Dtypes that alternate do not make for many small buckets."""
    made = {name: parameter(1) for name in "abcd"}
    for name in "bd":
        made[name] = nn.Parameter(torch.ones(2, dtype=torch.float16))
        made[name].grad = torch.ones_like(made[name])
    doubled = Doubled()
    GradientSum(made, dict.fromkeys(made, group), {}, doubled).finish()
    assert doubled.begun == [[1, 1, 1, 1], [1, 1]]
    assert made["b"].grad is not None and made["b"].grad.dtype is torch.float16


def test_a_transposed_gradient(group: dist.ProcessGroup) -> None:
    """Its entries go by their places, whatever the strides: ranks may differ in layout."""
    made = nn.Parameter(torch.zeros(2, 2))
    made.grad = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()
    doubled = Doubled()
    GradientSum({"a": made}, {"a": group}, {}, doubled).finish()
    assert doubled.begun == [[1, 2, 3, 4]]
    assert made.grad.tolist() == [[2, 4], [6, 8]]


def test_a_gradient_of_a_transposed_parameter_lies_as_that_does(group: dist.ProcessGroup) -> None:
    """Bug: torch's fused optimizers took each of its entries for that of another place."""
    made = {"a": nn.Parameter(torch.zeros(3, 2).t()), "b": parameter(5)}
    made["a"].grad = torch.arange(6.0).view(2, 3)
    sums = GradientSum(made, dict.fromkeys(made, group), {})
    sums.finish()
    found = [p.grad for p in made.values() if p.grad is not None]
    assert [one.tolist() for one in found] == [[[0, 1, 2], [3, 4, 5]], [5]]
    assert found[0].stride() == made["a"].stride()
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in found)  # no bucket behind it


def backward(*made: nn.Parameter) -> None:
    torch.stack([parameter.sum() for parameter in made]).sum().backward()


def test_of_two_stages_the_last_to_finish(group: dist.ProcessGroup) -> None:
    """Stage 1 is through while stage 0 still has micro-batches: only their last is final."""
    shared, own = parameter(0, grad=False), parameter(0, grad=False)
    doubled = Doubled()
    made = {"shared": shared, "own": own}
    sums = GradientSum(made, dict.fromkeys(made, group), {0: ["shared"], 1: made}, doubled)
    backward(shared, own)
    sums.finish()
    doubled.begun.clear()
    shared.grad = own.grad = None
    sums.arm(1)
    backward(shared, own)  # 1B1
    backward(shared)  # 0B0
    assert doubled.begun == []
    sums.arm(0)
    backward(shared)  # 0B1
    assert doubled.begun == [[1, 3]]
    sums.finish()
    assert shared.grad is not None and shared.grad.tolist() == [6]


def test_nothing_begins_unless_armed(group: dist.ProcessGroup) -> None:
    made, doubled = parameter(0, grad=False), Doubled()
    sums = GradientSum({"a": made}, {"a": group}, {0: ["a"]}, doubled)
    for number in range(1, 3):
        made.grad = None
        backward(made)
        backward(made)
        assert len(doubled.begun) == number - 1
        sums.finish()
        assert doubled.begun[-1] == [2]


def test_a_gradient_that_comes_too_late(group: dist.ProcessGroup) -> None:
    """A REDUCE before the last backward but one: the sum is under way, and would be wrong."""
    made = parameter(0, grad=False)
    sums = GradientSum({"wte": made}, {"wte": group}, {0: ["wte"]})
    backward(made)
    sums.finish()
    made.grad = None
    sums.arm(0)
    backward(made)
    with pytest.raises(ScheduleError, match="gradient of wte was added to after its sum"):
        backward(made)


def test_a_gradient_that_never_came_before(group: dist.ProcessGroup) -> None:
    """Other ranks have not learnt of it, and would not take part in its sum."""
    made, other = parameter(0, grad=False), parameter(0)
    sums = GradientSum({"a": made, "b": other}, {"a": group, "b": group}, {0: ["a", "b"]})
    sums.finish()
    backward(made)
    with pytest.raises(ScheduleError, match="parameter a has got a gradient in this step"):
        sums.finish()


def test_one_rank_alone() -> None:
    """No group, no sums; all gradients are its own."""
    made, without = parameter(3, 4), parameter(1, grad=False)
    sums = GradientSum({"a": made, "b": without}, {}, {0: ["a", "b"]})
    sums.arm(0)
    sums.finish()
    owned = list(sums.owned_gradients().values())
    assert [grad.tolist() for grad in owned] == [[3, 4]]
    assert total_norm(owned, None, torch.device("cpu")) == 5
    assert total_norm([], None, torch.device("cpu")) == 0
    # Bug: the square of a rank's norm was infinite, and each gradient was multiplied by 0.
    assert total_norm([torch.tensor([5e30])], None, torch.device("cpu")).isfinite()
