"""A folder of transformers' is a model file: its class, batches of what it takes, its weights."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from autopipe.errors import ModelError
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.terminal import paths
from tests.support.shell import Shell

TEXT = {"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
PICTURE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32}
SOUND = {
    **{"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"intermediate_size": 16, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}

FAMILIES = {
    "LlamaForCausalLM": ("llama", TEXT | {"intermediate_size": 16, "max_position_embeddings": 32}),
    "GPT2LMHeadModel": ("gpt2", {"vocab_size": 61, "n_embd": 8, "n_layer": 2, "n_head": 2}),
    "BertForMaskedLM": ("bert", TEXT | {"intermediate_size": 16}),
    "RobertaForMaskedLM": (
        "roberta",
        TEXT | {"intermediate_size": 16, "max_position_embeddings": 34, "pad_token_id": 1},
    ),
    "BertForSequenceClassification": ("bert", TEXT | {"intermediate_size": 16}),
    "LlamaForSequenceClassification": (
        "llama",
        TEXT | {"intermediate_size": 16, "pad_token_id": 0},
    ),
    "T5ForConditionalGeneration": (
        "t5",
        {"vocab_size": 61, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        | {"decoder_start_token_id": 0},
    ),
    "BertForTokenClassification": ("bert", TEXT | {"intermediate_size": 16}),
    "BertForQuestionAnswering": ("bert", TEXT | {"intermediate_size": 16}),
    "ViTForImageClassification": ("vit", PICTURE | {"intermediate_size": 16, "patch_size": 16}),
    "SegformerForSemanticSegmentation": (
        "segformer",
        {"num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [8]}
        | {"patch_sizes": [7], "strides": [4], "num_attention_heads": [1], "mlp_ratios": [2]}
        | {"decoder_hidden_size": 8, "image_size": 32},
    ),
    "WhisperForConditionalGeneration": (
        "whisper",
        {"vocab_size": 61, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 4}
        | {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 20}
        | {"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        | {"decoder_start_token_id": 1},
    ),
    "ASTForAudioClassification": (
        "audio-spectrogram-transformer",
        {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_length": 64}
        | {"num_mel_bins": 32, "intermediate_size": 16},
    ),
    "Wav2Vec2ForCTC": ("wav2vec2", SOUND | {"conv_dim": [8] * 7}),
    "Wav2Vec2BertForCTC": ("wav2vec2-bert", SOUND | {"feature_projection_input_dim": 6}),
}
"""By the class that a folder names: the type of its configuration, and entries of it."""


def folder(path: Path, name: str = "LlamaForCausalLM", **more: object) -> Path:
    kind, entries = FAMILIES[name]
    path.mkdir(exist_ok=True)
    config = {"model_type": kind, "architectures": [name], **entries, **more}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_folder_holds_takes_the_batches_made_for_it(tmp_path: Path, name: str) -> None:
    file = model_file.load(f"hf:{folder(tmp_path, name)}?length=16")
    model = file.model()
    assert type(model).__name__ == name
    for rows in (2, 3):
        batch = file.inputs(rows)
        loss = model(**batch).loss
        assert {len(tensor) for tensor in batch.values()} == {rows}
        assert loss.ndim == 0 and loss.isfinite() and loss.requires_grad


def test_rows_have_the_length_that_is_asked_for_or_all_places_of_a_small_model(
    tmp_path: Path,
) -> None:
    assert words(model_file.load(f"hf:{folder(tmp_path)}")) == 32
    assert words(model_file.load(f"hf:{tmp_path}?length=8")) == 8


def test_a_model_that_counts_positions_from_2_takes_its_rows(tmp_path: Path) -> None:
    """Bug: roberta-base has 514 positions, and rows of as many tokens raised an error."""
    file = model_file.load(f"hf:{folder(tmp_path, 'RobertaForMaskedLM')}")
    assert words(file) == 32
    assert file.model()(**file.inputs(2)).loss.isfinite()


def words(file: ModelFile) -> int:
    return int(file.inputs(2)["input_ids"].shape[1])


@pytest.mark.long
def test_it_is_planned_and_trained_from_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All words are as likely as each other to the weights of the folder: a loss of log(61)."""
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.plan(1)  # the figures of this machine, for the plan below
    where = folder(tmp_path / "llama")
    config = transformers.AutoConfig.from_pretrained(where)
    own = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        own.lm_head.weight.fill_(1.0)
    own.save_pretrained(where)
    said = shell("plan", "hf:llama?length=8", "--cluster", "cluster.json", "--batch", "2")
    assert said.code == 0, said.err
    assert Plan.load("plan.json").source == "hf:llama?length=8"
    said = shell("run", "plan.json", "--steps", "1")
    assert said.code == 0, said.err
    assert f"loss {math.log(61):.3f}" in said.out
    assert "random" not in said.err
    (where / "model.safetensors").unlink()
    said = shell("run", "plan.json", "--steps", "1")
    assert "the folder has no weights, so that the run begins with random numbers" in said.err


def test_a_folder_without_the_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(tmp_path, monkeypatch, capsys)
    folder(tmp_path / "llama")
    for command in ("plan", "check"):
        assert shell(command, "llama").error.endswith(
            "hint: hf:llama names a folder of transformers'"
        )


def test_a_plan_finds_its_folder_from_anywhere(tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    assert paths.relative(f"hf:{tmp_path}/llama?length=8", plans) == "hf:../llama?length=8"


@pytest.mark.parametrize(
    ("made", "source", "error", "hint"),
    [
        ({}, "hf:nowhere", "there is no nowhere/config.json", "hf download NAME"),
        ({}, "hf:llama?size=3", "'size=3' says nothing about a row", "length=2048"),
        ({}, "hf:llama?length=²", "'length=²' says nothing about a row", "length=2048"),
        ({"architectures": []}, "hf:llama", "architectures is None", "model()"),
        ({"architectures": ["Nobody"]}, "hf:llama", "architectures is 'Nobody'", "model()"),
        ({"architectures": ["logging"]}, "hf:llama", "architectures is 'logging'", "model()"),
        ({"architectures": ["LlamaModel"]}, "hf:llama", "what a LlamaModel takes", "inputs("),
        ({"model_type": "nobody"}, "hf:llama", "cannot read it", "code of its own"),
    ],
)
def test_refusals(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: dict[str, object],
    source: str,
    error: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "llama", **made)
    with pytest.raises(ModelError) as refused:
        model_file.load(source)
    assert error in refused.value.message
    assert hint in (refused.value.hint or "")


def test_a_configuration_that_was_not_copied_whole(tmp_path: Path) -> None:
    config = folder(tmp_path) / "config.json"
    config.write_text(config.read_text()[:40])
    with pytest.raises(ModelError, match="config.json, line 1") as refused:
        model_file.load(f"hf:{tmp_path}")
    assert "code of its own" not in str(refused.value)


@pytest.mark.long
def test_experts_that_transformers_stacks_as_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the disk each expert has matrices of its own; the model has one tensor of all of them.

    A run begins with the loss that transformers has for its first batch. The matmul of experts is
    looked into, though what eager calls in fp32 has no fake version.
    """
    shell = Shell(tmp_path, monkeypatch, capsys)
    config = transformers.MixtralConfig(
        vocab_size=61, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    torch.manual_seed(3)
    plain = transformers.MixtralForCausalLM(config)
    plain.save_pretrained("experts")
    file = model_file.load("hf:experts?length=12")
    build, weights = file.start()
    assert build is not file.model and weights is None
    found = build().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.state_dict().items())
    shell.plan(1)  # the figures of this machine, for the plan below
    words = ("hf:experts?length=12", "--cluster", "cluster.json", "--batch", "4")
    assert shell("plan", *words).code == 0
    assert not Plan.load("plan.json").regions
    said = shell("run", "plan.json", "--steps", "1", "--metrics", "m.jsonl")
    batch = next(iter(file.stream(4, 0, 1, 0)))
    expected = plain(**batch).loss.item()
    assert json.loads(Path("m.jsonl").read_text())["loss"] == pytest.approx(expected), said.err


def test_weights_that_have_the_models_names_are_read_by_rank(tmp_path: Path) -> None:
    """The tied head is stored once, under the embedding's name."""
    config = transformers.GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    file = model_file.load(f"hf:{tmp_path}?length=12")
    assert file.start() == (file.model, tmp_path)


def test_weights_as_torch_save_has_written_them(tmp_path: Path) -> None:
    """`pytorch_model.bin` of an older folder. Bug: the run began with random numbers, without a
    word, as if there were no weights."""
    where = folder(tmp_path, "GPT2LMHeadModel")
    own = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(where)
    )
    torch.save(own.state_dict(), where / "pytorch_model.bin")
    file = model_file.load(f"hf:{where}?length=12")
    build, weights = file.start()
    assert file.weights == where and weights is None
    found = build().state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.state_dict().items())


def test_a_folder_that_lacks_a_file_of_weights(tmp_path: Path) -> None:
    """Its index names it: each rank reads weights by it, and misses the file with a sentence of
    `weights`. Bug: transformers was asked, and its FileNotFoundError had no hint."""
    config = transformers.GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path, max_shard_size="3KB")
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    file = model_file.load(f"hf:{tmp_path}?length=12")
    assert file.start() == (file.model, tmp_path)


def test_a_tensor_that_transformers_would_make_up(tmp_path: Path) -> None:
    """A body without a head is read by transformers, and the head would be random numbers."""
    config = transformers.LlamaConfig(**FAMILIES["LlamaForCausalLM"][1])
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    build, _ = model_file.load(f"hf:{folder(tmp_path)}?length=12").start()
    with pytest.raises(ModelError, match=r"holds no 'lm_head\.weight', which a LlamaForCausalLM"):
        build()


def test_weights_that_transformers_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `ImportError: Loading a GPTQ quantized model requires ...`, of no folder."""
    config = transformers.LlamaConfig(**FAMILIES["LlamaForCausalLM"][1])
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    build, _ = model_file.load(f"hf:{folder(tmp_path)}?length=12").start()

    def lacks_a_package(*args: object, **kwargs: object) -> None:
        raise ImportError("Loading a GPTQ quantized model requires optimum")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", lacks_a_package)
    with pytest.raises(ModelError, match=r"transformers .* cannot read it: Load.*\nhint: are its"):
        build()


def test_quantized_weights_are_refused_before_planning(tmp_path: Path) -> None:
    """Only `run` said so, after a plan was made for a cluster."""
    found = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = f"hf:{folder(tmp_path, quantization_config=found)}"
    model_file.load(source)  # without weights it is a description of the model
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"beside it are quantized \(fp8\)") as refused:
        model_file.load(source)
    assert "model.dequantize()" in str(refused.value.hint)
