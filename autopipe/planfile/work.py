"""What a plan's step computes, and what its stages' seconds go to: parts of a plan.

    Work     operations of a step, and of its devices a second: MFU
    Spent    a stage's seconds of a micro-batch, by what they go to

`planfile.waterfall` puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a step computes, from which MFU follows (Chowdhery et al., PaLM, 2022, appendix B).

    Attributes:
        flops: operations of the matrix products, convolutions and attentions of the model as
            traced, forward and backward of the whole batch. What recomputation, attention's
            backward and tensor-parallel ranks do again does not count; causal attention counts
            half.
        peaks: for each pipeline rank, the operations a second that its devices have together in
            `dtype`.
        dtype: the one in which the model computes most.
        measured: whether `peaks` are those that large matmuls reached, not those of datasheets.
        tokens: those of the whole batch; 0 where its rows are no sequences.
    """

    flops: float
    peaks: tuple[float, ...]
    dtype: str
    measured: bool
    tokens: int = 0

    @property
    def peak(self) -> float:
        """Operations a second of all devices together, at their peak."""
        return sum(self.peaks)

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the model's own operations take in a step of `seconds`."""
        return self.flops / (seconds * self.peak)


@dataclass(frozen=True)
class Spent:
    """What a stage's seconds of one micro-batch go to, forward and backward together.

    Attributes:
        matmuls: matrix products, convolutions and attention.
        other_ops: all other ops, and adding gradients to their sums.
        launches: what the host needs to start ops.
        recompute: blocks that run a second time.
        exchange: the collectives of tensor parallelism.
        gathering: what ZeRO-3 gathers and scatters, and ZeRO-2 scatters.
        copying: copies to the host's memory and back that nothing hides.
    """

    matmuls: float
    other_ops: float
    launches: float
    recompute: float = 0.0
    exchange: float = 0.0
    gathering: float = 0.0
    copying: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all causes."""
        return float(sum(vars(self).values()))
