"""The batches of a run: all ranks agree on each one of the model file's before a step.

    batches(8)                   the same on every rank     a step, or left out with a word
    batches(8, shard, 2)         a part each    --told-->   a step, or left out with a word

A batch whose rows do not divide, usually the last one of an epoch, is left out. All shards end with
the shortest. The first batch is checked more closely: shards that are all equal, or each as large
as the whole batch, are a mistake that no later step would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.batch.description import count_rows
from autopipe.batch.digest import digest
from autopipe.batch.tree import Leaf, flatten
from autopipe.errors import ModelError
from autopipe.frontend.model_file import ModelFile
from autopipe.runtime.checkpoint.plain import fence, like, plain
from autopipe.runtime.step.pipe import Pipe
from autopipe.runtime.step.same_batch import check_all_ended
from autopipe.util.progress import phase
from autopipe.util.seeding import begin_beside_torch, go_to, places
from autopipe.util.seeding import seed as derive_seed

ENDED = -1
"""In the place of rows: there is no further batch."""

_END = object()

UNFIT = -2
"""In the place of rows: the batch is not what the plan was made for. `Pipe.step` says how."""


class Feed:
    """The batches that a run makes steps of; every rank iterates over one.

    Args:
        epochs: how often to go through the batches.
        say: takes a line of talk; called on rank 0.

    Attributes:
        given: the batches that were given out.
        left_out: the batches that were not, since their rows do not divide.
        steps_before: the run's steps by batches that this feed does not know.
    """

    def __init__(
        self, pipe: Pipe, file: ModelFile, epochs: int | None, say: Callable[[str], None]
    ) -> None:
        if epochs is not None and file.batches is None:
            raise ModelError(
                f"--epochs {epochs}: {file.source} has no batches, so there is no end to an epoch",
                hint=f"--steps {epochs}, or def batches(batch_size): ... in the file",
            )
        plan, place = pipe.plan, pipe.place
        self.given = self.left_out = self.steps_before = 0
        self._epoch_at = self._drawn = 0
        self._resumed: Mapping[str, Any] | None = None
        self._random = _random_states()
        self._iterable: Any = None
        self._pipe, self._file = pipe, file
        self._epochs = epochs or 1
        self._say = say if place.rank == 0 else lambda line: None
        self._rows = plan.batch.rows
        self._announced: set[tuple[int, ...]] = set()
        # Parts that each replica reads for itself may differ in number and rows.
        self._apart = file.sharded and plan.mesh.dp > 1
        self._world = dist.group.WORLD if len(plan.mesh.places) > 1 else None
        self._parts = plan.batch.micro_batches * (1 if file.sharded else plan.mesh.dp)

    @property
    def of(self) -> int | None:
        """An upper limit on the number of batches, if it is known."""
        return None if self._file.length is None else self._file.length * self._epochs

    def __iter__(self) -> Iterator[Any]:
        place, dp = self._pipe.place, self._pipe.plan.mesh.dp
        for epoch in range(self._epoch_at, self._epochs):
            self._epoch_at = epoch
            self._begin_epoch(epoch)
            self._iterable = self._file.iterable(self._rows, place.dp, dp)
            before = self.given - self._drawn  # of this epoch, in a run that this one goes on from
            stream = self._passed_over()
            yield from self._epoch(stream)
            self._epoch_at, self._drawn = epoch + 1, 0
            if epoch and self.given == before:
                raise ModelError(
                    f"{self._asking()} gave batches once only: epoch {epoch + 1} has none",
                    hint="return a list, a DataLoader or a new generator from each call",
                )

    def _begin_epoch(self, epoch: int) -> None:
        """Seed what `batches` may draw from, as a DataLoader that shuffles: alike on every rank.

        The pipe's seed is that of the run, also where a checkpoint had it.
        """
        run = self._pipe.seed
        own = derive_seed(run, "epoch", epoch) if epoch else run
        torch.manual_seed(own)
        begin_beside_torch(own)

    def position(self) -> dict[str, Any]:
        """Where the run stands in its batches, and the random states there, as JSON data.

        A `batches` that has a state_dict() is asked for it.
        """
        state = {
            "epoch": self._epoch_at,
            "drawn": self._drawn,
            "given": self.given,
            "left_out": self.left_out,
            "rows": self._rows,
            "random": plain([*_random_states()], "random"),
        }
        if hasattr(self._iterable, "load_state_dict"):
            state["batches"] = plain(self._iterable.state_dict(), "batches.state_dict()")
        return state

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Go on from where an earlier run stood; called before the first batch."""
        with fence("the position in the batches"):
            self._epoch_at, self._drawn = int(position["epoch"]), int(position["drawn"])
            self.given, self.left_out = int(position["given"]), int(position["left_out"])
            self._random = like(_random_states(), position["random"])
            rows = int(position.get("rows", self._rows))  # earlier versions do not say
        self._resumed = position
        asked = self._file.batches is not None and self._file.called and "batches" not in position
        if rows != self._rows and self._drawn and asked:
            change = "gives some rows twice" if rows > self._rows else "leaves some rows out"
            self._say(
                f"{self._asking()} goes on after {self._drawn} batches, as the checkpoint says; "
                f"but its batches had {rows} rows, so this {change}"
            )

    def _passed_over(self) -> Iterator[Any]:
        """The batches of an epoch from where the run stands in it."""
        place, dp, resumed = self._pipe.place, self._pipe.plan.mesh.dp, self._resumed
        stateful = hasattr(self._iterable, "load_state_dict") and resumed is not None
        if stateful and resumed is not None and "batches" in resumed:
            self._iterable.load_state_dict(like(self._iterable.state_dict(), resumed["batches"]))
            skip = 0
        else:
            skip = self._drawn
        stream = self._file.stream(self._rows, place.dp, dp, self._pipe.seed, self._iterable)
        with phase("passing over batches", of=skip) as done:
            for _ in islice(stream, skip):
                done()
        if resumed is not None:
            _set_random_states(self._random)
        self._resumed = None
        return stream

    def report_end(self, steps: int | None) -> None:
        """Say so if the batches have ended before the wanted number of steps."""
        if self.left_out > 1:
            self._say(f"{self._asking()}: {self.left_out} batches were left out in all")
        if steps is None or self.given + self.steps_before >= steps or not self.given:
            return
        epochs = -(-steps * self._epochs // self.given)
        self._say(
            f"{self._asking()} ended after {self.given} of {steps} steps; "
            f"--epochs {epochs} goes through them {epochs} times"
        )

    def _epoch(self, stream: Iterator[Any]) -> Iterator[Any]:
        while True:
            batch = next(stream, _END)
            self._drawn += batch is not _END
            rows = self._rows_of(batch)
            found = self._all([rows])[:, 0].tolist() if self._apart else [rows]
            if batch is _END and not (self._apart and ENDED in found):
                check_all_ended(self._pipe.plan, self._world)
            if ENDED in found:
                if set(found) != {ENDED}:
                    ended = found.index(ENDED)
                    self._say(
                        f"{self._asking(ended)} ended after {self.given} batches, and other shards "
                        "have more: they are left out"
                    )
                return
            if UNFIT not in found:
                if not self.given and not self.left_out:
                    self._check_first(batch, rows)
                elif len(set(found)) > 1 or rows % self._parts:
                    self._leave_out(found)
                    continue
            self.given += 1
            yield batch

    def _rows_of(self, batch: Any) -> int:
        if batch is _END:
            return ENDED
        try:
            return count_rows(self._pipe.plan.inputs, flatten(batch))
        except ModelError:
            return UNFIT

    def _leave_out(self, found: list[int]) -> None:
        self.left_out += 1
        if tuple(found) in self._announced:
            return
        self._announced.add(tuple(found))
        micro_batches, dp = self._pipe.plan.batch.micro_batches, self._pipe.plan.mesh.dp
        into = f"{micro_batches} micro-batches" + (f" on each of {dp} replicas" if dp > 1 else "")
        has = f"{found[0]} rows"
        if len(set(found)) > 1:
            has = f"{', '.join(map(str, found))} rows in its shards"
        self._say(
            f"{self._asking()}: a batch of {has} is left out, which do not divide into {into}"
        )

    def _check_first(self, batch: Any, rows: int) -> None:
        """Refuse wrong shards; say so if batches have another number of rows than the plan.

        Raises:
            ModelError: two shards are alike, or each is as large as the batch.
        """
        dp = self._pipe.plan.mesh.dp
        if self._apart:
            leaves = flatten(batch)
            varied = any(_varied(leaf) for leaf in leaves.values())
            marks = self._all([digest(leaves), varied]).tolist()
            for shard, (mark, is_varied) in enumerate(marks):
                twin = next((n for n in range(shard) if marks[n][0] == mark and is_varied), None)
                if twin is not None:
                    first, second = self._asking(twin), self._asking(shard, short=True)
                    raise ModelError(
                        f"{first} and {second} gave the same first batch: replicas would train on "
                        "the same rows",
                        hint="give each shard rows of its own, as batch[shard::num_shards], or "
                        "leave the two arguments out: each replica then takes its rows of a batch",
                    )
            if rows == self._rows and rows != self._rows // dp:
                raise ModelError(
                    f"{self._asking(0)} gave {rows} rows, as many as the whole batch has; a shard "
                    f"has {self._rows // dp} of them",
                    hint="batch_size is of all shards together: batch_size // num_shards rows each",
                )
        all_rows = rows * dp if self._file.sharded else rows
        if all_rows != self._rows and not rows % self._parts:
            self._say(
                f"{self._asking()} gives batches of {all_rows} rows, and the plan is for "
                f"{self._rows}: its seconds and bytes are not those of this run"
            )

    def _all(self, numbers: list[int]) -> Tensor:
        """The values of all shards; every rank calls it."""
        mesh = self._pipe.plan.mesh
        own_tensor = torch.tensor(numbers, device="cpu")
        gathered = list(own_tensor.new_empty(len(mesh.places), len(numbers)))
        dist.all_gather(gathered, own_tensor)
        return torch.stack([gathered[mesh.rank(0, dp)] for dp in range(mesh.dp)])

    def _asking(self, shard: int | None = None, *, short: bool = False) -> str:
        dp = self._pipe.plan.mesh.dp
        asked = self._file.asking(self._rows, shard, dp)
        return asked if short else f"{self._file.source}: {asked}"


def _random_states() -> tuple[Any, Tensor, Any]:
    """The states of the generators that a `batches` may draw from: Python's, torch's, and numpy's
    if it is loaded; as data for a checkpoint."""
    python, numpy = places()
    if numpy is not None:
        kind, keys, *rest = numpy
        numpy = (kind, keys.tolist(), *rest)
    return python, torch.get_rng_state(), numpy


def _set_random_states(states: Sequence[Any]) -> None:
    """Restore such states; a checkpoint of an earlier version may lack numpy's."""
    with fence("the random state"):
        python, of_torch, numpy = (*states, None)[:3]
        go_to((python, numpy))
        torch.set_rng_state(of_torch)


def _varied(leaf: Leaf) -> bool:
    """Whether a tensor has different entries; equal shards of a constant are no mistake."""
    return isinstance(leaf, Tensor) and leaf.numel() > 1 and bool((leaf != leaf.flatten()[0]).any())
