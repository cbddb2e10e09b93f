"""Integer programs: their least cost, what has no solution, and what is handed to scipy."""

import numpy as np
import pytest
import scipy.optimize

from autopipe.errors import AutopipeError
from autopipe.sharding.milp import IntegerProgram


def one_of_three() -> IntegerProgram:
    """One of three variables is 1, and the first one only if the second is."""
    program = IntegerProgram()
    first, second, third = (program.variable(cost, whole=True) for cost in (1.0, 3.0, 2.0))
    program.sums([first, second, third], [], 1, 1)
    program.sums([first], [second], -np.inf, 0)
    return program


def test_the_least_cost() -> None:
    assert one_of_three().solve().tolist() == [0, 0, 1]


def test_no_values_at_all() -> None:
    program = one_of_three()
    program.sums([0, 1, 2], [], 2, 2)
    program.sums([0, 1, 2], [], 1, 1)
    with pytest.raises(AutopipeError, match="no solution"):
        program.solve()


def test_rows_have_numbers_of_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """scipy before 1.15 hands HiGHS no longer ones: `Buffer dtype mismatch, expected 'int'`."""
    asked = []

    def milp(costs, *, constraints, **options):
        asked.append((constraints.A.indices.dtype, constraints.A.indptr.dtype))
        return solve(costs, constraints=constraints, **options)

    solve = scipy.optimize.milp
    monkeypatch.setattr(scipy.optimize, "milp", milp)
    one_of_three().solve()
    assert asked == [(np.dtype(np.int32),) * 2]
