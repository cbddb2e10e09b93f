"""Batches for any model of transformers, made from the names that its forward takes.

`offered` gives several kinds of batch, to be tried in turn: which entries a model needs is known to
its own code alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from benchmarks.zoo.hub.rules import LENGTH
from benchmarks.zoo.subject import MOST_ROWS, Batch, integers, noise

TEXT = {
    *("causal", "masked", "sequence-to-sequence", "classification", "tokens", "question", "choice"),
    *("next-sentence", "pretraining"),
}
"""Tasks whose batches are tokens before anything else."""

ANSWERS = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label")
"""What a head is trained on beside, or without, `labels`."""

SERIES = ("target_values", "future_values", "freq")
"""What the model of a series takes beside its past."""


def offered(model: nn.Module, config: PreTrainedConfig, task: str) -> Iterator[Batch]:
    """Batches of `MOST_ROWS` rows that a model may take, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    names = set(parameters)
    needed = {name for name, entry in parameters.items() if entry.default is Parameter.empty}
    sizes = Sizes(config)
    main = str(getattr(model, "main_input_name", "input_ids"))
    makers = _makers(sizes, task)
    answers = {"labels", *({*ANSWERS} & names)}
    asked = {*answers, *({"question_positions"} & names)}
    text = {"input_ids", *asked, *(["attention_mask"] if task != "causal" else [])}
    wishes: list[set[str]] = []
    if task in TEXT:
        wishes += [text, {main, "labels"}]
    elif task == "image-text":
        yield from _with_images(model, config, sizes, names)
        wishes += [text, {"input_ids", "labels", "pixel_values"}, {"input_ids", "pixel_values"}]
    else:
        wishes += [{main, "labels", *SERIES}, {main}]
    for more in (
        {"decoder_input_ids"},
        {"input_ids"},
        {"input_ids", "attention_mask"},
        {"pixel_values"},
        {"bbox"},
        {"attention_mask"},
        {"input_ids", "bbox", "pixel_values"},
        {"input_features", "input_ids"},
        {"input_values", "decoder_input_ids"},
        {"input_ids", "attention_mask", "pixel_values", "spatial_shapes", "pixel_attention_mask"},
        {"pixel_values", "spatial_shapes", "pixel_attention_mask"},
        {"input_ids", "mm_token_type_ids"},
        {"input_ids", "pixel_values", "image_embeds_position_mask"},
        {"input_ids", "attention_mask", "pixel_values", "image_attention_mask"},
        {"flattened_patches", "decoder_input_ids"},
    ):
        wishes += [{main, "labels"} | more, {main} | more]
    for some in (makers, *({**makers, **others} for others in _others(sizes, names, task))):
        tried: list[set[str]] = []
        for wish in wishes:
            wanted = ((wish & names if main in names else wish) | needed) & some.keys()
            if wanted and wanted not in tried:
                tried.append(wanted)
                yield {name: some[name]() for name in sorted(wanted)}


class Sizes:
    """What a configuration, or one inside it, says of the sizes of inputs."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def find(self, *names: str, default: int = 0) -> int:
        """The first number under one of these names, of the whole or of a part."""
        pending: list[Any] = [self.config]
        while pending:
            config = pending.pop(0)
            for name in names:
                try:
                    value = getattr(config, name, None)
                except AttributeError:  # of heterogeneous layers, each of which has its own
                    continue
                value = value[0] if isinstance(value, list | tuple) and value else value
                if isinstance(value, int) and not isinstance(value, bool) and value:
                    return value
            pending += [v for v in vars(config).values() if isinstance(v, PreTrainedConfig)]
        return default

    @property
    def words(self) -> int:
        """Below the tokens that mean something: rules of `shrink` put those at the end."""
        return min(self.find("vocab_size", default=100), 100)

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels = self.find("num_channels", "in_channels", "in_chans", default=3)
        side = self.find("image_size", "img_size", "input_size", "crop_size", default=64)
        return channels, side, side


def _makers(sizes: Sizes, task: str) -> Makers:
    """What makes each entry."""
    words = partial(integers, below=sizes.words)
    image = sizes.image
    frames = sizes.find("num_frames", "frames_per_clip", default=4)
    return {
        "input_ids": partial(words, LENGTH, seed=1),
        "qformer_input_ids": partial(words, 6, seed=4),
        "task_inputs": partial(words, sizes.find("task_seq_len", default=LENGTH), seed=4),
        "decoder_input_ids": partial(words, 8, seed=2),
        "attention_mask": lambda: torch.ones(MOST_ROWS, LENGTH, dtype=torch.long),
        "pixel_values": partial(noise, *((frames, *image) if task == "video" else image)),
        "pixel_values_videos": partial(noise, frames, *image),
        "mm_token_type_ids": lambda: torch.zeros(MOST_ROWS, LENGTH, dtype=torch.long),
        "image_embeds_position_mask": partial(_first_words, sizes.find("latent_query_num")),
        "bbox": lambda: torch.arange(4).repeat(MOST_ROWS, LENGTH, 1),
        "input_features": partial(noise, *_features(sizes)),
        "input_values": partial(noise, *_waves(sizes, task)),
        "flattened_patches": partial(_patches, sizes.find("patch_embed_hidden_size", default=64)),
        "image_attention_mask": lambda: torch.ones(MOST_ROWS, LENGTH, 1, dtype=torch.long),
        "past_values": partial(noise, *_series(sizes, "context_length")),
        "future_values": partial(noise, *_series(sizes, "prediction_length", "horizon_length")),
        "target_values": partial(_targets, sizes, task),
        "freq": partial(integers, low=0, below=3, seed=3),
        "labels": partial(_labels, sizes, task),
        "start_positions": partial(integers, low=0, below=LENGTH, seed=3),
        "end_positions": partial(integers, low=0, below=LENGTH, seed=4),
        "next_sentence_label": partial(integers, low=0, below=2, seed=3),
        "sentence_order_label": partial(integers, low=0, below=2, seed=3),
    }


Makers = dict[str, Callable[[], Any]]


def _first_words(count: int) -> Tensor:
    """1 for as many words as a picture stands for, which come first."""
    return (torch.arange(LENGTH) < count).long().repeat(MOST_ROWS, 1)


def _patches(width: int) -> Tensor:
    """[rows, 16, 2 + width]: patches in four rows and columns, each behind its row and column."""
    places = torch.cartesian_prod(torch.arange(1.0, 5.0), torch.arange(1.0, 5.0))
    return torch.cat([places.expand(MOST_ROWS, -1, -1), noise(len(places), width)], -1)


def _others(sizes: Sizes, names: set[str], task: str) -> Iterator[Makers]:
    """Other shapes of the same entries, of which few families take one."""
    words = partial(integers, below=sizes.words)
    channels, side, _ = sizes.image
    if task == "choice":
        yield {
            "input_ids": partial(words, 2, LENGTH, seed=1),
            "attention_mask": lambda: torch.ones(MOST_ROWS, 2, LENGTH, dtype=torch.long),
        }
    if task == "classification" and (end := sizes.find("eos_token_id")):
        yield {
            "input_ids": lambda: words(LENGTH, seed=1).index_fill(1, torch.tensor(LENGTH - 1), end)
        }
    if task == "question" and (end := sizes.find("sep_token_id")):  # a question and two texts
        yield {
            "input_ids": lambda: words(LENGTH, seed=1).index_fill(
                1, torch.tensor([6, 7, LENGTH - 1]), end
            )
        }
    if "question_positions" in names:
        at = partial(torch.full, (MOST_ROWS, 1))
        yield {
            "input_ids": lambda: words(LENGTH, seed=1).index_fill(
                1, torch.tensor([3]), sizes.find("question_token_id")
            ),
            **{name: partial(at, place) for name, place in _ANSWERED.items()},
        }
    if task == "tokens":
        yield {"labels": partial(integers, low=0, below=2, seed=3)}
    if "spatial_shapes" in names:
        patch = sizes.find("patch_size", default=8)
        across = side // patch
        yield {
            "pixel_values": partial(noise, across**2, channels * patch**2),
            "spatial_shapes": lambda: torch.full((MOST_ROWS, 2), across),
            "pixel_attention_mask": lambda: torch.ones(MOST_ROWS, across**2, dtype=torch.long),
        }
    books = sizes.find("num_codebooks")
    for shape in ((books, LENGTH), (LENGTH, books), (LENGTH, books + 1)) if books else ():
        labels = (LENGTH, books) if shape[0] == books else (LENGTH,)
        yield {
            "input_ids": partial(words, *shape, seed=1),
            "labels": partial(words, *labels, seed=1),
        }
    if {"pixel_values", "input_ids"} <= names:
        yield {"pixel_values": partial(noise, 1, *sizes.image)}
    if "input_features" in names:
        yield {"input_features": partial(noise, 64, 4 * _features(sizes)[1])}


_ANSWERED = {"question_positions": 3, "start_positions": 8, "end_positions": 9}
"""Where a question stands, and its answer."""


def _features(sizes: Sizes) -> tuple[int, ...]:
    bins = sizes.find(
        *("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"),
        *("input_dim", "mel_bins"),
        default=80,
    )
    positions = sizes.find("max_source_positions")
    if sizes.config.model_type == "whisper":
        return bins, 2 * positions
    return 64, bins


def _series(sizes: Sizes, *names: str) -> tuple[int, ...]:
    """Numbers of a series, and the channels that some families have in each."""
    channels = sizes.find("num_input_channels")
    return (sizes.find(*names), *([channels] if channels else []))


def _targets(sizes: Sizes, task: str) -> Tensor:
    targets = sizes.find("num_targets")
    if task == "series-classification":
        return integers(low=0, below=targets or 2, seed=3)
    return noise(targets)


def _waves(sizes: Sizes, task: str) -> tuple[int, ...]:
    if sizes.config.model_type == "audio-spectrogram-transformer":
        return sizes.find("max_length", default=64), sizes.find("num_mel_bins", default=128)
    return (8000,) if task == "x-vector" else (4000,)


def _labels(sizes: Sizes, task: str) -> Any:
    words = partial(integers, below=sizes.words)
    if task in ("causal", "masked", "image-text", "pretraining"):
        return words(LENGTH, seed=1)
    if task == "tokens":
        return integers(LENGTH, low=0, below=2, seed=3)
    if task == "sequence-to-sequence":
        return words(LENGTH - 7, seed=3)
    if task in ("speech-text", "image-to-text"):
        return words(8, seed=3)
    if task == "ctc":
        return words(4, seed=3)
    if task == "segmentation":
        return integers(*sizes.image[1:], low=0, below=2, seed=3)
    return integers(low=0, below=2, seed=3)


def _with_images(
    model: nn.Module, config: PreTrainedConfig, sizes: Sizes, names: set[str]
) -> Iterator[Batch]:
    """Text that begins with as many image tokens as the model makes of a picture."""
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    find = getattr(model, "get_image_features", None)
    if token is None or find is None or "pixel_values" not in names:
        return
    pictures = noise(*sizes.image)
    try:
        with torch.no_grad():
            found = find(pixel_values=pictures[:1])
    except Exception:
        return  # it wants more than pictures: it is tried with text alone
    found = getattr(found, "pooler_output", found)
    tensor = found[0] if isinstance(found, list | tuple) else found
    if not isinstance(tensor, Tensor):
        return
    count = tensor.numel() // tensor.shape[-1]
    text = integers(LENGTH, below=sizes.words, seed=1)
    head = torch.full((MOST_ROWS, count), token)
    labels = torch.cat([torch.full_like(head, -100), text], 1)
    yield {
        "input_ids": torch.cat([head, text], 1),
        "attention_mask": torch.ones_like(labels),
        "pixel_values": pictures,
        "labels": labels,
    }
