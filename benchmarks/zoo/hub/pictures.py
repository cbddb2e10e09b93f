"""timm and torchvision: one architecture of each file of timm, the small ones of torchvision."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.subject import Model, Subject, entropy, integers, noise, seeded

SMALL = ("nano", "pico", "femto", "atto", "tiny", "xs", "_s", "small", "18", "b0", "0")
"""Parts of the names of small variants, the first of a file to be taken."""

BIG = ("base", "large", "huge", "giant", "1536", "201", "_s24", "412m", "_so", "_m", "_l")
"""Parts of the names of variants that are taken last."""

LARGE = (
    *("_h_", "_l_", "huge", "large", "wide", "x4", "x8", "x16", "x32", "64x4d", "_base", "_m"),
    *("152", "101", "161", "169", "201", "vgg13", "vgg16", "vgg19", "b_32", "_8gf", "16gf", "32gf"),
    *("_b2", "_b3", "_b4", "_b5", "_b6", "_b7", "128gf", "_l"),
)
"""Parts of the names of torchvision's larger variants, which are left out."""

CLASSES = 10


SEGMENTS = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
FILMS = {"r3d_18": (8, 64), "mc3_18": (8, 64), "r2plus1d_18": (8, 64), "swin3d_t": (8, 64)}
"""Torchvision's models of films, with the frames and the height of one."""


def subjects(every: bool = True) -> Iterator[Subject]:
    """Those of the libraries that are installed; with `every` those of films and pixels too."""
    if find_spec("torchvision") is not None:
        if find_spec("timm") is not None:
            yield from _of_timm()
        yield from _of_torchvision()
        for name in SEGMENTS if every else ():
            yield Subject(f"torchvision/segmentation.{name}/segmentation", partial(_segments, name))
        for name in FILMS if every else ():
            yield Subject(f"torchvision/video.{name}/video", partial(_films, name))


def _of_timm() -> Iterator[Subject]:
    import timm

    files: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models():
        files[timm.models.model_entrypoint(name).__module__.rpartition(".")[2]].append(name)
    for file, names in sorted(files.items()):
        small = min(names, key=_size)
        yield Subject(f"timm/{file}.{small}/image", partial(_timm, small))


def _size(name: str) -> tuple[bool, bool, int, str]:
    """Large, or not known to be small; a number is one that begins so: 0 is in 002, not in 107."""
    small = any(re.search(rf"(?<!\d){w}" if w.isdigit() else w, name) for w in SMALL)
    return any(w in name for w in BIG), not small, len(name), name


FEWER: tuple[dict[str, Any], ...] = (
    {"depth": 2},
    {"depths": (1, 1, 1, 1)},
    {"depths": (1, 1, 1)},
    {"layers": (1, 1, 1, 1)},
    {"num_blocks": (1, 1, 1, 1)},
)
"""What makes a model of timm less deep, where it takes such a word."""

SIDES = (64, 96, 112, 128, 224, 256)
"""Heights of pictures, of which the first that a model takes is taken."""


def _timm(name: str) -> Model:
    """A variant as shallow as its words allow, and the smallest pictures that it takes.

    Raises:
        RuntimeError: it takes none; says what the last raised.
    """
    import timm

    whole: Any = partial(timm.create_model, name, num_classes=CLASSES)
    make = next((m for words in FEWER if _can(m := partial(whole, **words))), whole)
    failed = ""
    for side in SIDES:
        sized = partial(make, img_size=side)
        for one in (sized, make) if _can(sized) else (make,):
            try:
                return _classifier(seeded(one), side)
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
    raise RuntimeError(failed)


def _can(make: Callable[[], Any]) -> bool:
    """Whether a model can be made with these words; it is made without memory."""
    try:
        with torch.device("meta"):
            make()
    except Exception:
        return False
    return True


def _of_torchvision() -> Iterator[Subject]:
    from torchvision import models

    for name in sorted(models.list_models(module=models), key=_size):
        if not any(word in name for word in LARGE) or name == "vit_b_16":
            file = models.get_model_builder(name).__module__.rpartition(".")[2]
            yield Subject(f"torchvision/{file}.{name}/image", partial(_torchvision, name))


def _torchvision(name: str) -> Model:
    from torchvision import models

    extra: dict[str, Any] = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    side = {"inception_v3": 299, "maxvit_t": 224}.get(name, 64)  # which these have by themselves
    extra |= {"image_size": side} if name.startswith("vit") else {}
    make = partial(models.get_model, name, weights=None, num_classes=CLASSES, **extra)
    return _classifier(seeded(make), side)


def _segments(name: str) -> Model:
    """A class for each pixel, trained as torchvision's own script does."""
    from torchvision import models

    extra = {} if name.startswith("lraspp") else {"aux_loss": True}
    words: Any = {"weights": None, "weights_backbone": None, "num_classes": CLASSES, **extra}
    pictures, labels = noise(3, 64, 64), integers(64, 64, low=0, below=CLASSES, seed=3)
    own = "input" if name.startswith("lraspp") else "x"

    def inputs(rows: int) -> dict[str, Any]:
        return {own: pictures[:rows].clone(), "labels": labels[:rows].clone()}

    def loss(outputs: Any, batch: Any) -> Any:
        beside = 0.5 * entropy(outputs["aux"], batch) if "aux" in outputs else 0.0
        return entropy(outputs["out"], batch) + beside

    return Model(seeded(partial(models.get_model, name, **words)), inputs, loss)


def _films(name: str) -> Model:
    """Films [b, 3, frames, side, side] and labels [b]."""
    from torchvision import models

    frames, side = FILMS[name]
    films, labels = noise(3, frames, side, side), integers(low=0, below=CLASSES, seed=3)

    def inputs(rows: int) -> dict[str, Any]:
        return {"x": films[:rows].clone(), "labels": labels[:rows].clone()}

    make = partial(models.get_model, name, weights=None, num_classes=CLASSES)
    return Model(seeded(make), inputs, first_entropy)


def _classifier(build: Any, side: int) -> Model:
    """A model of pictures [b, 3, side, side] and labels [b]."""
    model: nn.Module = build()
    own = next(iter(model.forward.__code__.co_varnames[1:2]), "x")
    pictures, labels = noise(3, side, side), integers(low=0, below=CLASSES, seed=3)

    def inputs(rows: int) -> dict[str, Any]:
        return {own: pictures[:rows].clone(), "labels": labels[:rows].clone()}

    found = Model(build, inputs, first_entropy)
    found.eager(model, inputs(2)).backward()
    return found


def first_entropy(outputs: Any, batch: Any) -> Any:
    """Cross-entropy of the logits, of several outputs of the first."""
    while not isinstance(outputs, torch.Tensor):
        outputs = outputs[0]
    return entropy(outputs.flatten(1) if outputs.dim() == 2 else outputs, batch)
