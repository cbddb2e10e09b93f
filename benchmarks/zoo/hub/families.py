"""The families of the installed transformers: one `Subject` for each architecture and task.

Which there are is read from its own tables, `MODEL_FOR_..._MAPPING_NAMES`.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

from benchmarks.zoo.hub.inputs import offered
from benchmarks.zoo.hub.shrink import shrunk
from benchmarks.zoo.subject import Batch, Model, Subject, seeded, squares, taken

TASKS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "sequence-to-sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "image": "IMAGE_CLASSIFICATION",
    "ctc": "CTC",
    "speech-text": "SPEECH_SEQ_2_SEQ",
    "video": "VIDEO_CLASSIFICATION",
    "audio": "AUDIO_CLASSIFICATION",
    "detection": "OBJECT_DETECTION",
    "segmentation": "SEMANTIC_SEGMENTATION",
    "universal": "UNIVERSAL_SEGMENTATION",
    "depth": "DEPTH_ESTIMATION",
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "classification": "SEQUENCE_CLASSIFICATION",
    "contrastive": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "zero-shot-detection": "ZERO_SHOT_OBJECT_DETECTION",
    "backbone": "BACKBONE",
}
"""The tasks whose tables are read, in this order."""

HEADS = {
    "tokens": "TOKEN_CLASSIFICATION",
    "question": "QUESTION_ANSWERING",
    "choice": "MULTIPLE_CHOICE",
    "next-sentence": "NEXT_SENTENCE_PREDICTION",
    "pretraining": "PRETRAINING",
    "masked-image": "MASKED_IMAGE_MODELING",
    "image-to-image": "IMAGE_TO_IMAGE",
    "frames": "AUDIO_FRAME_CLASSIFICATION",
    "x-vector": "AUDIO_XVECTOR",
    "spectrogram": "TEXT_TO_SPECTROGRAM",
    "waveform": "TEXT_TO_WAVEFORM",
    "instances": "INSTANCE_SEGMENTATION",
    "matting": "IMAGE_MATTING",
    "normals": "NORMAL_ESTIMATION",
    "keypoints": "KEYPOINT_DETECTION",
    "pose": "POSE_ESTIMATION",
    "mask": "MASK_GENERATION",
    "characters": "TEXT_RECOGNITION",
    "visual-question": "VISUAL_QUESTION_ANSWERING",
    "document-question": "DOCUMENT_QUESTION_ANSWERING",
    "retrieval": "RETRIEVAL",
    "series": "TIME_SERIES_PREDICTION",
    "series-regression": "TIME_SERIES_REGRESSION",
    "series-classification": "TIME_SERIES_CLASSIFICATION",
    "decision": "DECISION",
}
"""Further heads of families that are tried, and families that have no other; with `every` alone."""

LONG_ENOUGH = 10.0
"""Seconds of a core in which a tiny configuration is found, or is not."""

MOST_PARAMETERS = 80_000_000
"""A configuration with more is not tiny."""


SAID = 8
"""Of what attempts raised, so many sentences."""


def subjects(every: bool = True) -> Iterator[Subject]:
    """Every architecture of the tables, each class once; without `every` those of `TASKS`."""
    classes: set[str] = set()
    for task, word in {**TASKS, **(HEADS if every else {})}.items():
        table = getattr(modeling_auto, f"MODEL_FOR_{word}_MAPPING_NAMES", {})
        homes: dict[str, list[str]] = defaultdict(list)
        for family, name in table.items():
            homes[name[0] if isinstance(name, tuple | list) else name].append(family)
        for name, of_it in homes.items():
            family = _home(name, of_it)
            if name not in classes:
                yield Subject(f"transformers/{family}/{task}", partial(found, family, name, task))
        classes |= homes.keys()


def _home(name: str, families: list[str]) -> str:
    """Of the families that use a class the one that it is named for."""
    own = [f for f in families if name.lower().startswith(f.replace("_", "").replace("-", ""))]
    return max(own or families[:1], key=len)


def found(family: str, name: str, task: str) -> Model:
    """The first tiny model of a family that runs forward and backward, and its batches.

    Raises:
        RuntimeError: none does; says what each attempt raised.
    """
    kind = getattr(transformers, name)
    own = kind.config_class
    settings = own if own is not None else CONFIG_MAPPING[family]
    failed: list[str] = []
    begin = time.process_time()
    for config in shrunk(settings, causal=task == "causal"):
        if time.process_time() - begin > LONG_ENOUGH:
            break
        build = seeded(partial(_built, kind, config))
        try:
            _check_tiny(partial(_built, kind, config))
            model = build()
        except Exception as error:
            failed.append(_said(error))
            continue
        for batch in offered(model, config, task):
            try:
                return _that_runs(build, model, batch)
            except Exception as error:
                failed.append(_said(error))
    raise RuntimeError("; ".join(list(dict.fromkeys(failed))[:SAID]))


def _check_tiny(build: Callable[[], nn.Module]) -> None:
    """Count parameters on a device without memory, as default configurations have billions."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > MOST_PARAMETERS:
        raise RuntimeError(f"{size / 1e6:.0f} M parameters")


def _built(kind: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    return kind(copy.deepcopy(config))


def _that_runs(build: functools.partial, model: nn.Module, batch: Batch) -> Model:
    """A model with this batch, if it trains."""
    rows = partial(_rows, batch)
    with torch.enable_grad():
        outputs = model(**taken(model, rows(2)))
        own = getattr(outputs, "loss", None)
        scalar = isinstance(own, torch.Tensor) and own.numel() == 1 and own.requires_grad
        model_of = Model(build, rows, None if scalar else squares)
        loss = model_of.eager(model, rows(2))
        loss.backward()
    if not loss.isfinite():
        raise RuntimeError(f"its loss is {loss.item()}")
    return model_of


def _rows(batch: Batch, rows: int) -> Batch:
    return {name: tensor[:rows].clone() for name, tensor in batch.items()}


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
