"""Joint graphs of numbers of rows that were not run: what they keep is what a run's would.

The model of these tests computes `cos(cat(a, a) + v)` of `a`, 4 numbers a row, and `v`, 40 numbers
whatever the rows. Backward needs what the cosine is of: 8 numbers a row, or `a` and `v`.

    rows        2      4      8      16     32     64
    the sum     16     32     64    128    256    512      kept while it is less
    a and v     48     56     72    104    168    296      kept from more than 10 rows on
"""

from functools import cache

import numpy as np
import torch
from torch import nn

from autopipe.ir.dataflow import analyse
from autopipe.ir.repeats import Short, shorten
from autopipe.planners.saved.observe import Seen, observe_saved
from autopipe.planners.saved.other_rows import JointGraphs
from tests.support.staged import trace_model


class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 4, bias=False)
        self.left = nn.Parameter(torch.randn(5, 3))
        self.right = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        a, v = self.up(x), (self.left @ self.right)[0]
        return torch.cat([a, a], -1).add(v).cos().mean()


@cache
def short() -> Short:
    found = trace_model(Either(), lambda rows: torch.randn(rows, 6))
    return shorten(analyse(found.graph), ())


def seen(rows: int, known: JointGraphs | None = None) -> Seen:
    return observe_saved(short(), "fp32", rows, compiled=True, known=known)


def taught(*rows: int, check: bool = False) -> JointGraphs:
    """What is known after runs of these rows."""
    known = JointGraphs(check)
    for each in rows:
        seen(each, known)
    return known


def test_the_cut_is_elsewhere_with_more_rows() -> None:
    assert seen(8).storages != seen(16).storages
    assert [sum(seen(rows).bytes) for rows in (8, 16)] == [8 * 8 * 4, (4 * 16 + 40) * 4]


def test_what_is_not_run_is_what_a_run_shows() -> None:
    known = taught(2, 64)
    for rows in (3, 4, 8, 10, 11, 16, 33, 63):
        told, ran = seen(rows, known), seen(rows)
        assert known.at(rows) is not None
        assert np.array_equal(told.made, ran.made)
        assert np.array_equal(told.waiting, ran.waiting)
        assert told == ran


def test_rows_beyond_those_that_were_run_are_not_known() -> None:
    known = taught(4, 64)
    assert known.at(2) is None
    assert known.at(128) is None


def test_a_third_run_is_wanted_if_lines_are_checked() -> None:
    assert taught(2, 64, check=True).at(16) is None
    assert taught(2, 64, 8, check=True).at(16) is not None


def test_a_run_that_is_off_the_line_takes_all_others_with_it() -> None:
    known = taught(2, 64)
    assert known.at(16) is not None
    told = known.at(9)
    assert told is not None
    known.add(8, told)  # the graph of nine rows, said to be that of eight
    assert known.at(16) is None


def test_graphs_of_other_calls_tell_nothing_of_each_other() -> None:
    known = taught(2)
    other = trace_model(nn.Linear(6, 1), lambda rows: torch.randn(rows, 6), lambda y, _: y.mean())
    own = shorten(analyse(other.graph), ())
    observe_saved(own, "fp32", 64, compiled=True, known=known)
    assert known.at(16) is None
