"""Parameters that are whole on each rank, and the rows of them that each rank updates.

The rows of a parameter (its first dim) are sharded as torch's `Shard(0)` does it: ceil(rows/n)
to each rank until none is left, so the last ranks may have fewer or none. A shard is a view of the
parameter's own memory with all its dims: `p.ndim >= 2`, by which many training scripts choose the
parameters that decay, gives the same for a shard as for the parameter.

For the fp32 master of a 16-bit parameter, each rank has its own rows of the master, and the whole
16-bit parameter that forward reads (`deal`).

    scatter    gradients, whole, of a bucket    ->  their sums' own rows, added to `.grad` of shards
    gather     own rows, updated                ->  parameters, whole, bucket by bucket
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.runtime.parameters.buckets import Bucket, buckets, by_group, summed_in
from autopipe.sharding.torch_names import all_gather_single, reduce_scatter_single


def own_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows [first, last) of `rows` that `rank` has.

    >>> [own_rows(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def deal(
    master: nn.Parameter, group: dist.ProcessGroup, read: torch.dtype, summed: torch.dtype
) -> tuple[nn.Parameter, nn.Parameter]:
    """Replace a whole master by the parameter that forward reads, whole, and a rank's own rows.

    Args:
        master: the whole master; its memory is freed once nothing else holds it.
        group: the ranks over which it is sharded.
        read: the dtype that forward reads.
        summed: the dtype of gradients, until the optimizer gets them in the master's.
    """
    leaf = nn.Parameter(master.detach().to(read))
    leaf.grad_dtype = summed
    return leaf, nn.Parameter(own_rows_of(master, group))


def own_rows_of(whole: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """A copy of the rows of a parameter that this rank of a group has."""
    rows = _in_rows(whole)
    first, last = own_rows(rows.shape[0], dist.get_world_size(group), dist.get_rank(group))
    return rows[first:last].clone(memory_format=torch.contiguous_format)


class RowShards:
    """A rank's parameters, whole, and the shards of them that its optimizer updates.

    Args:
        parameters: this rank's, by name, in the model's order, which is the same on every rank.
        groups: the ranks over which each parameter is sharded; one without a group is its own
            shard.
        masters: this rank's rows of the masters of those parameters that `deal` has made, or of
            those that `zero3.in_shards` has.

    Attributes:
        rows: the rows [first, last) that are this rank's, of each parameter that is sharded.
        shards: by name, a view of this rank's rows, its rows of a master, or a parameter of this
            rank alone, whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, dist.ProcessGroup],
        masters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.rows: dict[str, tuple[int, int]] = {}
        self.shards = dict(parameters)
        self._parameters = parameters
        self._masters = masters or {}
        self._groups = groups
        self._of: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in parameters.items():
            if name not in groups or not (parameter.requires_grad or name in self._masters):
                continue
            group = groups[name]
            whole = _in_rows(parameter)
            place = dist.get_world_size(group), dist.get_rank(group)
            first, last = self.rows[name] = own_rows(whole.shape[0], *place)
            rows = self._masters.get(name)
            shard = nn.Parameter(whole[first:last]) if rows is None else rows
            self.shards[name] = self._of[parameter] = shard

    @torch.no_grad()
    def gather(self) -> None:
        """Fetch the rows that the other ranks have updated; two buckets are held at a time.

        It always fetches: an update that bypasses the optimizer, by `.data`, cannot be noticed.
        """
        ends: deque[Callable[[], None]] = deque()
        for group, names in by_group(self.rows, self._groups).items():
            for members in buckets(names, self._parameters, lambda parameter: parameter.dtype):
                parameters = tuple(self._parameters[name] for name in members)
                ends.append(self.fetch(Bucket(group, parameters), parameters))
                if len(ends) > 1:
                    ends.popleft()()
        while ends:
            ends.popleft()()

    @torch.no_grad()
    def master(self, name: str) -> Tensor | None:
        """All of a master; every rank that has rows of it calls this. None: there is none."""
        if name not in self._masters:
            return None
        parameter, rows = self._parameters[name], self._masters[name]
        whole = torch.empty_like(parameter, dtype=rows.dtype, requires_grad=False)
        self.fetch(Bucket(self._groups[name], (parameter,)), [whole])()
        return whole

    def fetch(self, bucket: Bucket, into: Sequence[Tensor]) -> Callable[[], None]:
        """Begin to gather the shards of a bucket; the returned function fills `into`, whole."""
        table, columns = _table(bucket, into[0].dtype)
        own = table.new_empty(table.shape[1])  # entries behind a rank's rows are never read
        for parameter, piece in zip(
            bucket.parameters, torch.split(own, _widths(bucket)), strict=True
        ):
            shard = self._of[parameter]
            piece[: shard.numel()].copy_(shard.reshape(-1))
        work = all_gather_single(table.view(-1), own, group=bucket.group, async_op=True)
        assert work is not None

        def fetch() -> None:
            work.wait()
            for whole, column in zip(into, columns, strict=True):
                if whole.is_contiguous():
                    flat = whole.detach().view(-1)
                else:
                    flat = whole.new_empty(whole.numel())
                for target, source in same_elements(flat, column):
                    target.copy_(source)
                if not whole.is_contiguous():
                    whole.copy_(flat.view(whole.shape))

        return fetch

    def scatter(self, bucket: Bucket) -> Callable[[], None]:
        """Begin to sum a bucket, to each rank its rows; the whole gradients are freed.

        The returned function waits, and adds the rows to the gradients of the shards.
        """
        table, columns = _table(bucket, summed_in(bucket.parameters[0]))
        table.zero_()  # a gradient may be missing
        for parameter, column in zip(bucket.parameters, columns, strict=True):
            if parameter.grad is not None:
                for source, target in same_elements(parameter.grad.reshape(-1), column):
                    target.copy_(source)
            parameter.grad = None
        own = table.new_empty(table.shape[1])
        work = reduce_scatter_single(own, table.view(-1), group=bucket.group, async_op=True)
        assert work is not None

        def place() -> None:
            work.wait()
            for parameter, piece in zip(
                bucket.parameters, torch.split(own, _widths(bucket)), strict=True
            ):
                shard = self._of[parameter]
                rows = piece[: shard.numel()].view(shard.shape).to(shard.device, shard.dtype)
                shard.grad = rows if shard.grad is None else shard.grad.add_(rows)

        return place


def _in_rows(parameter: nn.Parameter) -> Tensor:
    """A parameter with at least one dim; the same memory."""
    return parameter.detach() if parameter.ndim else parameter.detach().view(1)


def _widths(bucket: Bucket) -> list[int]:
    """The number of elements of each parameter on the first rank, which has the most."""
    ranks = dist.get_world_size(bucket.group)
    shapes = [_in_rows(parameter).shape for parameter in bucket.parameters]
    return [own_rows(shape[0], ranks, 0)[1] * shape[1:].numel() for shape in shapes]


def share_bytes(bucket: Bucket) -> int:
    """Bytes of a rank's row in a table of a bucket's parameters: those of the first rank's rows."""
    return sum(_widths(bucket)) * bucket.parameters[0].element_size()


def _table(bucket: Bucket, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
    """Room for a row of each rank of the group, and the columns of each parameter in it."""
    widths = _widths(bucket)
    shape = dist.get_world_size(bucket.group), sum(widths)
    table = bucket.parameters[0].new_empty(shape, dtype=dtype)
    return table, torch.split(table, widths, dim=1)


def same_elements(flat: Tensor, column: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views of the same elements: of a whole parameter, flat, and of its columns in a
    table, which have a rank's elements in each row.

        flat     0 1 2 3 4 5 6 7            column  | 0 1 2 |
                 ----------- ---                    | 3 4 5 |
                 full rows   rest                   | 6 7 . |
    """
    width = column.shape[1]
    full = flat.numel() // width if width else 0
    rest = flat[full * width :]
    pairs = [(flat[: full * width].view(full, width), column[:full])]
    return [*pairs, (rest, column[full, : rest.numel()])] if rest.numel() else pairs
