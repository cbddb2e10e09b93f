"""Every schedule at small sizes, and the picture of one."""

import textwrap

from autopipe.schedules.registry import make


def every(p, m):
    """Every schedule on p ranks with m micro-batches: what `make` is asked, and what it makes."""
    asked = [{"name": name} for name in ("naive", "gpipe", "1f1b", "zb-h1")]
    asked += [{"name": "eager-1f1b", "depths": [depth] * (p - 1)} for depth in (0, 1, 3)]
    asked += [{"name": "eager-1f1b", "depths": range(p - 1)}]
    asked += [{"name": "interleaved", "chunks": chunks} for chunks in (2, 3, 4)]
    asked += [{"name": "zb-v", "chunks": 2}]
    return [(ask, make(ranks=p, micro_batches=m, **ask)) for ask in asked]


def picture(text):
    return textwrap.dedent(text).strip("\n")
