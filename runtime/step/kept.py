"""Save a pipe's model, as a state dict or a file, and save and load checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from autopipe.errors import AutopipeError, CheckpointError, ModelError
from autopipe.frontend import batch as batches
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.runtime.checkpoint.checkpoints import KEEP, Checkpoints, Loaded
from autopipe.runtime.checkpoint.content import Content
from autopipe.runtime.checkpoint.layout import BESIDE, OwnTensor, own_tensors
from autopipe.runtime.checkpoint.plain import fence
from autopipe.runtime.parameters.gradient_sum import Gradients
from autopipe.runtime.parameters.loss_scale import LossScale
from autopipe.runtime.parameters.model_states import ModelStates, in_state_dict
from autopipe.runtime.step.prepare import Rank
from autopipe.runtime.step.same_batch import check_same_call
from autopipe.util import atomic_file
from autopipe.util.progress import Say

_IN_FRONT = ("module.", "_orig_mod.", "model.")
"""What wrappers put in front of a model's names."""


class PassedOver(NamedTuple):
    """What `load_state_dict(..., strict=False)` has passed over, named as torch's own does."""

    missing_keys: list[str]
    unexpected_keys: list[str]


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

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank's optimizer updates, under the model's own names: whole, or
        under ZeRO this rank's shards of them.
        """
        yield from self._gradients.shards().items()

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

        A tied tensor has all its names; rank 0 also has tensors that forward does not use. Every
        rank calls it: tensors that are sharded over tensor-parallel ranks, or under ZeRO-1 and 2,
        are gathered first. Under ZeRO-3 parameters are DTensors, of which each rank has its part.
        Parameters that forward reads in 16 bits are given as their fp32 masters.
        """
        if self.plan.mesh.tp > 1 or self.plan.zero:
            check_same_call("state_dict", self.plan, self._world)
        self._gradients.gather()
        return self._own.state_dict(self._gradients.master)

    @torch.no_grad()
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
        check_same_call("load_state_dict", self.plan, self._world)
        own, taken, passed_over = self.content().own, dict[str, Tensor](), PassedOver([], [])
        error: ModelError | None = None
        try:
            taken, passed_over = self._taken(own, state_dict)
            if strict:
                self._check_names(state_dict, passed_over)
        except ModelError as raised:
            error = raised
        marks = {
            name: batches.fingerprint({name: given})
            for name, given in taken.items()
            if name not in self._own.written and not isinstance(given, DTensor)
        }
        self._agreed(error, marks)
        for name, given in taken.items():
            if isinstance(given, DTensor):
                own[name].tensor.copy_(given.to_local())
            else:
                own[name].take(given)
        self._own.masks.clear()
        self._resumed = True
        return passed_over

    def _taken(
        self, own: Mapping[str, OwnTensor], given: Any
    ) -> tuple[dict[str, Tensor], PassedOver]:
        """The given tensor for each of this rank's, by the name in the graph; and what is left out.

        Raises:
            ModelError: they are no mapping, or one is no tensor of the model's shape.
        """
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise ModelError(f"load_state_dict takes tensors by name, and was given a {kind}")
        specs = self._own.specs.items()
        known = {n for name, spec in specs if in_state_dict(spec) for n in (name, *spec.aliases)}
        taken, missing = dict[str, Tensor](), list[str]()
        for name, mine in own.items():
            if mine.kind == BESIDE:
                continue
            names = [each for each in (name, *mine.aliases) if each in given]
            if not names:
                missing.append(name)
                continue
            for each in names:
                self._check_one(each, given[each], mine)
            taken[name] = given[names[0]]
            for each in names[1:]:
                if not _equal(given[names[0]], given[each]):
                    raise ModelError(
                        f"the state dict has other values for {each!r} than for {names[0]!r}, and "
                        "the model has one tensor for both"
                    )
        return taken, PassedOver(missing, [key for key in given if key not in known])

    def _check_one(self, name: str, given: Any, mine: OwnTensor) -> None:
        if not isinstance(given, Tensor):
            raise ModelError(f"the state dict has a {type(given).__name__} in {name!r}, no tensor")
        if given.is_meta:
            raise ModelError(f"the state dict's {name!r} is on the meta device: it has no values")
        if tuple(given.shape) != mine.shape:
            raise ModelError(
                f"the state dict's {name!r} has the shape {list(given.shape)}, the model's "
                f"{list(mine.shape)}",
                hint="every rank gives whole tensors, as model.state_dict() has them",
            )
        if not isinstance(given, DTensor):
            return
        rows, mesh, place = self._gradients.rows.get(mine.name), self.plan.mesh, self.place
        replicas = [mesh.rank(place.pp, replica, place.tp) for replica in range(mesh.dp)]
        if (
            rows is None
            or given.placements != (Shard(rows.dim),)
            or given.device_mesh.mesh.flatten().tolist() != replicas
            or given.to_local().shape != mine.tensor.shape
        ):
            raise ModelError(
                f"the state dict's {name!r} is a DTensor of other rows than this rank has",
                hint="every rank gives whole tensors: {name: t.full_tensor(), ...}",
            )

    def _check_names(self, given: Mapping[str, Any], passed_over: PassedOver) -> None:
        missing, unexpected = passed_over
        if not (missing or unexpected):
            return
        hint = "give model.state_dict() whole, or strict=False to take what there is"
        for prefix in _IN_FRONT:
            if any(f"{prefix}{name}" in given for name in missing):
                hint = f'without {prefix!r}: {{k.removeprefix("{prefix}"): v for k, v in ...}}'
        if missing:
            raise ModelError(f"the state dict has no {_named(missing)}", hint=hint)
        raise ModelError(
            f"the state dict has {_named(unexpected)}, which the model has not", hint=hint
        )

    def _agreed(self, error: ModelError | None, marks: Mapping[str, int]) -> None:
        """Refuse, on every rank, what one of them refuses, or values that differ between ranks.

        Args:
            marks: fingerprints of the whole tensors that this rank takes, by name.
        """
        if error is not None and self._world is None:
            raise error
        if self._world is None:
            return
        said = (error.message, error.hint) if error is not None else None
        heard: list[Any] = [None] * len(self.plan.mesh.places)
        dist.all_gather_object(heard, (said, dict(marks)), group=self._world)
        for rank, (refusal, _) in enumerate(heard):
            if refusal is not None:
                raise ModelError(f"rank {rank}: {refusal[0]}", hint=refusal[1])
        first: dict[str, tuple[int, int]] = {}
        for rank, (_, of_rank) in enumerate(heard):
            for name, mark in of_rank.items():
                other, there = first.setdefault(name, (rank, mark))
                if mark != there:
                    raise ModelError(
                        f"ranks {other} and {rank} were given other values of {name!r}",
                        hint="every rank gives the same state dict",
                    )

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
        under any other plan; each rank writes its own part. Either is there whole or not at all.

        Raises:
            AutopipeError: the file or the folder cannot be written.
        """
        check_same_call("save", self.plan, self._world)
        path = Path(path)
        if path.is_dir() or not path.suffix:
            saving = self.checkpoints(path)
            saving.begin(self.content(optimizer, scheduler), self.steps, self.values())
            saving.close()
            return
        atomic_file.check_model(path)
        self._gradients.gather()
        self._own.save(path, self.place, self._world, self._gradients.master)

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
        check_same_call("load", self.plan, self._world)
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


def _equal(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    return torch.equal(one, other.to(one.device))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
