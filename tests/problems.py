"""Planner problems made from a seed: small, and with everything that makes planning hard."""

from __future__ import annotations

from random import Random

from autopipe.problem import Constraints, Crossing, Problem, Profile, Saved, Shared


def random_problem(seed: int) -> Problem:
    """1 to 9 units, 1 to 6 devices, a batch of 1 to 24 rows; the same seed, the same problem.

    In some all units cost the same, so that cuts tie; parameters are shared by up to three units,
    tensors skip over units, some have no gradient, and in about half memory is tight. The batch
    divides over the devices in two thirds.
    """
    random = Random(seed)
    units = random.randint(1, 9)
    devices = random.randint(1, 6)
    share = random.randint(1, 24 // devices)
    batch = random.choice((devices * share, devices * share, random.randint(1, 24)))
    parameters = tuple(_shared(random, units, 1000) for _ in range(random.randint(1, 2 * units)))
    constants = tuple(_shared(random, units, 200) for _ in range(random.randint(0, units)))
    profiles = _profiles(random, units, batch)
    factor = random.choice((0.0, 1.0, 2.0, 2.5))

    largest = profiles[-1]
    everything = (
        sum(item.bytes for item in parameters) * (2 + factor)
        + sum(item.bytes for item in constants)
        + sum(item.bytes for item in largest.saved)
        + sum(item.bytes for item in largest.crossings)
    )
    tight = random.random() < 0.5
    return Problem(
        units=units,
        blocks=_blocks(random, units),
        parameters=parameters,
        constants=constants,
        optimizer_factor=factor,
        profiles=profiles,
        batch=batch,
        devices=devices,
        memory=int(everything * (random.uniform(0.4, 1.2) / devices if tight else 100)),
        latency=random.choice((0.0, 1e-4, 0.3)),
        bandwidth=random.choice((1e3, 1e5, 1e9)),
        window=random.randint(1, 3),
        constraints=Constraints(),
    )


def _shared(random: Random, units: int, most: int) -> Shared:
    return Shared(random.randint(0, most), _some(random, 0, units))


def _some(random: Random, low: int, high: int) -> tuple[int, ...]:
    """One to three of the units low .. high - 1, ascending."""
    return tuple(sorted(random.sample(range(low, high), min(random.randint(1, 3), high - low))))


def _profiles(random: Random, units: int, batch: int) -> tuple[Profile, ...]:
    """One per divisor of the batch, bytes in proportion to the rows; sometimes one is missing."""
    level = random.random() < 0.3  # All units cost the same: every balanced cut ties.
    one_row = [1.0 if level else random.uniform(0.2, 2.0) for _ in range(units)]
    overhead = random.choice((0.0, 0.3))
    saved = []
    for _ in range(random.randint(0, 2 * units)):
        producer = random.randrange(units)
        savers = _some(random, producer, units)
        saved.append(Saved(random.randint(1, 600), random.choice((producer, None)), savers))
    crossings = []
    for producer in range(units - 1):
        for _ in range(random.randint(0, 2)):
            consumers = _some(random, producer + 1, units)
            crossing = Crossing(random.randint(1, 300), producer, consumers, random.random() < 0.7)
            crossings.append(crossing)
    sizes = [rows for rows in range(1, batch + 1) if batch % rows == 0]
    if len(sizes) > 2 and random.random() < 0.3:
        sizes.remove(random.choice(sizes))
    return tuple(
        Profile(
            rows=rows,
            forward=tuple(cost * rows + overhead for cost in one_row),
            backward=tuple(2 * cost * rows + overhead for cost in one_row),
            saved=tuple(Saved(s.bytes * rows, s.producer, s.savers) for s in saved),
            crossings=tuple(
                Crossing(c.bytes * rows, c.producer, c.consumers, c.gradient) for c in crossings
            ),
        )
        for rows in sizes
    )


def _blocks(random: Random, units: int) -> tuple[tuple[int, int], ...]:
    """Blocks of one size in the middle of the model; none in a third of the problems."""
    size = random.choice((0, 1, 2))
    if size == 0:
        return ()
    first = min(random.randint(0, 1), units - 1)
    return tuple((start, start + size) for start in range(first, units - size + 1, size))
