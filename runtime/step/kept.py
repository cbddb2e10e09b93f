"""Save a pipe's model, as a state dict or a file, and save and load checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.errors import AutopipeError, CheckpointError
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.runtime.checkpoint.checkpoints import KEEP, Checkpoints, Loaded
from autopipe.runtime.checkpoint.content import Content
from autopipe.runtime.checkpoint.layout import own_tensors
from autopipe.runtime.checkpoint.plain import fence
from autopipe.runtime.launch.watchdog import Watchdog
from autopipe.runtime.parameters.gradient_sum import Gradients
from autopipe.runtime.parameters.loss_scale import LossScale
from autopipe.runtime.parameters.model_states import ModelStates
from autopipe.runtime.script.given_states import GivenStates, PartOfStates, PassedOver, told_to_have
from autopipe.runtime.step.prepare import Rank
from autopipe.runtime.step.same_batch import check_same_call
from autopipe.sharding import collectives
from autopipe.util import atomic_file
from autopipe.util.progress import Say


class Kept:
    """The half of a `Pipe` that is kept on a disk, or given away."""

    plan: Plan
    place: Place
    steps: int
    seed: int
    loss_scale: LossScale | None
    _rank: Rank
    _own: ModelStates
    _gradients: Gradients
    _world: dist.ProcessGroup | None
    _resumed: bool
    _watchdog: Watchdog

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank's optimizer updates, under the model's own names: whole, or
        under ZeRO this rank's shards of them.
        """
        yield from self._gradients.shards().items()

    def _attach(self) -> None:
        """Let collectives find this pipe's tensor-parallel ranks; another pipe of this process may
        have come since."""
        axis = self._rank.part.axis
        if axis is not None:
            collectives.attach(collectives.TENSOR_PARALLEL, axis)

    def _meet(self, call: str) -> None:
        """Return when all ranks are at this call; the watchdog knows that this one waits.

        Raises:
            LaunchError: they are at different ones.
        """
        self._attach()
        with self._watchdog.at(self.steps - 1):
            check_same_call(call, self.plan, self._world)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse `copy.deepcopy`, as of a mean of weights, and pickle."""
        raise AutopipeError(
            "a pipe cannot be copied or pickled: it has connections to the other ranks",
            hint="copy its values, {n: p.detach().clone() for n, p in pipe.named_parameters()}; "
            "pipe.save(folder) writes a checkpoint",
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse `pipe(x)`, as a module is called."""
        raise AutopipeError(
            "a pipe is not called as a module: its ranks compute forward and backward together",
            hint="loss = pipe.step(batch) trains, and leaves gradients; loss, outputs = "
            "pipe.evaluate(batch, outputs=True) is forward alone",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers; all ranks' together are the model's.

        A tied tensor has all its names; rank 0 also has tensors that forward does not use. Where
        ranks have parts, every rank calls it: tensors that are sharded over tensor-parallel ranks,
        or under ZeRO-1 and 2, are gathered first, and of a pipeline's each rank gives its stages'.
        `torch.save` warns that such a dict is a part; `save` writes the whole model. Under ZeRO-3
        parameters are DTensors, of which each rank has its part. Parameters that forward reads in
        16 bits are given as their fp32 masters.
        """
        if self.plan.parted or self.plan.zero:
            self._meet("state_dict")
        self._gradients.gather()
        own = self._own.state_dict(self._gradients.master)
        of, ranks = self._own.count_in_state_dict(), len(self.plan.mesh.places)
        told = told_to_have(own, of, self.place.rank, ranks)
        return own if told is None else PartOfStates(own, told)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> PassedOver:
        """Copy values into this rank's parameters, their masters and its buffers; every rank calls
        it, and changes its tensors only if no rank has an error.

        Args:
            state_dict: the whole model's, of which this rank takes its own part; or what this
                rank's `state_dict` gave.
            strict: refuse names that the model has not, and tensors of this rank that are missing.

        Returns:
            Without `strict`, these names.

        Raises:
            ModelError: a tensor has another shape than the model's, or other values than on another
                rank that has it too; or, with `strict`, the names are not the model's.
        """
        self._meet("load_state_dict")
        given = GivenStates(self._own, self._gradients.rows, self.plan, self.place, self._world)
        passed_over = given.taken(self.content().own, state_dict, strict=strict)
        self._own.masks.clear()
        self._resumed = True
        return passed_over

    def save(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> None:
        """Write the whole model as FILE.safetensors, or a checkpoint into a folder.

        Every rank calls it. `model.load_state_dict(safetensors.torch.load_file(path))` takes the
        file, which rank 0 writes; no rank holds more than one tensor beside its own. A checkpoint,
        `path/step-00000020`, also has the state of `optimizer` and `scheduler` and can be loaded
        under any other plan; each rank writes its own part. Either is there whole or not at all,
        and for every rank to read when the call returns.

        Raises:
            AutopipeError: the file or the folder cannot be written.
        """
        self._meet("save")
        path = Path(path)
        with self._watchdog.at(self.steps - 1):  # a rank that writes is not late
            if path.is_dir() or not path.suffix:
                saving = self.checkpoints(path)
                saving.begin(self.content(optimizer, scheduler), self.steps, self.values())
                saving.close()
            else:
                atomic_file.check_model(path)
                self._gradients.gather()
                self._own.save(path, self.place, self._world, self._gradients.master)
        # A rank that has written its part waits for rank 0, which writes last: all may read it now.
        self._meet("save")

    def load(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> int:
        """Go on from a checkpoint, made under this plan or any other; every rank calls it.

        Args:
            path: the folder given to `save`, of which the newest whole checkpoint is taken, or the
                folder of one checkpoint in it.
            optimizer, scheduler: made like those that were saved; their state is loaded in place,
                but for an optimizer's plain attributes, as by its own `load_state_dict`. An
                optimizer without the schedule that was saved with it is warned of.

        Returns:
            The number of steps after which the checkpoint was saved.

        Raises:
            CheckpointError: there is no whole checkpoint, or it is of another model or optimizer.
        """
        self._meet("load")
        loaded = self.checkpoints(Path(path)).load(self.content(optimizer, scheduler))
        if loaded is None:
            raise CheckpointError(f"{path} has no checkpoint", hint="pipe.save(folder) makes one")
        if optimizer is not None and scheduler is None and loaded.schedule and not self.place.rank:
            warnings.warn(
                f"{loaded.folder} has the state of {loaded.schedule}, which is not loaded: "
                "pipe.load(path, optimizer, scheduler)",
                stacklevel=2,
            )
        self.resume(loaded)
        return self.steps

    def checkpoints(self, folder: Path, keep: int = KEEP, say: Say | None = None) -> Checkpoints:
        """The checkpoints of a run in a folder; every rank calls it."""
        return Checkpoints(folder, self.plan, self.place, self._world, keep=keep, say=say)

    def content(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> Content:
        """This rank's tensors and states, to save or to load into."""
        own = own_tensors(self._rank.part, self._own, self._rank.held)
        names = {name for name in self._own.specs if self._own.in_checkpoint(name)}
        return Content(own, names, dict(self.named_parameters()), optimizer, scheduler)

    def values(self) -> dict[str, Any]:
        """The values of this pipe in a checkpoint that are no tensors."""
        scale = self.loss_scale.state_dict() if self.loss_scale is not None else None
        shard = [self.place.dp, self.plan.mesh.dp]
        return {"seed": self.seed, "loss_scale": scale, "shard": shard}

    def resume(self, loaded: Loaded) -> None:
        """Take over steps, seed and loss scale of a checkpoint whose tensors were loaded."""
        self._resumed = True
        self._own.masks.clear()
        with fence(f"{loaded.folder}: the state of the run"):
            self.steps, self.seed = loaded.step, int(loaded.values["seed"])
            if self.loss_scale is not None and loaded.values["loss_scale"] is not None:
                self.loss_scale.load_state_dict(loaded.values["loss_scale"])
