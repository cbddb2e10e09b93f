"""The cluster that a line describes: counts, kinds of devices, and what joins distant sites.

[[[sites x] nodes x] devices x] kind  [+ more nodes]  [@ latency, rate]

A100-80GB    2x8xA100-80GB    2xA100-80GB+4xA100-40GB    4x1x2xA100-80GB@30ms,1Gbit/s
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from autopipe import codec, presets
from autopipe.cluster import Cluster, Device, Group, Link, Node, check
from autopipe.errors import AutopipeError


@dataclass(frozen=True)
class LocalSpec:
    """`processes` processes on this machine; a probe turns it into a `Cluster`."""

    processes: int

    @property
    def name(self) -> str:
        """The cluster's."""
        return f"local:{self.processes}"

    @property
    def num_devices(self) -> int:
        """A device a process."""
        return self.processes


def parse(spec: str) -> Cluster | LocalSpec:
    """What a user means by `spec`; the module lists the forms.

    Raises:
        AutopipeError: a device that no preset knows, a count below 1, a form not listed.
        PlanError: the file cannot be read; see `codec.load`.
    """
    if spec.endswith(".json"):
        return _from_file(Path(spec))
    if spec.startswith("local:"):
        return LocalSpec(_count(spec, spec.removeprefix("local:"), "processes"))
    described, _, far = spec.partition("@")
    nodes: list[Node] = []
    sheets: list[presets.Datasheet] = []
    for term in described.split("+"):
        found, sheet = _nodes(spec, term)
        nodes += found
        sheets.append(sheet)
    several = len({node.site for node in nodes}) > 1
    if several != bool(far):
        raise AutopipeError(
            f"{spec!r}: expected a link behind @ if there are several sites, found "
            f"{'several sites and no link' if several else 'a link and one site'}",
            hint=_FORMS,
        )
    between = min((presets.WIRES[sheet.between] for sheet in sheets), key=lambda w: w.bandwidth)
    return Cluster(
        name=spec,
        nodes=tuple(nodes),
        within=_link(presets.WIRES[sheets[0].within]),
        between=_link(between),
        across=_far(spec, far) if far else None,
    )


def _from_file(path: Path) -> Cluster:
    """The cluster in a file; what is wrong in it is answered with where to find a right one."""
    try:
        cluster = codec.load(Cluster, path, root="cluster")
        check(cluster)
    except AutopipeError as error:
        error.hint = error.hint or _EXAMPLE
        raise
    return cluster


_EXAMPLE = (
    "`autopipe probe -o FILE` writes a whole one; figures are in seconds, bytes, bytes a second "
    "and operations a second"
)


def _nodes(spec: str, term: str) -> tuple[list[Node], presets.Datasheet]:
    """The nodes of `sites x nodes x devices x kind`, one entry a site, and their device."""
    form = re.fullmatch(r"(?:(-?\d+)x)?(?:(-?\d+)x)?(?:(-?\d+)x)?(.+)", term.strip())
    if form is None:
        raise AutopipeError(f"no cluster is described by {spec!r}", hint=_FORMS)
    texts = [text for text in form.groups()[:3] if text is not None]
    words = ("sites", "nodes", "devices in a node")[3 - len(texts) :]
    counts = [_count(spec, text, what) for text, what in zip(texts, words, strict=True)]
    sites, count, devices = (1,) * (3 - len(counts)) + tuple(counts)
    kind = _known_kind(spec, form[4])
    sheet = presets.DEVICES[kind]
    group, within = Group(devices, _device(kind, sheet)), _link(presets.WIRES[sheet.within])
    alone = "+" not in spec
    return [Node(count, (group,), site, None if alone else within) for site in range(sites)], sheet


_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES = {"bit": 0.125, "b": 1.0}


def _far(spec: str, text: str) -> Link:
    """A link between sites: `30ms,1Gbit/s`, also `100MB/s`. No share is taken off."""
    form = re.fullmatch(
        r"\s*([\d.]+)\s*(s|ms|us)\s*,\s*([\d.]+)\s*([KMGT]?)(bit|B)/s\s*", text, re.IGNORECASE
    )
    if form is None:
        raise AutopipeError(
            f"{spec!r}: expected latency and rate behind @, found {text!r}", hint="30ms,1Gbit/s"
        )
    power = " KMGT".index(form[4].upper() or " ")
    rate = float(form[3]) * 1000**power * _BYTES[form[5].lower()]
    if rate <= 0:
        raise AutopipeError(
            f"{spec!r}: expected a rate above 0 behind @, found {form[3]}", hint="30ms,1Gbit/s"
        )
    return Link(float(form[1]) * _SECONDS[form[2].lower()], rate)


_FORMS = (
    "2x8xA100-80GB (nodes x devices x kind), 8xH100-80GB, 2xA100-80GB+4xA100-40GB (a node of "
    "each), 4x1x2xA100-80GB@30ms,1Gbit/s (sites), local:4 (processes on this machine) or a .json "
    "file"
)


def _count(spec: str, text: str, what: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise AutopipeError(f"{spec!r}: expected a number of {what}, found {text!r}", hint=_FORMS)
    if int(text) < 1:
        raise AutopipeError(
            f"{spec!r}: expected at least 1 for the {what}, found {text}", hint=_FORMS
        )
    return int(text)


def _known_kind(spec: str, asked: str) -> str:
    by_lower = {kind.lower(): kind for kind in presets.DEVICES}
    asked_lower = asked.lower()
    if asked_lower in by_lower:
        return by_lower[asked_lower]

    def distance(kind: str) -> tuple[bool, float]:
        likeness = difflib.SequenceMatcher(None, asked_lower, kind).ratio()
        return not kind.startswith(asked_lower), -likeness

    close = [by_lower[kind] for kind in sorted(by_lower, key=distance)]
    raise AutopipeError(
        f"{spec!r}: no device {asked!r} is known",
        hint=f"known, the closest first: {', '.join(close)}; describe others in a .json file",
    )


def _device(kind: str, sheet: presets.Datasheet) -> Device:
    share = sheet.matmul_share * sheet.steady
    return Device(
        kind=kind,
        memory=presets.usable(sheet.memory),
        flops={dtype: peak * share for dtype, peak in sheet.flops.items()},
        bandwidth=sheet.bandwidth * presets.MEMORY_SHARE,
        launch=presets.LAUNCH,
        source=f"{share:.0%} of the peaks of {sheet.source}",
        half=presets.HALF,
    )


def _link(wire: presets.Wire) -> Link:
    return Link(wire.latency, wire.bandwidth * presets.LINK_SHARE)
