"""Read `hf:FOLDER`, a folder of transformers' with `config.json`, as a model file.

config.json --AutoConfig--> configuration --architectures[0]--> model(), without its weights
                                          --what it is for----> inputs(batch_size)
*.safetensors beside it ------------------------------------> the weights that `run` starts from,
                                                              read by name or, if transformers
                                                              renames or stacks them, by that, as
                                                              pytorch_model*.bin is

    ...ForCausalLM, ...LMHeadModel, ...ForMaskedLM       the tokens are the labels too
    ...ForConditionalGeneration of two parts, ...ForCTC  tokens as labels
    ...For{Sequence,Image,Audio}Classification           a class a row
    ...ForTokenClassification                            a class a token
    ...ForQuestionAnswering                              the first and the last token of an answer
    ...ForSemanticSegmentation                           a class a pixel

What comes in, by the class's `main_input_name`, are tokens, images, samples or spectra of sound.
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

from autopipe.errors import ModelError, PlanError
from autopipe.frontend.construct import build_fake
from autopipe.util import json_text

SCHEME = "hf:"

LENGTH = 1024
"""Tokens of a row by default, or as many as the model has positions for, if fewer."""

MULTIPLE = 8
"""Rows have a multiple of so many tokens: RoBERTa has 514 positions for 512 tokens."""

IMAGE = 224
"""Pixels of a side of an image where the configuration does not say."""

SAMPLES = 16_000
"""Samples of a sound: a second, at the rate that wav2vec 2.0 (arXiv:2006.11477, 4.1) and its
successors take."""

FRAMES = 512
"""Frames of a spectrum, of 10 ms each, where the configuration does not say."""

SPOKEN = 8
"""Words that are said in a sound: `ForCTC` wants fewer than there are frames."""

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
    model_class: Any = getattr(transformers, str(name), None)
    known = isinstance(model_class, type) and issubclass(model_class, nn.Module)
    if not known:
        raise ModelError(
            f"{folder / 'config.json'}: architectures is {name!r}, expected a class of "
            f"transformers {transformers.__version__}",
            hint="write a model file whose model() builds it",
        )
    inputs = _inputs(model_class, config, length)
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
    if options or (query and not (length.isdecimal() and int(length) > 1)):
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
        json_text.parse(folder / "config.json", "configuration")
    except PlanError as error:
        raise ModelError(error.message, hint=error.hint) from error
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


def _inputs(kind: Any, config: Any, length: int | None) -> Callable[[int], Batch] | None:
    """The function that makes a batch for a class of models; None: unknown."""
    tokens = _length(config) if length is None else length
    shape = _shape(kind.main_input_name, config, tokens)
    end = next((end for end in _LABELS if kind.__name__.endswith(end)), None)
    answers = end != "ForConditionalGeneration" or getattr(config, "is_encoder_decoder", False)
    if shape is None or end is None or not answers:
        return None
    makes = _words if kind.main_input_name == "input_ids" else _numbers

    def inputs(rows: int) -> Batch:
        given = makes(config, rows, *shape)
        return {kind.main_input_name: given} | _LABELS[end](config, given, tokens)

    return inputs


def _shape(name: str, config: Any, tokens: int) -> tuple[int, ...] | None:
    """The shape of a row of a class's main input; None: unknown."""

    def has(*fields: str) -> tuple[int, ...]:
        """The numbers of some fields; empty if one is missing."""
        found = [getattr(config, field, None) for field in fields]
        return tuple(value for value in found if isinstance(value, int)) if all(found) else ()

    if name == "input_ids":
        return (tokens,) if has("vocab_size") else None
    if name == "pixel_values":
        size = getattr(config, "image_size", None) or IMAGE
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return getattr(config, "num_channels", 3), *sides
    if name == "input_values":
        return has("max_length", "num_mel_bins") or (SAMPLES,)
    if name == "input_features":
        if of_whisper := has("num_mel_bins", "max_source_positions"):
            return of_whisper[0], 2 * of_whisper[1]  # its second convolution has a stride of 2
        features = has("input_feat_per_channel") or has("feature_projection_input_dim")
        return (FRAMES, *features) if features else None
    return None


def _length(config: Any) -> int:
    most = [
        value
        for key in ("max_position_embeddings", "n_positions", "max_target_positions")
        if isinstance(value := getattr(config, key, None), int) and value > 0
    ]
    least = min([LENGTH, *most])
    return least - least % MULTIPLE if least > MULTIPLE else least


def _words(config: Any, rows: int, tokens: int) -> Tensor:
    """Random words, of shape (rows, tokens); word 0 and the padding are left out.

    What classifies a row looks for its last word that is no padding.
    """
    padding = getattr(config, "pad_token_id", None)
    least = padding + 1 if isinstance(padding, int) and padding < 16 else 1
    return torch.randint(least, config.vocab_size, (rows, tokens))


def _numbers(config: Any, rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape)


def _itself(config: Any, given: Tensor, tokens: int) -> Batch:
    return {"labels": given}


def _answer(config: Any, given: Tensor, tokens: int) -> Batch:
    return {"labels": _words(config, len(given), tokens)}


def _spoken(config: Any, given: Tensor, tokens: int) -> Batch:
    return {"labels": _words(config, len(given), SPOKEN)}


def _class(config: Any, given: Tensor, tokens: int, *places: int) -> Batch:
    """A class for each row, or for each of so many places in it."""
    return {"labels": torch.randint(0, config.num_labels, (len(given), *places))}


def _class_a_token(config: Any, given: Tensor, tokens: int) -> Batch:
    return _class(config, given, tokens, tokens)


def _class_a_pixel(config: Any, given: Tensor, tokens: int) -> Batch:
    return _class(config, given, tokens, *given.shape[2:])


def _span(config: Any, given: Tensor, tokens: int) -> Batch:
    ends = torch.randint(0, tokens, (2, len(given))).sort(0).values
    return {"start_positions": ends[0], "end_positions": ends[1]}


_LABELS: dict[str, Callable[[Any, Tensor, int], Batch]] = {
    **dict.fromkeys(("ForCausalLM", "LMHeadModel", "ForMaskedLM"), _itself),
    "ForConditionalGeneration": _answer,
    "ForCTC": _spoken,
    **dict.fromkeys(
        ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification"), _class
    ),
    "ForTokenClassification": _class_a_token,
    "ForSemanticSegmentation": _class_a_pixel,
    "ForQuestionAnswering": _span,
}
"""The end of a class's name -> the labels of a batch: given the configuration, what comes in, and
the tokens of a row."""
