"""Colours of pictures: readable, on light and on dark, and told apart by the colour-blind."""

from itertools import combinations

import pytest

from autopipe.report import colours
from autopipe.report.colours import DARK, LIGHT, Theme, contrast
from autopipe.schedules.instructions import Kind

EVERY = {
    (kind, share / 20): colours.box(kind, share / 20)
    for kind in colours.KINDS
    for share in range(21)
}


def test_the_contrast_of_wcag() -> None:
    """The examples of its "Understanding 1.4.3": black on white, and #777 which just fails."""
    assert contrast("#000000", "#ffffff") == contrast("#ffffff", "#000000") == 21
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


def test_numbers_on_boxes_are_readable() -> None:
    """4.5 is WCAG's level AA; of one kind all have the same ink."""
    assert min(contrast(colours.ink(box), box) for box in EVERY.values()) >= 4.5
    for kind in colours.KINDS:
        assert len({colours.ink(box) for (of, _), box in EVERY.items() if of is kind}) == 1


def test_ink_is_whichever_is_easier_to_read() -> None:
    assert (colours.ink("#ffffff"), colours.ink("#14171b")) == ("#000000", "#ffffff")


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_is_readable_on_either_page(theme: Theme) -> None:
    assert contrast(theme.ink, theme.page) >= 7
    assert contrast(theme.muted, theme.page) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_lines_are_seen_on_either_page(theme: Theme) -> None:
    """WCAG's 1.4.11 asks for 3 of what is no text."""
    assert min(contrast(line, theme.page) for line in theme.flows.values()) >= 3
    assert contrast(colours.SUM, theme.page) >= 3


BLIND = {  # Machado, Oliveira and Fernandes (2009), severity 1, of linear red, green and blue
    "protan": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deutan": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritan": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def seen(colour: str, blind: str) -> tuple[float, float, float]:
    """A colour in CIELAB as somebody without one kind of cones sees it."""
    linear = [(part / 255) ** 2.2 for part in colours.parts(colour)]
    red, green, blue = (
        min(max(sum(map(float.__mul__, row, linear)), 0), 1) for row in BLIND[blind]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


TOGETHER = [(Kind.FORWARD, Kind.BACKWARD)] + list(
    combinations((Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), 2)
)


@pytest.mark.parametrize("blind", BLIND)
def test_kinds_that_meet_in_a_picture_are_told_apart(blind: str) -> None:
    """A distance of 2.3 in CIELAB can just be seen; these have 15 at least, of one micro-batch."""
    for one, other in TOGETHER:
        for share in (0.0, 0.5, 1.0):
            pair = (seen(EVERY[kind, share], blind) for kind in (one, other))
            distance = sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5
            assert distance >= 15, (one, other, share, distance)
