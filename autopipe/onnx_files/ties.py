"""Weights that a file holds more than once: the same numbers, transposed or not, are one weight."""

from __future__ import annotations

from typing import Any

import numpy as np


class Matrices:
    """Finds matrices that equal earlier ones, or the transpose of one."""

    def __init__(self) -> None:
        self._seen: dict[Any, list[tuple[str, np.ndarray[Any, Any]]]] = {}

    def add(self, path: str, array: np.ndarray[Any, Any]) -> None:
        """Know a parameter by its path in the module, if it is a matrix."""
        if array.ndim == 2 and array.size:
            self._seen.setdefault(_ends(array), []).append((path, array))

    def tie(self, array: np.ndarray[Any, Any]) -> tuple[str, bool] | None:
        """The path of a known matrix that this one equals, and whether transposed."""
        if array.ndim != 2 or not array.size:
            return None
        for same, turned in ((array, False), (array.T, True)):
            for path, seen in self._seen.get(_ends(same), ()):
                if np.array_equal(same, seen):
                    # Constants of ones or zeros may be equal without being one parameter.
                    return None if (seen == seen.flat[0]).all() else (path, turned)
        return None


def _ends(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Shape, dtype and two corners of a matrix, which tell most matrices apart."""
    return array.shape, array.dtype.str, float(array[0, 0]), float(array[-1, -1])
