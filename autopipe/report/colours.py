"""The colours of a step's pictures: safe for colour-blind readers, on light and dark pages.

    F forward                  blue          B backward                 orange
    I backward for inputs      vermillion    W backward for weights     purple

They are of Okabe and Ito's set (https://jfly.uni-koeln.de/color/), blue and purple lighter, so
that a number on any of them is black. The contrast of two colours is that of WCAG 2.2:
(L1 + 0.05) / (L2 + 0.05) of their relative luminances, from 1 to 21.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.schedules.instructions import Flow, Kind

KINDS = {
    Kind.FORWARD: "#2e8bc9",
    Kind.BACKWARD: "#e69f00",
    Kind.BACKWARD_INPUT: "#d55e00",
    Kind.BACKWARD_WEIGHT: "#e3a1c4",
}
SUM = "#009e73"
"""The colour of sums of gradients over ranks."""

PALEST = 0.3
"""The share of white in the colour of the last micro-batch."""


@dataclass(frozen=True)
class Theme:
    """Colours around the boxes.

    Attributes:
        page: of the background.
        ink, muted: of text.
        line: of rules and frames.
        idle: time in which a rank does nothing.
        flows: lines between ranks.
    """

    page: str
    ink: str
    muted: str
    line: str
    idle: str
    flows: dict[Flow, str]


LIGHT = Theme(
    page="#ffffff",
    ink="#1c2126",
    muted="#545c66",
    line="#d3d8de",
    idle="#e9ecef",
    flows={Flow.ACTIVATION: "#0072b2", Flow.GRADIENT: "#b35c00"},
)
DARK = Theme(
    page="#14171b",
    ink="#e8eaed",
    muted="#a4adb8",
    line="#3a414a",
    idle="#262b32",
    flows={Flow.ACTIVATION: "#56b4e9", Flow.GRADIENT: "#e69f00"},
)


def box(kind: Kind, share: float) -> str:
    """The colour of a computation; `share` is 0 for the first micro-batch, 1 for the last."""
    return lighter(KINDS[kind], PALEST * share)


def ink(background: str) -> str:
    """Black or white, whichever is easier to read on it: the contrast is at least 4.58."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, background))


def lighter(colour: str, share: float) -> str:
    """A colour mixed with white; `share` is white's part, from 0 to 1."""
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts(colour))


def parts(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, from 0 to 255."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2, from 0 to 1."""
    linear = [
        part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in parts(colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours, from 1 to 21."""
    darker, brighter = sorted((luminance(one), luminance(other)))
    return (brighter + 0.05) / (darker + 0.05)
