"""The words that a user gives for a job besides its plan, each checked for scripts and manifests.

A word may only have characters without a meaning for a shell, sbatch and YAML; a path may have any
character that does not end a line, and is quoted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopipe.errors import AutopipeError


@dataclass(frozen=True)
class Words:
    """A user's words for a job; None, 0 and empty: not given.

    Attributes:
        name: the name of the job; a DNS label, which every target takes.
        run: further options of `autopipe run`.
        checkpoints: the folder for checkpoints; the job saves before it ends, and resumes.
        save_every, keep: steps from one checkpoint to the next; how many are kept.
        time_limit: seconds.
        image: the container image.
        interface: the network interface towards the other nodes.
        hosts: the name or address of each node, in the plan's order.
        port: where rank 0 listens; 0: the target's own choice.
        restarts: how often ranks are started again after a failure; None: 3 times, where the
            target starts them again.
        style: what Slurm starts: a task a rank (`srun`), or torchrun on each node (`torchrun`).
        venv: a Python environment to activate on each node.
        array: Slurm's array, `0-3` or `0-9%2`: a run for each number, which is its seed, with its
            own checkpoints.
        partition, account, qos, constraint: Slurm's options of these names.
        cpus, memory: those of a task of Slurm's, or of a node's container.
        namespace, claim: Kubernetes' namespace, and its claim for a volume that all nodes mount at
            `folder`.
        folder: the folder of the plan in a container.
    """

    name: str = "autopipe"
    run: tuple[str, ...] = ()
    checkpoints: str | None = None
    save_every: int = 0
    keep: int = 0
    time_limit: int = 0
    image: str | None = None
    interface: str | None = None
    hosts: tuple[str, ...] = ()
    port: int = 0
    restarts: int | None = None
    style: str | None = None
    venv: str | None = None
    array: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus: int = 0
    memory: str | None = None
    namespace: str | None = None
    claim: str | None = None
    folder: str | None = None

    @property
    def starts_again(self) -> int:
        """How often ranks are started again."""
        return 3 if self.restarts is None else self.restarts


STYLES = ("srun", "torchrun")

_LABEL = (r"[a-z]([-a-z0-9]*[a-z0-9])?", 40, "small letters, digits and -, a letter first")
_PLAIN = (r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", 64, "letters, digits, _ . , and -")
_HOST = (r"[A-Za-z0-9_]([A-Za-z0-9_.:-]*[A-Za-z0-9_])?", 253, "a host name or an address")

_FORMS: dict[str, tuple[str, int, str]] = {
    "name": _LABEL,
    "namespace": _LABEL,
    "claim": _LABEL,
    "image": (r"[A-Za-z0-9/][A-Za-z0-9._/:@#+-]*", 255, "an image, as registry/name:tag"),
    "interface": (r"[A-Za-z0-9][A-Za-z0-9_.-]*", 15, "an interface's name, as eth0"),
    "partition": _PLAIN,
    "account": _PLAIN,
    "qos": _PLAIN,
    "constraint": (r"[A-Za-z0-9_][A-Za-z0-9_.,&|*-]*", 64, "Slurm's features, as a100&nvlink"),
    "array": (r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*(%\d{1,6})?", 64, "numbers, as 0-9%2"),
    "memory": (r"\d{1,6}(Mi|Gi)", 8, "a number and Mi or Gi, as 64Gi"),
    "style": ("|".join(STYLES), 8, " or ".join(STYLES)),
}
"""Of each word its letters (RFC 1035 for what becomes a name of DNS), the longest, and the same in
words."""

_LEAST = {"save_every": 0, "keep": 0, "time_limit": 0, "port": 0, "restarts": 0, "cpus": 0}
_MOST = {"port": 65535, "restarts": 1000, "cpus": 4096, "time_limit": 365 * 86400}


def option(name: str) -> str:
    """The command line's option for a word."""
    return {"time_limit": "--time"}.get(name, f"--{name.replace('_', '-')}")


def check(words: Words) -> None:
    """Refuse words that no script or manifest may hold.

    Raises:
        AutopipeError: names the word, what is allowed, and what was found.
    """
    for name, (form, longest, letters) in _FORMS.items():
        value = getattr(words, name)
        if value is not None and not (len(value) <= longest and re.fullmatch(form, value, re.A)):
            raise _refused(name, f"{letters}, at most {longest}", value)
    if words.array is not None:
        _check_array(words.array)
    for host in words.hosts:
        if not (len(host) <= _HOST[1] and re.fullmatch(_HOST[0], host, re.A)):
            raise _refused("hosts", _HOST[2], host)
    for name, least in _LEAST.items():
        value, most = getattr(words, name), _MOST.get(name, 10**9)
        if value is not None and not least <= value <= most:
            raise _refused(name, f"{least} to {most}", value)
    for name in ("checkpoints", "venv", "folder"):
        if getattr(words, name) is not None:
            check_text(option(name), getattr(words, name))
    for word in words.run:
        check_text("an option of `autopipe run`", word)
    if words.checkpoints is None and (words.save_every or words.keep):
        raise AutopipeError(
            "--save-every and --keep are of checkpoints, and no folder was named for them",
            hint="--checkpoints FOLDER",
        )


def _check_array(text: str) -> None:
    """Refuse ranges that sbatch refuses: those that run backwards, and none at a time."""
    numbers, at_a_time, most = text.partition("%")
    for term in numbers.split(","):
        first, dash, last = term.partition("-")
        if dash and int(last) < int(first):
            raise AutopipeError(
                f"--array: expected a range from its lower to its upper number, found {term!r} in "
                f"{text!r}",
                hint=f"--array {last}-{first}",
            )
    if at_a_time and not int(most):
        raise AutopipeError(
            f"--array: expected at least 1 run at a time after %, found {most} in {text!r}",
            hint=f"--array {numbers}%1, or {numbers} for all at once",
        )


def check_text(what: str, text: str) -> None:
    """Refuse a text that would end a line or that a file system does not take.

    Raises:
        AutopipeError: names `what` it is of.
    """
    if not text or len(text) > 4096 or not text.isprintable():
        raise AutopipeError(
            f"{what}: expected text of one line that can be printed, found {text[:60]!r}"
        )


def _refused(name: str, expected: str, found: object) -> AutopipeError:
    return AutopipeError(f"{option(name)}: expected {expected}; found {str(found)[:60]!r}")


def seconds_of(text: str) -> int:
    """A time limit as Slurm takes it: minutes, MM:SS, HH:MM:SS or D-HH:MM:SS, in seconds.

    Raises:
        AutopipeError: another form.
    """
    form = re.fullmatch(r"(?:(\d{1,3})-)?(\d{1,5})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.A)
    if form is None:
        raise AutopipeError(
            f"--time: expected minutes, HH:MM:SS or D-HH:MM:SS, found {text[:60]!r}"
        )
    days, first, second, third = (int(part or 0) for part in form.groups())
    if form[1] is not None or form[4] is not None:  # days or seconds were said: hours first
        parts = (first, second, third)
    else:
        parts = (0, first, second)  # minutes first
    found = ((days * 24 + parts[0]) * 60 + parts[1]) * 60 + parts[2]
    if found == 0:
        raise AutopipeError(f"--time: expected more than 0 seconds, found {text!r}")
    return found
