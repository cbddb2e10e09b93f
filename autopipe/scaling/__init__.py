"""A plan and the formulas of its stages  ->  its seconds and bytes at other sizes.

In: a plan, and of each stage its seconds and bytes as expressions in the rows of a micro-batch, the
tokens of a row and the bandwidth of the farthest link. Out: a `sheet.Sheet`, plain data that Python
and a page's script evaluate alike.
Never found here: torch, a search, how a formula was found.

    step      the longest of the paths through a plan's programs       paths
    bytes     the most of what a rank holds at its moments             moments
    link      what of both depends on the farthest link                links

Other rooms use: `expressions`, `sheet.Sheet`, `make.sheet_of`, `.StageFormulas`, `links`,
`stops.Stops`, `.stops_of`, `moments.Numbering`.
"""
