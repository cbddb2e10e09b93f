"""Parameters that are whole on each rank, and the rows of them that each rank updates.

The rows of a parameter, entries of its first dim, are sharded as torch's `Shard(0)` does it:
ceil(rows/n) to each rank until none is left, so the last ranks may have fewer or none. Where the
first dim has fewer entries than there are ranks, as of stacked experts, the rows are those of a
later dim (`placements.own_rows`). A shard is a view of the parameter's own memory with all its
dims: `p.ndim >= 2`, by which many training scripts choose the parameters that decay, gives the same
for a shard as for the parameter.

For the fp32 master of a 16-bit parameter, each rank has its own rows of the master, and the whole
16-bit parameter that forward reads (`deal`). So has it where its rows lie in several pieces, since
torch's fused optimizers write a strided view as if it were contiguous (torch 2.13).

    scatter    gradients, whole, of a bucket    ->  their sums' own rows, added to `.grad` of shards
    gather     own rows, updated                ->  parameters, whole, bucket by bucket
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.planfile.placements import OwnRows, own_rows
from autopipe.runtime.parameters.buckets import (
    Bucket,
    buckets,
    by_group,
    strided_alike,
    summed_in,
)
from autopipe.sharding.collectives import in_rows
from autopipe.sharding.torch_names import all_gather_single, reduce_scatter_single


def deal(
    master: nn.Parameter, group: dist.ProcessGroup, read: torch.dtype, summed: torch.dtype
) -> tuple[nn.Parameter, nn.Parameter]:
    """Replace a whole parameter by one that forward reads, whole, and a rank's own rows.

    Args:
        master: the whole parameter; its memory is freed once nothing else holds it.
        group: the ranks over which it is sharded.
        read: the dtype that forward reads.
        summed: the dtype of gradients, until the optimizer gets them in the master's.
    """
    leaf = nn.Parameter(master.detach().to(read, copy=True))
    leaf.grad_dtype = summed
    return leaf, nn.Parameter(own_rows_of(master, group))


def own_rows_of(whole: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """A copy of the rows of a parameter that this rank of a group has."""
    rows = in_rows(whole.detach(), rows_of_this_rank(whole, group))
    return rows.clone(memory_format=torch.contiguous_format)


def rows_of_this_rank(whole: Tensor, group: dist.ProcessGroup) -> OwnRows:
    """The rows of a parameter that this rank of a group has."""
    return own_rows(whole.shape, dist.get_world_size(group), dist.get_rank(group))


def in_pieces(whole: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether a rank's rows of a parameter lie in several pieces of memory; the same on all ranks
    of a group."""
    rows = in_rows(whole.detach(), own_rows(whole.shape, dist.get_world_size(group), 0))
    return rows.stride() != torch.empty_like(rows, device="meta").stride()


class RowShards:
    """A rank's parameters, whole, and the shards of them that its optimizer updates.

    Args:
        parameters: this rank's, by name, in the model's order, which is the same on every rank.
        groups: the ranks over which each parameter is sharded; one without a group is its own
            shard.
        masters: this rank's rows of the masters of those parameters that `deal` has made, or of
            those that `zero3.in_shards` has.

    Attributes:
        rows: the rows that are this rank's, of each parameter that is sharded.
        shards: by name, a view of this rank's rows, its rows of a master, or a parameter of this
            rank alone, whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, dist.ProcessGroup],
        masters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.rows: dict[str, OwnRows] = {}
        self.shards = dict(parameters)
        self._parameters = parameters
        self._masters = masters or {}
        self._groups = groups
        self._of: dict[nn.Parameter, nn.Parameter] = {}
        self._views: set[str] = set()
        for name, parameter in parameters.items():
            if name not in groups or not (parameter.requires_grad or name in self._masters):
                continue
            own = self.rows[name] = rows_of_this_rank(parameter, groups[name])
            rows = self._masters.get(name)
            if rows is None:
                self._views.add(name)
                rows = nn.Parameter(in_rows(parameter.detach(), own))
            self.shards[name] = self._of[parameter] = rows

    @torch.no_grad()
    def gather(self) -> None:
        """Fetch the rows that the other ranks have updated; two buckets are held at a time.

        It always fetches: an update that bypasses the optimizer, by `.data`, cannot be noticed.
        """
        self._leave_views()
        ends: deque[Callable[[], None]] = deque()
        for group, names in by_group(self.rows, self._groups).items():
            for members in buckets(names, self._parameters, lambda parameter: parameter.dtype):
                parameters = tuple(self._parameters[name] for name in members)
                ends.append(self.fetch(Bucket(group, parameters), parameters))
                if len(ends) > 1:
                    ends.popleft()()
        while ends:
            ends.popleft()()

    def _leave_views(self) -> None:
        """Move whole parameters whose shards have been given another memory.

        kept, p.data = p.data, average      `kept` is a view of the whole, which is fetched into
        """
        for name in tuple(self._views):
            whole, shard = self._parameters[name], self.shards[name]
            if shard.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                whole.data = torch.empty_like(whole)
                self._views.discard(name)

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
                for target, source in same_elements(whole.detach(), column):
                    target.copy_(source)

        return fetch

    def scatter(self, bucket: Bucket) -> Callable[[], None]:
        """Begin to sum a bucket, to each rank its rows; the whole gradients are freed.

        The returned function waits, and adds the rows to the gradients of the shards.
        """
        table, columns = _table(bucket, summed_in(bucket.parameters[0]))
        table.zero_()  # a gradient may be missing
        for parameter, column in zip(bucket.parameters, columns, strict=True):
            if parameter.grad is not None:
                for source, target in same_elements(parameter.grad, column):
                    target.copy_(source)
            parameter.grad = None
        own = table.new_empty(table.shape[1])
        work = reduce_scatter_single(own, table.view(-1), group=bucket.group, async_op=True)
        assert work is not None

        def place() -> None:
            work.wait()
            shards = [self._of[parameter] for parameter in bucket.parameters]
            pieces = zip(shards, torch.split(own, _widths(bucket)), strict=True)
            every = [
                piece[: shard.numel()].view(shard.shape).to(shard.device, shard.dtype)
                for shard, piece in pieces
            ]
            for shard, rows in zip(shards, strided_alike(shards, every), strict=True):
                shard.grad = rows if shard.grad is None else shard.grad.add_(rows)

        return place


def _widths(bucket: Bucket) -> list[int]:
    """The number of elements of each parameter on the first rank, which has the most."""
    ranks = dist.get_world_size(bucket.group)
    return [own_rows(p.shape, ranks, 0).elements(p.shape) for p in bucket.parameters]


def share_bytes(bucket: Bucket) -> int:
    """Bytes of a rank's row in a table of a bucket's parameters: those of the first rank's rows."""
    return sum(_widths(bucket)) * bucket.parameters[0].element_size()


def _table(bucket: Bucket, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
    """Room for a row of each rank of the group, and the columns of each parameter in it."""
    widths = _widths(bucket)
    shape = dist.get_world_size(bucket.group), sum(widths)
    table = bucket.parameters[0].new_empty(shape, dtype=dtype)
    return table, torch.split(table, widths, dim=1)


def same_elements(whole: Tensor, column: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Pairs of views of the same elements: of a whole parameter, and of its columns in a table,
    which have a rank's elements in each row.

        whole    0 1 2 3 4 5 6 7            column  | 0 1 2 |
                 ----------- ---                    | 3 4 5 |
                 full rows   rest                   | 6 7 . |
    """
    whole = whole if whole.ndim else whole.view(1)
    first, shape = own_rows(whole.shape, len(column), 0), whole.shape
    if not whole.numel():
        return []
    dim, each = first.dim, first.length
    full, rest = divmod(shape[dim], each)
    before, behind = shape[:dim], shape[dim + 1 :]
    pairs = []
    if full:
        divided = whole.narrow(dim, 0, full * each).view(*before, full, each, *behind)
        pairs.append((divided.movedim(dim, 0), column[:full].view(full, *before, each, *behind)))
    if rest:
        last = whole.narrow(dim, full * each, rest)
        pairs.append((last, column[full, : last.numel()].view(*before, rest, *behind)))
    return pairs
