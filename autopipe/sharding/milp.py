"""Build and solve an integer linear program with variables in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.errors import AutopipeError


class IntegerProgram:
    """Variables with their costs, and rows that bound sums of them."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.whole: list[int] = []
        self._rows: list[tuple[list[int], list[float], float, float]] = []

    def variable(self, seconds: float, *, whole: bool = False) -> int:
        """Add a variable in [0, 1] with a cost in seconds; returns its index."""
        self.costs.append(seconds)
        self.whole.append(int(whole))
        return len(self.costs) - 1

    def sums(self, plus: Sequence[int], minus: Sequence[int], low: float, high: float) -> None:
        """Add the constraint low <= sum of `plus` - sum of `minus` <= high (variable indices)."""
        factors = [1.0] * len(plus) + [-1.0] * len(minus)
        self._rows.append(([*plus, *minus], factors, low, high))

    def solve(self) -> NDArray[np.float64]:
        """The values of all variables at the least total cost, by index.

        Raises:
            AutopipeError: no values satisfy all constraints.
        """
        # Here, for it takes as long to import as a rank that plans nothing takes for much else.
        import scipy.optimize
        import scipy.sparse

        # Indices of 32 bits, as HiGHS has them: scipy before 1.15 gives it no others.
        columns = np.concatenate([np.array(row[0], np.int32) for row in self._rows])
        factors = np.concatenate([np.array(row[1]) for row in self._rows])
        begins = np.cumsum([0, *(len(row[0]) for row in self._rows)], dtype=np.int32)
        matrix = scipy.sparse.csr_array(
            (factors, columns, begins), shape=(len(self._rows), len(self.costs))
        )
        costs = np.array(self.costs)
        found = scipy.optimize.milp(
            costs / max(costs.max(), 1e-30) * 1e3,  # HiGHS's tolerances are absolute
            constraints=scipy.optimize.LinearConstraint(
                matrix, [row[2] for row in self._rows], [row[3] for row in self._rows]
            ),
            integrality=self.whole,
            bounds=scipy.optimize.Bounds(0, 1),
            options={"mip_rel_gap": 0},
        )
        if found.x is None:
            raise AutopipeError(f"the placements of tensors have no solution: {found.message}")
        values: NDArray[np.float64] = found.x
        return values
