"""Models that change how their own gradients are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.zoo.odd.common import Net, odd, sequences


class Halved(torch.autograd.Function):
    """The same forward, half the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x itself."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Half of it."""
        return gradient * 0.5


class Swish(torch.autograd.Function):
    """Saves its input, as memory-saving activations do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: float) -> Tensor:
        """x * sigmoid(beta x)"""
        ctx.save_for_backward(x)
        ctx.beta = beta
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """By hand."""
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(ctx.beta * x)
        return gradient * (s + ctx.beta * x * s * (1 - s)), None


class TwoOutputs(torch.autograd.Function):
    """Two outputs, one of which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Largest entries and where they are."""
        values, places = x.max(-1, keepdim=True)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        ctx.width = x.shape[-1]
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        """To where they were."""
        (places,) = ctx.saved_tensors
        zeros = gradient.new_zeros(*gradient.shape[:-1], ctx.width)
        return zeros.scatter(-1, places, gradient)


class NewStyle(torch.autograd.Function):
    """With `setup_context`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """The sine."""
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps the input."""
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Clipped cosine."""
        (x,) = ctx.saved_tensors
        return gradient * x.cos().clamp(-0.5, 0.5)


class RunAgain(torch.autograd.Function):
    """A checkpoint by hand, as guided diffusion has it: it is given a method and its parameters."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        """What `run` gives; nothing of it is kept."""
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            found: Tensor = run(x)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """From a second run."""
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(x.view_as(x))
        wanted = (x, *ctx.parameters)
        return None, *torch.autograd.grad(made, wanted, gradient, allow_unused=True)


@odd()
class CustomFunction(Net):
    """Its own autograd.Function."""

    def inside(self, hidden: Tensor) -> Tensor:
        return Halved.apply(hidden)


@odd()
class CustomActivation(Net):
    """A function that saves its input and takes a number."""

    def inside(self, hidden: Tensor) -> Tensor:
        return Swish.apply(Swish.apply(hidden, 1.0), 1.5)


@odd()
class CustomTwoOutputs(Net):
    """A function with two outputs."""

    def inside(self, hidden: Tensor) -> Tensor:
        values, places = TwoOutputs.apply(hidden)
        return hidden + values + places.float() * 0.01


@odd()
class CustomNewStyle(Net):
    """A function with setup_context."""

    def inside(self, hidden: Tensor) -> Tensor:
        return NewStyle.apply(hidden)


@odd()
class StraightThrough(Net):
    """Rounds, with the gradient of not rounding."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + (hidden.round() - hidden).detach()


@odd()
class Detached(Net):
    """A branch whose gradient is cut."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden * torch.sigmoid(self.first(hidden).detach())


@odd()
class UnderNoGrad(Net):
    """A part that runs under no_grad."""

    def inside(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            scale = hidden.norm(dim=-1, keepdim=True)
        return hidden / (1 + scale)


@odd()
class CastUnderNoGrad(Net):
    """Casts to the dtype that a value has: torch returns the value itself, gradient and all."""

    def inside(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            order = hidden.float().argsort(-1)
        return self.first(hidden).gather(-1, order)


@odd()
class ClampUnderNoGrad(Net):
    """Writes in place under no_grad: gradients go through as if nothing had been written."""

    def inside(self, hidden: Tensor) -> Tensor:
        hidden = self.first(hidden) * 1
        with torch.no_grad():
            hidden.clamp_(-0.1, 0.1)
            hidden[..., :2].mul_(2)
        return hidden


@odd()
class OutInto(Net):
    """`out=` of a part of a new tensor; nothing reads what the call returns."""

    def inside(self, hidden: Tensor) -> Tensor:
        made = torch.zeros_like(hidden)
        with torch.no_grad():
            torch.clamp(self.first(hidden)[..., :2], -1, 1, out=made[..., 2:4])
        return self.first(hidden) + made


@odd()
class FrozenMiddle(Net):
    """A frozen layer between trained ones."""

    def begin(self) -> None:
        self.first.requires_grad_(False)


@odd()
class FrozenBegin(Net):
    """All of the beginning is frozen: no gradient goes to the first stage."""

    def begin(self) -> None:
        self.up.requires_grad_(False)
        self.first.requires_grad_(False)


@odd()
class Reentrant(Net):
    """Checkpoints in the old mode."""

    def inside(self, hidden: Tensor) -> Tensor:
        return checkpoint(lambda h: self.first(h).relu(), hidden, use_reentrant=True)


@odd()
class CheckpointByFunction(Net):
    """Checkpoints by a Function of its own."""

    def inside(self, hidden: Tensor) -> Tensor:
        found: Tensor = RunAgain.apply(self.kept, hidden, *self.first.parameters())
        return found

    def kept(self, hidden: Tensor) -> Tensor:
        """What runs twice."""
        return hidden + self.first(hidden).tanh()


@odd()
class NonReentrant(Net):
    """Checkpoints in the new mode."""

    def inside(self, hidden: Tensor) -> Tensor:
        return checkpoint(lambda h: self.first(h).relu(), hidden, use_reentrant=False)


@odd()
class CheckpointToTheEnd(Net):
    """Backward runs all of the function again: the counter behind its last layer moves twice."""

    def begin(self) -> None:
        self.layer = nn.Linear(16, 16)
        self.register_buffer("hits", torch.zeros(16))

    def counted(self, hidden: Tensor) -> Tensor:
        """A layer whose active units are counted."""
        made = self.layer(hidden).relu()
        with torch.no_grad():
            self.hits += (made > 0).sum(0)
        return hidden + made

    def inside(self, hidden: Tensor) -> Tensor:
        return checkpoint(self.counted, hidden, use_reentrant=False, early_stop=False)


@odd()
class CheckpointSequential(Net):
    """Checkpoints parts of a list."""

    def begin(self) -> None:
        self.list = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))

    def inside(self, hidden: Tensor) -> Tensor:
        return checkpoint_sequential(self.list, 2, hidden, use_reentrant=False)


@odd()
class BackwardHook(Net):
    """A hook on a module's gradients that only looks."""

    def begin(self) -> None:
        self.norms: list[int] = []
        self.first.register_full_backward_hook(lambda *_: self.norms.append(1))


@odd()
class HookThatScales(Net):
    """A hook on a module's gradients that halves them."""

    def begin(self) -> None:
        self.first.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))


@odd()
class TensorHook(Net):
    """A hook on an activation's gradient."""

    def inside(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return hidden * 1.5


@odd()
class ParameterHook(Net):
    """A hook on a parameter's gradient."""

    def begin(self) -> None:
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@odd()
class ForwardHooks(Net):
    """Hooks before and after a module's forward that change what goes through."""

    def begin(self) -> None:
        self.first.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        self.second.register_forward_hook(lambda module, args, output: output + 0.1)


@odd()
class GradientPenalty(Net):
    """Takes a gradient inside forward, as physics-informed and energy models do."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


@odd()
class FunctionalGradient(Net):
    """The same by torch.func.grad."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + torch.func.grad(lambda h: h.tanh().sum())(hidden)


@odd()
class Jacobian(Net):
    """A Jacobian-vector product in forward mode."""

    def inside(self, hidden: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(torch.sin, (hidden,), (torch.ones_like(hidden),))
        return value + tangent


@odd()
class ByItsInput(Net):
    """A physics-informed residual: a method takes a gradient by coordinates that forward marks."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        weight = self.first(self.up(x).tanh()).mean(-1, keepdim=True)
        return self.residual(x) * weight.sigmoid()

    def residual(self, x: Tensor) -> Tensor:
        """x [..., WIDTH] -> u - du/dx, alike."""
        made = self.down(self.second(self.up(x).tanh()).tanh())
        return made - torch.autograd.grad(made.sum(), x, create_graph=True)[0]


@odd()
class Saliency(Net):
    """The model's own forward weighs features by the gradient of a score that they have made."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.up(x).relu())
        score = self.second(hidden).tanh().sum()
        (slope,) = torch.autograd.grad(score, hidden, create_graph=True)
        return self.down(hidden * slope.sigmoid())


class _Shift(torch.autograd.Function):
    """TSM's: moves some channels a step on in the memory of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count = count
        x.data[..., 1:, :count] = x.data[..., :-1, :count].clone()
        x.data[..., :1, :count] = 0
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = (one.clone() for one in gradients)
        gradient[..., :-1, : ctx.count] = gradients[0][..., 1:, : ctx.count]
        gradient[..., -1:, : ctx.count] = 0
        return gradient, None


@odd(sequences)
class ShiftedInPlace(Net):
    """A custom Function that writes its input's .data and gives it back."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden + _Shift.apply(hidden.clone(), 4)


@odd()
class Equilibrium(Net):
    """A deep equilibrium: iterates without gradients, and a hook solves for the gradient."""

    def step(self, state: Tensor, given: Tensor) -> Tensor:
        """One iteration, both [b, 16]."""
        return (self.first(state) * 0.3 + given).tanh()

    def forward(self, x: Tensor) -> Tensor:
        given = self.up(x)
        with torch.no_grad():
            state = torch.zeros_like(given)
            for _ in range(6):
                state = self.step(state, given)
        state = self.step(state, given)
        inner = state.clone().detach().requires_grad_()
        made = self.step(inner, given)

        def solved(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(6):
                found = torch.autograd.grad(made, inner, found, retain_graph=True)[0] + gradient
            return found

        if state.requires_grad:
            state.register_hook(solved)
        return self.down(self.second(state).tanh())


@odd()
class InnerLoop(Net):
    """Learns within forward: two steps of descent on weights of each row's own, as MAML takes."""

    def inside(self, hidden: Tensor) -> Tensor:
        weight = self.first.weight.expand(len(hidden), 16, 16)
        for _ in range(2):
            off = torch.einsum("bij,bj->bi", weight, hidden) - hidden.tanh()
            (slope,) = torch.autograd.grad(off.square().sum(), weight, create_graph=True)
            weight = weight - 0.1 * slope
        return torch.einsum("bij,bj->bi", weight, hidden)


@odd()
class Accelerated(Net):
    """A deep equilibrium whose solver (Anderson's) runs without gradients, to a tolerance."""

    def step(self, state: Tensor, given: Tensor) -> Tensor:
        """One iteration, both [b, 16]."""
        return (self.second(state) * 0.3 + given).tanh()

    def solved(self, given: Tensor) -> Tensor:
        """The state that a step leaves as it is."""
        states = [torch.zeros_like(given)]
        made = [self.step(states[0], given)]
        for _ in range(8):
            off = torch.stack([m - s for m, s in zip(made[-3:], states[-3:], strict=True)], 1)
            grams = off @ off.mT + 1e-4 * torch.eye(off.shape[1], device=given.device)
            shares = torch.linalg.solve(grams, torch.ones_like(grams[..., :1]))
            shares = shares / shares.sum(1, keepdim=True)
            states.append((shares * torch.stack(made[-3:], 1)).sum(1))
            made.append(self.step(states[-1], given))
            if (made[-1] - states[-1]).norm().item() < 1e-3:
                break
        return made[-1]

    def inside(self, hidden: Tensor) -> Tensor:
        given = self.first(hidden)
        with torch.no_grad():
            state = self.solved(given)
        return self.step(state, given)
