"""Read `hf:FOLDER`, a folder of transformers' with `config.json`, as a model file.

config.json --AutoConfig--> configuration --architectures[0]--> model(), without its weights
                                          --what it is for----> inputs(batch_size)
*.safetensors beside it ------------------------------------> the weights that `run` starts from,
                                                              read by name or, if transformers
                                                              renames or stacks them, by that, as
                                                              pytorch_model*.bin is

    ...ForCausalLM, ...LMHeadModel, ...ForMaskedLM       tokens, which are the labels too
    ...ForConditionalGeneration with words alone         tokens, and labels
    ...ForSequenceClassification                         tokens, and a class a row
    ...ForImageClassification                            an image, and a class a row

`hf:FOLDER?length=4096` gives rows of 4096 tokens. Code in the folder is never run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend.construct import build_fake

SCHEME = "hf:"

LENGTH = 1024
"""Tokens of a row by default, or as many as the model has positions for, if fewer."""

IMAGE = 224
"""Pixels of a side of an image where the configuration does not say."""

Batch = dict[str, Tensor]

_OTHER_WEIGHTS = (
    "are its weights quantized? A model file can load and dequantize them in model(), and save "
    "what it has for --weights"
)


def as_module(source: str) -> SimpleNamespace:
    """A namespace of the functions that a model file would define, and the weights' folder or None.

    Its function `loaded` builds the whole model with its weights.

    Args:
        source: `hf:FOLDER` or `hf:FOLDER?length=TOKENS`.

    Raises:
        ModelError: transformers is not installed; the folder is missing or has no configuration
            that transformers can read; or the inputs of the model's class are not known.
    """
    folder, length = _parsed(source)
    transformers, config = _configuration(folder)
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    model_class = getattr(transformers, str(name), None)
    if name is None or model_class is None:
        raise ModelError(
            f"{folder / 'config.json'}: architectures is {name!r}, expected a class of "
            f"transformers {transformers.__version__}",
            hint="write a model file whose model() builds it",
        )
    inputs = _inputs(name, config, length)
    if inputs is None:
        raise ModelError(
            f"{source}: what a {name} takes is not known here",
            hint="write a model file: model() builds it from its config, inputs(batch_size) gives "
            "a batch",
        )

    def model() -> nn.Module:
        built: nn.Module = model_class(config)
        return built

    def loaded() -> nn.Module:
        transformers.utils.logging.disable_progress_bar()
        try:
            pretrained, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=torch.get_default_dtype(),
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # as for a configuration
            raise _unread(folder, transformers, error, _OTHER_WEIGHTS) from error
        if report["missing_keys"]:
            raise ModelError(
                f"{folder}: holds no {min(report['missing_keys'])!r}, which a {name} has",
                hint="transformers would begin with random numbers there; a model file may do so",
            )
        whole_model: nn.Module = pretrained
        return whole_model

    kinds = "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin"
    weights = folder if any(any(folder.glob(kind)) for kind in kinds) else None
    if weights is not None:
        _check_not_quantized(folder, config)
    return SimpleNamespace(model=model, inputs=inputs, weights=weights, loaded=loaded)


def _check_not_quantized(folder: Path, config: Any) -> None:
    """Refuse a folder whose weights are codes: of them nothing can be trained.

    Raises:
        ModelError: names how they were quantized.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    how = found.get("quant_method") if isinstance(found, dict) else type(found).__name__
    raise ModelError(
        f"{folder / 'config.json'}: the weights beside it are quantized ({how}), and training "
        "changes weights themselves",
        hint="save the model dequantized: model.dequantize(), then model.save_pretrained(OTHER); "
        "a folder of config.json alone can be planned as it is",
    )


def lacks(folder: Path, model: Callable[[], nn.Module]) -> bool:
    """Whether a folder's weights lack a tensor of the model under all of its names.

    They do where transformers renames or stacks tensors as it reads them: experts that are stored
    one by one, a body that is stored without its head's prefix, or files of torch.save, whose
    names are often older.
    """
    if not _whole(folder):  # an error where they are read
        return False
    stored: set[str] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(str(path), framework="pt") as file:
                stored |= {*file.keys()}
        except SafetensorError:  # no weights at all: an error where they are read
            return False
    names: dict[int, set[str]] = {}
    for name, tensor in build_fake(model).state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), set()).add(name)
    return not all(stored & aliases for aliases in names.values())


def _whole(folder: Path) -> bool:
    """Whether a folder has all files that its index of weights names."""
    try:
        names = {
            name
            for index in folder.glob("*.safetensors.index.json")
            for name in json.loads(index.read_text())["weight_map"].values()
        }
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)


def hint_for(path: Path) -> str | None:
    """The hint for a transformers folder that was given without `hf:`."""
    return f"{SCHEME}{path} names a folder of transformers'" if _has_config(path) else None


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _parsed(source: str) -> tuple[Path, int | None]:
    path, _, query = source.removeprefix(SCHEME).partition("?")
    options = parse_qs(query, keep_blank_values=True)
    length = options.pop("length", [""])[-1]
    if options or (query and not (length.isdigit() and int(length) > 1)):
        raise ModelError(
            f"{source}: {query!r} says nothing about a row", hint=f"{SCHEME}{path}?length=2048"
        )
    folder = Path(path).expanduser()
    if not _has_config(folder):
        raise ModelError(
            f"{source}: there is no {folder / 'config.json'}",
            hint="name a folder on this machine; `hf download NAME --local-dir FOLDER` makes one",
        )
    return folder, int(length) if length else None


def _configuration(folder: Path) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"hf:{folder} is read by transformers, which is not installed",
            hint="pip install transformers",
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises errors of every kind for a wrong file
        hint = "a model with code of its own needs a model file that imports it"
        raise _unread(folder / "config.json", transformers, error, hint) from error
    return transformers, config


def _unread(path: Path, transformers: Any, error: Exception, hint: str) -> ModelError:
    reason = str(error).strip().partition("\n")[0]
    return ModelError(
        f"{path}: transformers {transformers.__version__} cannot read it: {reason}", hint=hint
    )


def _inputs(name: str, config: Any, length: int | None) -> Callable[[int], Batch] | None:
    """The function that makes a batch for a class of models; None: unknown."""
    images, words = name.endswith("ForImageClassification"), hasattr(config, "vocab_size")
    if images:
        return lambda rows: _images(config, rows) | _classes(config, rows)
    if not words:
        return None
    tokens = _length(config) if length is None else length
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")):
        return lambda rows: dict.fromkeys(("input_ids", "labels"), _words(config, rows, tokens))
    if name.endswith("ForConditionalGeneration") and getattr(config, "is_encoder_decoder", False):
        return lambda rows: {
            "input_ids": _words(config, rows, tokens),
            "labels": _words(config, rows, tokens),
        }
    if name.endswith("ForSequenceClassification"):
        # Each row ends in a word that is no padding: the models look for the last one.
        return lambda rows: {"input_ids": _words(config, rows, tokens)} | _classes(config, rows)
    return None


def _length(config: Any) -> int:
    most = [
        value
        for key in ("max_position_embeddings", "n_positions")
        if isinstance(value := getattr(config, key, None), int) and value > 0
    ]
    return min([LENGTH, *most])


def _words(config: Any, rows: int, tokens: int) -> Tensor:
    """Random words, of shape (rows, tokens); word 0 and the padding are left out."""
    padding = getattr(config, "pad_token_id", None)
    least = padding + 1 if isinstance(padding, int) and padding < 16 else 1
    return torch.randint(least, config.vocab_size, (rows, tokens))


def _images(config: Any, rows: int) -> Batch:
    size = getattr(config, "image_size", None) or IMAGE
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": torch.randn(rows, getattr(config, "num_channels", 3), *sides)}


def _classes(config: Any, rows: int) -> Batch:
    return {"labels": torch.randint(0, config.num_labels, (rows,))}
