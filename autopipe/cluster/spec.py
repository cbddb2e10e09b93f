"""The cluster that a line describes: counts, kinds of devices, and what joins distant sites.

[[[sites x] nodes x] devices x] kind  [+ more nodes]  [@ latency, rate]

A100-80GB    2x8xA100-80GB    2xA100-80GB+4xA100-40GB    4x1x2xA100-80GB@30ms,1Gbit/s

For this machine a line only gives the number of processes: local:4, or cpu:4 for its processor.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from autopipe.cluster import datasheets, efficiency
from autopipe.cluster.checks import LONGEST, check, check_number, check_units
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.errors import AutopipeError
from autopipe.util import codec


@dataclass(frozen=True)
class LocalSpec:
    """`processes` processes on this machine; a probe turns it into a `Cluster`.

    Args:
        cpu: on its processor, whether or not it has GPUs; else a process has a GPU where there are
            any.
    """

    processes: int
    cpu: bool = False

    @property
    def name(self) -> str:
        """The line that describes it."""
        return f"{'cpu' if self.cpu else 'local'}:{self.processes}"

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
    where, colon, processes = spec.partition(":")
    if colon and where in ("local", "cpu"):
        return LocalSpec(_processes(spec, processes), cpu=where == "cpu")
    described, _, far = spec.partition("@")
    nodes: list[NodeGroup] = []
    sheets: list[datasheets.Datasheet] = []
    for term in described.split("+"):
        found, sheet = _nodes(spec, term)
        nodes += found
        sheets.append(sheet)
    check_number(repr(spec), sum(node.count * node.num_devices for node in nodes))
    several = len({node.site for node in nodes}) > 1
    if several != bool(far):
        raise AutopipeError(
            f"{spec!r}: expected a link behind @ if there are several sites, found "
            f"{'several sites and no link' if several else 'a link and one site'}",
            hint=_FORMS,
        )
    between = min((datasheets.LINKS[sheet.between] for sheet in sheets), key=lambda w: w.bandwidth)
    return Cluster(
        name=spec,
        nodes=tuple(nodes),
        within=link_of(datasheets.LINKS[sheets[0].within]),
        between=link_of(between),
        across=_far(spec, far) if far else None,
    )


def _from_file(path: Path) -> Cluster:
    """The cluster in a file; an error's hint says where to find a correct one."""
    try:
        cluster = codec.load(Cluster, path, root="cluster")
        check(cluster)
        check_units(cluster)
    except AutopipeError as error:
        error.hint = error.hint or _EXAMPLE
        raise
    return cluster


_EXAMPLE = (
    "`autopipe probe -o FILE` writes a whole one; figures are in seconds, bytes, bytes a second "
    "and operations a second"
)


def _nodes(spec: str, term: str) -> tuple[list[NodeGroup], datasheets.Datasheet]:
    """The nodes of `sites x nodes x devices x kind`, one entry a site, and their device."""
    form = re.fullmatch(r"(?:(-?\d+)x)?(?:(-?\d+)x)?(?:(-?\d+)x)?(.+)", term.strip())
    if form is None:
        raise AutopipeError(f"no cluster is described by {spec!r}", hint=_FORMS)
    texts = [text for text in form.groups()[:3] if text is not None]
    words = ("sites", "nodes", "devices in a node")[3 - len(texts) :]
    counts = [_count(spec, text, what) for text, what in zip(texts, words, strict=True)]
    sites, count, devices = (1,) * (3 - len(counts)) + tuple(counts)
    check_number(repr(spec), sites * count * devices)
    kind = _known_kind(spec, term.strip(), form[4])
    sheet = datasheets.DEVICES[kind]
    group, within = Group(devices, _device(kind, sheet)), link_of(datasheets.LINKS[sheet.within])
    alone = "+" not in spec
    return [
        NodeGroup(count, (group,), site, None if alone else within) for site in range(sites)
    ], sheet


_FIGURE = r"\d+(?:\.\d*)?|\.\d+"
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES = {"bit": 0.125, "b": 1.0}


def _far(spec: str, text: str) -> Link:
    """A link between sites: `30ms,1Gbit/s`, also `100MB/s`. No share is taken off."""
    form = re.fullmatch(
        rf"\s*({_FIGURE})\s*(s|ms|us)\s*,\s*({_FIGURE})\s*([KMGTkmgt]?)((?i:bit)|B)/s\s*", text
    )
    if form is None:  # a small b is a bit to many, and a byte to some
        raise AutopipeError(
            f"{spec!r}: expected latency and rate behind @, found {text!r}",
            hint="30ms,1Gbit/s, or of bytes 30ms,125MB/s",
        )
    power = " KMGT".index(form[4].upper() or " ")
    rate = float(form[3]) * 1000**power * _BYTES[form[5].lower()]
    if rate <= 0:
        raise AutopipeError(
            f"{spec!r}: expected a rate above 0 behind @, found {form[3]}", hint="30ms,1Gbit/s"
        )
    waits = float(form[1]) * _SECONDS[form[2]]
    if waits > LONGEST:
        raise AutopipeError(
            f"{spec!r}: expected a latency of at most {LONGEST:g} s, found {waits:g} s",
            hint="30ms,1Gbit/s",
        )
    return Link(waits, rate)


_FORMS = (
    "2x8xA100-80GB (nodes x devices x kind), 8xH100-80GB, 2xA100-80GB+4xA100-40GB (a node of "
    "each), 4x1x2xA100-80GB@30ms,1Gbit/s (sites), local:4 (processes on this machine), cpu:4 (on "
    "its processor) or a .json file"
)


MOST_PROCESSES = 1024
"""The most processes that one machine is measured with; none has as many devices or cores."""


def _processes(spec: str, text: str) -> int:
    found = _count(spec, text, "processes")
    check_processes(repr(spec), found)
    return found


def check_processes(asked: str, found: int) -> None:
    """Refuse more processes than one machine has a use for.

    Raises:
        AutopipeError: begins with the text `asked`.
    """
    if found > MOST_PROCESSES:
        raise AutopipeError(
            f"{asked}: expected at most {MOST_PROCESSES:,} processes on one machine, found "
            f"{found:,}",
            hint="a process for each device, or for each core of a processor",
        )


def _count(spec: str, text: str, what: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise AutopipeError(f"{spec!r}: expected a number of {what}, found {text!r}", hint=_FORMS)
    if int(text) < 1:
        raise AutopipeError(
            f"{spec!r}: expected at least 1 for the {what}, found {text}", hint=_FORMS
        )
    return int(text)


def _known_kind(spec: str, term: str, asked: str) -> str:
    """The name of the device that a term means, in whatever case it is written."""
    by_lower = {kind.lower(): kind for kind in datasheets.DEVICES}
    if asked.lower() in by_lower:
        return by_lower[asked.lower()]
    raise AutopipeError(
        f"{spec!r}: no device {asked!r} is known", hint=_meant(term) or _known(asked)
    )


def _meant(term: str) -> str | None:
    """The probable meaning of a wrong term, as a question with the right form; None: unknown."""
    here = re.fullmatch(r"(?:(\d+)\s*[x*]?\s*)?(local|cuda|gpu|cpu)[a-z]*\W*(\d*)", term, re.I)
    number = re.fullmatch(r"\d{1,2}", term)
    if here is not None or number is not None:
        count = term if here is None else here[3] or here[1] or "N"
        if here is not None and here[2].lower() == "cpu":
            return f"did you mean cpu:{count} ({count} processes on this machine's processor)?"
        every = "; without --cluster it is all of them" if count == "N" else ""
        return f"did you mean local:{count} ({count} of this machine's devices{every})?"
    found = re.fullmatch(r"((?:\d+\s*[xX*]\s*){1,3})?(?!\d+x)([\w-]+?)(?::(\d+))?", term)
    if found is None:
        return None
    before, name, behind = found.groups()
    counts = re.sub(r"\s*[xX*]\s*", "x", before) if before else f"{behind}x" if behind else ""
    *most, last = [f"{counts}{kind}" for kind in _like(name)] or [""]
    likely = f"{', '.join(most)} or {last}" if most else last
    return f"did you mean {likely}?" if likely else None


def _like(asked: str) -> list[str]:
    """Devices whose name begins so; else those of nearly that name."""
    wanted = _letters(asked)
    plain = {kind: _letters(kind) for kind in datasheets.DEVICES}
    begins = sorted(kind for kind, letters in plain.items() if letters.startswith(wanted))
    ends = sorted(kind for kind, letters in plain.items() if letters.endswith(wanted))
    if begins or ends:
        return begins or ends
    close = difflib.get_close_matches(wanted, plain.values(), n=3, cutoff=0.7)
    return [kind for letters in close for kind in plain if plain[kind] == letters]


def _letters(name: str) -> str:
    """A name without the parts that people write differently: `nvidia_h100_80gb`, `H100-80GB`."""
    return re.sub(r"[^a-z0-9]|nvidia|amd|geforce|tesla", "", name.lower())


def _known(asked: str) -> str:
    if re.match(r"\d+x", asked):
        return _FORMS  # one number too many
    families = sorted({kind.partition("-")[0] for kind in datasheets.DEVICES})
    return (
        f"known are {', '.join(families)}, some in several sizes: 8xH100 asks which; others are "
        "described in a .json file, of which `autopipe probe -o FILE` writes a whole one"
    )


def _device(kind: str, sheet: datasheets.Datasheet) -> Device:
    share = sheet.matmul_share * sheet.steady
    return Device(
        kind=kind,
        memory=efficiency.usable(sheet.memory),
        flops={dtype: peak * share for dtype, peak in sheet.flops.items()},
        bandwidth=sheet.bandwidth * efficiency.MEMORY_SHARE,
        launch=efficiency.LAUNCH,
        source=f"{share:.0%} of the peaks of {sheet.source}",
        half=efficiency.HALF,
        host=link_of(datasheets.LINKS[sheet.host]).bandwidth,
    )


def link_of(wire: datasheets.LinkSheet) -> Link:
    reached = wire.bandwidth * efficiency.LINK_SHARE
    return Link(
        wire.latency,
        reached,
        summing=min(wire.summing, reached),
        gathering=min(wire.gathering, reached),
        hop=wire.hop,
    )
