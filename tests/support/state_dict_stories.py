"""Stories of state dicts that go back into a pipe: whose values each rank then trains."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist

from autopipe import LaunchError, ModelError
from tests.support.long import sampled
from tests.support.pipes import ZOO, close, full, piped, planned, refused, sgd, story, whole_loss


@story(4)
def a_state_dict_goes_back() -> None:
    """What `state_dict` gave, and the whole model's, whoever has which rows of it: the next step is
    that of a process which has loaded the same, masters of 16 bits included."""
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("gpt2", {"zero": 1}),
        ("resnet", {"zero": 3}),
        ("gpt", {"zero": 2, "precision": "bf16"}),
        ("gpt", {"zero": 0, "precision": "bf16", "tp": 2}),
    )
    for name, how in sampled(cases, of=4):
        pipe = piped(name, planned(name, 2 // how.get("tp", 1), 2, 2, **how))
        precision = pipe.plan.precision
        model, batch = ZOO[name].model(), ZOO[name].inputs(pipe.plan.batch.rows)
        begun = {key: tensor.clone() for key, tensor in pipe.state_dict().items()}
        first = pipe.evaluate(batch)
        pipe.step(batch)
        sgd(pipe.parameters()).step()
        assert pipe.load_state_dict(begun) == ([], [])
        assert pipe.evaluate(batch) == first, name
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        pipe.load_state_dict(model.state_dict())
        for key, tensor in pipe.state_dict().items():
            assert torch.equal(full(tensor), model.state_dict()[key]), f"{name}: {key}"
        with torch.no_grad():
            expected = whole_loss(name, model.eval(), batch)
        close(pipe.evaluate(batch), expected, name, 1e-5 if precision == "fp32" else 2e-2)


@story(4)
def a_state_dict_that_does_not_fit() -> None:
    """Refused on every rank, whichever found it, and no rank has changed a tensor."""
    pipe, model = piped("gpt", planned("gpt", 2, 2, 2, zero=1)), ZOO["gpt"].model()
    before = {key: tensor.clone() for key, tensor in pipe.state_dict().items()}
    whole, place = model.state_dict(), pipe.place
    last = next(reversed(whole))
    other = {**whole, last: whole[last] + place.dp}  # replicas would train apart
    wrapped = {f"module.{name}": tensor for name, tensor in whole.items()}
    with refused(ModelError, f"{last!r} has the shape [1], the model's"):
        pipe.load_state_dict({**whole, last: torch.ones(1)})
    with refused(ModelError, "were given other values of", last):
        pipe.load_state_dict(other)
    with refused(ModelError, "the state dict has no", "hint: without 'module.'"):
        pipe.load_state_dict(wrapped)
    with refused(ModelError, "has 'head.scale', which the model has not"):
        pipe.load_state_dict({**whole, "head.scale": torch.ones(1)})
    for key, tensor in pipe.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    some = {last: whole[last] + 1, "epoch": torch.ones(())}
    missing, unexpected = pipe.load_state_dict(some, strict=False)
    assert unexpected == ["epoch"] and last not in missing
    after = pipe.state_dict()
    assert last not in after or torch.equal(after[last], whole[last] + 1)


@story(2)
def a_stages_state_dict_is_none_of_the_model() -> None:
    """`if rank == 0: torch.save(pipe.state_dict(), file)` of a pipeline: the call is one of all
    ranks, the file says whose part it is, and neither a pipe nor the model takes it for a whole."""
    pipe, model = piped("gpt", planned("gpt", 2, 1, 2)), ZOO["gpt"].model()
    rank, whole = pipe.place.rank, model.state_dict()
    batch = ZOO["gpt"].inputs(pipe.plan.batch.rows)
    with refused(LaunchError, "has called pipe.", "none under `if rank == 0:`"):
        pipe.state_dict() if rank == 0 else pipe.step(batch)
    part = pipe.state_dict()
    assert 0 < len(part) < len(whole)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        copy.deepcopy(part)
        file = io.BytesIO()
        torch.save(part, file)
    (warning,) = [str(one.message) for one in told]
    whose = f"rank {rank} of 2 has {len(part)} of the model's {len(whole)} tensors"
    assert whose in warning and "pipe.save('model.safetensors')" in warning
    file.seek(0)
    read = torch.load(file, weights_only=True)
    for name, tensor in part.items():
        assert torch.equal(read[name], tensor)
    assert pipe.load_state_dict(read) == ([], [])  # where it came from
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, dict(read))
    pipe.load_state_dict({**parts[0], **parts[1]})
    read.popitem() if rank else None
    with refused(ModelError, "rank 1: the state dict is a part", "rank 1 of 2 has"):
        pipe.load_state_dict(read)
    with refused(RuntimeError, "Missing key(s) in state_dict"):
        model.load_state_dict(read)
