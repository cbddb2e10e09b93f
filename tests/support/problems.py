"""Planner problems made from a seed: small, and with everything that makes planning hard."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from autopipe.cluster.cluster import Link
from autopipe.cluster.collective_time import Topology
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.problem import (
    BlockLevel,
    Constraints,
    Crossing,
    Problem,
    Profile,
    Saved,
    Shared,
)


def machine(
    kinds: tuple[int, ...] | int,
    memory: tuple[int, ...] | int,
    links: tuple[Link, ...] = (Link(0.0, 1e9),) * 3,
    nodes: tuple[int, ...] = (),
    sites: tuple[int, ...] = (),
    streams: int = 1,
) -> Machine:
    """Devices of these kinds, or so many alike; one node unless said otherwise."""
    row = (0,) * kinds if isinstance(kinds, int) else kinds
    held = (memory,) * len(row) if isinstance(memory, int) else memory
    nodes = nodes or (0,) * len(row)
    sites = sites or (0,) * len(row)
    within, between, across = links
    places = Topology(nodes, sites, (within,) * (max(nodes) + 1), between, across)
    return Machine(row, held, places, streams)


def line(
    forward: tuple[float, ...],
    *,
    devices: int = 2,
    batch: int = 4,
    memory: tuple[int, ...] | int = 10**6,
    kinds: tuple[int, ...] = (),
    parameter: int = 100,
    saved: int = 10,
    crossing: tuple[int, ...] = (),
    link: Link = Link(0.0, 1.0),  # noqa: B008, it is frozen
    constraints: Constraints | None = None,
) -> Problem:
    """A chain of units to be worked by hand: 1f1b with a stage on each device, if nothing else is
    said; micro-batches of one row; links of one byte a second without latency; Adam.

    Each unit has `parameter` bytes of parameters and saves `saved` bytes; `crossing[u]` bytes go
    from unit u to the next, and nothing comes back. A device of kind k is k + 1 times as slow.
    """
    units = len(forward)
    spread = range(max(kinds, default=0) + 1)
    return Problem(
        units=units,
        blocks=(),
        parameters=tuple(Shared(parameter, (unit,)) for unit in range(units)),
        constants=(),
        optimizer_factor=2.0,
        profiles=(
            Profile(
                rows=1,
                forward=tuple(tuple((k + 1) * cost for cost in forward) for k in spread),
                backward=((0.0,) * units,) * len(spread),
                saved=tuple(Saved(saved, unit, (unit,)) for unit in range(units)),
                crossings=tuple(
                    Crossing(size, unit, (unit + 1,), gradient=False)
                    for unit, size in enumerate(crossing)
                ),
            ),
        ),
        batch=batch,
        machine=machine(kinds or devices, memory, (link,) * 3),
        window=1,
        constraints=constraints or Constraints(pp=len(kinds) or devices, schedule="1f1b"),
    )


def random_problem(seed: int) -> Problem:
    """1 to 9 units, 1 to 6 devices, a batch of 1 to 24 rows; the same seed, the same problem.

    All devices are alike and on one link, nothing runs again and there is no ZeRO: `rich_problem`
    has all that.

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
        machine=machine(
            devices,
            int(everything * (random.uniform(0.4, 1.2) / devices if tight else 100)),
            (Link(random.choice((0.0, 1e-4, 0.3)), random.choice((1e3, 1e5, 1e9))),) * 3,
        ),
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
            forward=(tuple(cost * rows + overhead for cost in one_row),),
            backward=(tuple(2 * cost * rows + overhead for cost in one_row),),
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


def rich_problem(seed: int) -> Problem:
    """A random problem on up to three kinds of devices, nodes and sites, whose blocks may run again
    at up to two levels and whole, and whose states may be dealt out; in half of them some
    parameters are masters."""
    plain = random_problem(seed)
    random = Random(f"rich {seed}")
    devices = plain.machine.devices
    kinds = tuple(sorted(random.choices(range(random.randint(1, 3)), k=devices)))
    kinds = tuple(kind - kinds[0] for kind in kinds)
    memory = plain.machine.memory[0]
    limits = [int(memory * random.uniform(0.5, 1.0)) for _ in range(3)]
    nodes = tuple(device // random.randint(1, 3) for device in range(devices))
    nodes = tuple(sorted(nodes))
    near = plain.machine.topology.within[0]
    links = (near, Link(near.latency * 2, near.bandwidth / 3), Link(0.1, near.bandwidth / 20))
    starts = sorted(
        random.sample(range(plain.units + 1), random.randint(1, min(5, plain.units + 1)))
    )
    recomputable = tuple((a, b) for a, b in zip(starts, starts[1:], strict=False))[:4]
    alike = random.random() < 0.5
    spread = max(kinds) + 1

    leveled = Random(f"levels {seed}")
    shares = [
        [
            (leveled.uniform(0.1, 0.9), leveled.uniform(0.1, 0.9))
            for _ in range(leveled.randint(0, 2))
        ]
        for _ in range(4)
    ]
    """Of each block and level the share of the block's bytes that is saved, and of its seconds."""
    unasked = Random(f"again {seed}")
    again = unasked.choices((0, 0, 0, 30, 90), k=plain.units) if unasked.random() < 0.5 else ()
    between = Random(f"waiting {seed}")
    waiting = between.choices((-20, 0, 10, 60), k=plain.units) if between.random() < 0.5 else ()
    lossy = Random(f"passing {seed}")
    passing = lossy.choices((0, 0, 20, 40), k=plain.units) if lossy.random() < 0.5 else ()

    def of(profile: Profile) -> Profile:
        numbers = Random(f"saved {seed}")  # the same in every profile
        own = [
            Saved(
                numbers.randint(1, 900) * profile.rows, first, (numbers.randrange(first, last),), b
            )
            for b, (first, last) in enumerate(recomputable)
            for _ in range(2)
        ]
        if alike:
            own = [
                Saved(500 * profile.rows, first, (last - 1,), b)
                for b, (first, last) in enumerate(recomputable)
            ]
        return replace(
            profile,
            levels=tuple(
                tuple(
                    BlockLevel(
                        int(bytes * sum(saved.bytes for saved in own if saved.block == block)),
                        tuple(
                            _slower([seconds * s for s in profile.forward[0][first:last]], kind)
                            for kind in range(spread)
                        ),
                    )
                    for bytes, seconds in shares[0 if alike else block]
                )
                for block, (first, last) in enumerate(recomputable)
            ),
            forward=tuple(_slower(profile.forward[0], kind) for kind in range(spread)),
            backward=tuple(_slower(profile.backward[0], kind) for kind in range(spread)),
            saved=(*profile.saved, *own),
            made=tuple(size * profile.rows for size in again),
            waiting=tuple(size * profile.rows for size in waiting),
            passing=tuple(size * profile.rows for size in passing),
            recompute=tuple(
                tuple(_slower(profile.forward[0][first:last], kind) for kind in range(spread))
                for first, last in recomputable
            ),
        )

    return replace(
        plain,
        machine=machine(
            kinds,
            tuple(limits[kind] for kind in kinds),
            links,
            nodes,
            tuple(node // 2 for node in nodes),
            random.choice((1, 2)),
        ),
        profiles=tuple(map(of, plain.profiles)),
        recomputable=recomputable,
        zeros=random.choice(((0,), (0, 1), (0, 1, 2, 3))),
        copies=tuple(Shared(p.bytes // 2, p.units) for p in plain.parameters[: seed // 2 % 2 * 3]),
        frozen=plain.constants[::3],
        constants=tuple(c for n, c in enumerate(plain.constants) if n % 3),
        low_gradients=seed % 3 == 0,
        largest=tuple(random.choices((0, 1, 2, 3), k=plain.units)),
    )


def parted_problem(seed: int) -> Problem:
    """A rich problem of tensor-parallel groups of two or four ranks, which may send some of what
    crosses in parts and gather it on links of their own."""
    rich, random = rich_problem(seed), Random(f"parts {seed}")
    divides = [random.random() < 0.6 for _ in rich.profiles[0].crossings]
    near, tp = rich.machine.topology.within[0], random.choice((2, 4))
    own = [
        Link(random.choice((0.0, near.latency)), near.bandwidth * random.choice((0.1, 1, 10)))
        for _ in range(max(rich.machine.kinds) + 1)
    ]
    profiles = (
        replace(
            profile,
            crossings=tuple(
                replace(crossing, divides=may)
                for crossing, may in zip(profile.crossings, divides, strict=True)
            ),
        )
        for profile in rich.profiles
    )
    return replace(
        rich,
        machine=replace(rich.machine, streams=tp, within=tuple(own)),
        profiles=tuple(profiles),
        tp=tp,
    )


def _slower(seconds: tuple[float, ...], kind: int) -> tuple[float, ...]:
    return tuple(cost * (1 + 0.5 * kind) for cost in seconds)
