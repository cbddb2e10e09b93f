"""`autopipe checkpoint`: what it shows, the differences it finds, and what other tools load."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import autopipe
from autopipe import CheckpointError
from autopipe.frontend import model_file
from tests.support.inprocess import machine
from tests.support.shell import Shell, ranks

MODEL = """
import torch
from transformers import AutoModelForCausalLM


def model():
    return AutoModelForCausalLM.from_pretrained("start", attn_implementation="eager")


def inputs(batch_size):
    tokens = torch.randint(90, (batch_size, 8))
    return {"input_ids": tokens, "labels": tokens}
"""


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def stages(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def home(stages: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kept/`: a GPT-2 of transformers, with a tied head, trained in stages for three steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("home")
    config = GPT2Config(
        vocab_size=90, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder / "start")
    (folder / "gpt2.py").write_text(MODEL)
    path = sys.path.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        file = model_file.load("gpt2.py")
        sys.path[:] = path
        autopipe.plan(
            file.model, file.inputs, cluster=machine(stages), batch_size=4, pp=stages,
            micro_batches=2, schedule="1f1b", source="gpt2.py",
        ).save("plan.json")  # fmt: skip
    said = ranks(
        stages, "-m", "autopipe", "run", "plan.json", "--steps", "3", "--checkpoints", "kept",
        "--save-every", "2", "--save", "trained.safetensors", "--quiet", folder=folder,
    )  # fmt: skip
    assert said.code == 0, said.err
    return folder


@pytest.fixture
def shell(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    return Shell(tmp_path, monkeypatch, capsys)


def test_info(stages: int, shell: Shell) -> None:
    """Of the newest one; bytes are of fp32 weights and Adam's two moments of each."""
    facts = json.loads(shell("checkpoint", "info", "kept", "--json").out)
    parameters = 90 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert facts == {
        "folder": "kept/step-00000003",
        "step": 3,
        "plan": f"tp 1 x pp {stages} x dp 1, ZeRO-0, 1f1b",
        "precision": "fp32",
        "ranks": stages,
        "tensors": 28,
        "model_bytes": 4 * parameters,
        "optimizer": "AdamW",
        "optimizer_bytes": 2 * 4 * parameters + 4 * 28,
    }
    assert "optimizer        AdamW\n" in shell("checkpoint", "info", "kept").out


def test_info_of_one_whose_plan_is_gone(shell: Shell) -> None:
    """Its tensors are there, which a run goes on from; it was an error about a plan asked for."""
    (shell.folder / "kept/step-00000003/plan.json").unlink()
    facts = json.loads(shell("checkpoint", "info", "kept", "--json").out)
    assert (facts["plan"], facts["precision"], facts["tensors"]) == (None, None, 28)
    told = shell("checkpoint", "info", "kept").out
    assert "plan             not known: kept/step-00000003/plan.json is gone\n" in told


BEFORE = "kept/step-00000002 is the one before it"


def flip_last_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_one_that_is_whole_and_one_that_is_not(shell: Shell) -> None:
    said = shell("checkpoint", "verify", "kept")
    assert said.out == "kept/step-00000003: whole, every checksum is right\n"
    path = shell.folder / "kept/step-00000003/rank-0.safetensors"
    flip_last_bit(path)
    said = shell("checkpoint", "verify", "kept")
    assert "rank-0.safetensors was changed after it was written" in said.error
    assert said.error.endswith(f"hint: {BEFORE}, which `run --resume` uses if it is whole")
    path.write_bytes(b"")
    assert said.error.count(BEFORE) == shell("checkpoint", "info", "kept").error.count(BEFORE) == 1
    assert "hint" not in shell("checkpoint", "info", "kept/step-00000003").error


def test_two_that_are_alike_and_two_that_are_not(shell: Shell) -> None:
    said = shell("checkpoint", "verify", "kept/step-00000003", "kept/step-00000003")
    assert said.code == 0 and said.out.endswith("are the same to the bit\n")
    said = shell("checkpoint", "verify", "kept/step-00000002", "kept/step-00000003")
    assert said.code == 1
    first, second, *_ = said.out.splitlines()
    assert first == "the step is 2 and 3"
    assert second == "transformer.wte.weight: 2880 of 2880 elements differ, from 0 on"


def test_one_file(shell: Shell) -> None:
    """The very tensors that --save has written; the tied one under both of its names."""
    assert shell("checkpoint", "convert", "kept", "-o", "m.safetensors").out == "m.safetensors\n"
    found, expected = load_file("m.safetensors"), load_file("trained.safetensors")
    assert found.keys() == expected.keys() >= {"lm_head.weight", "transformer.wte.weight"}
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.long
def test_weights_to_start_from(stages: int, shell: Shell) -> None:
    """Of the newest checkpoint, and of what was made of it: those that --save has written."""
    assert shell("checkpoint", "convert", "kept", "-o", "dcp", "--dcp").out == "dcp\n"
    sources = ("trained.safetensors", "kept", "dcp")
    assert len({loss_with(weights, stages, shell) for weights in sources}) == 1


def loss_with(weights: str, stages: int, shell: Shell) -> str:
    """Of the first step."""
    run = ("run", "plan.json", "--steps", "1", "--log-every", "1", "--weights", weights)
    said = ranks(stages, "-m", "autopipe", *run, folder=shell.folder)
    found = re.search(r"^step 1/1  loss (\S+)", said.err, re.MULTILINE)
    assert said.code == 0 and found is not None, said.err
    return found[1]


@pytest.mark.parametrize("most", [1000, 1 << 26])
def test_a_folder_that_torch_distributed_loads(most: int, shell: Shell) -> None:
    """In chunks of so many bytes, each in a file; the tied tensor under both of its names."""
    from autopipe.runtime.checkpoint.convert_distributed import to_distributed
    from autopipe.runtime.checkpoint.stored import Stored

    expected = load_file("trained.safetensors")
    to_distributed(Stored.open(Path("kept/step-00000003")), Path("dcp"), most=most)
    files = len([*Path("dcp").glob("*.distcp")])
    assert files == len(expected) if most > 4 * 90 * 32 else files > 2 * len(expected)
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id="dcp")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_such_a_folder_is_asked_for(shell: Shell) -> None:
    assert shell("checkpoint", "convert", "kept", "-o", "dcp", "--dcp").out == "dcp\n"
    assert (shell.folder / "dcp" / ".metadata").exists()


def test_a_folder_of_a_damaged_checkpoint(shell: Shell) -> None:
    """Nothing is left where it was to be."""
    written = shell.folder / "kept/step-00000003/rank-0.safetensors"
    written.write_bytes(bytes(written.stat().st_size))
    said = shell("checkpoint", "convert", "kept", "-o", "dcp", "--dcp")
    assert "rank-0.safetensors was changed after it was written" in said.error
    assert not [*shell.folder.glob("*dcp*")]


def test_another_dtype(shell: Shell) -> None:
    shell("checkpoint", "convert", "kept", "-o", "m.safetensors", "--dtype", "bfloat16")
    found, expected = load_file("m.safetensors"), load_file("trained.safetensors")
    assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found)


def test_a_folder_that_transformers_loads(shell: Shell) -> None:
    """The logits are those of the trained model, in a process that knows no autopipe model."""
    from transformers import AutoModelForCausalLM

    said = shell("checkpoint", "convert", "kept", "-o", "out", "--config", "start")
    assert said.out == "out\n"
    exported = AutoModelForCausalLM.from_pretrained("out", attn_implementation="eager").eval()
    trained = AutoModelForCausalLM.from_pretrained("start", attn_implementation="eager").eval()
    tokens = torch.arange(8)[None]
    assert not torch.equal(exported(tokens).logits, trained(tokens).logits)
    trained.load_state_dict(load_file("trained.safetensors"))
    assert torch.equal(exported(tokens).logits, trained(tokens).logits)


@pytest.mark.parametrize(
    ("rename", "warned"),
    [pytest.param("", False, marks=pytest.mark.long), ("transformer.", False), ("x.", True)],
)
def test_names_that_the_folder_has_not(rename: str, warned: bool, shell: Shell) -> None:
    """On the hub GPT-2's names do not begin with `transformer.`, and transformers knows that."""
    weights = load_file("start/model.safetensors")
    if rename == "transformer.":
        weights = {name.removeprefix(rename): tensor for name, tensor in weights.items()}
    elif rename:
        weights = {name.replace(".attn.", ".attn.x."): t for name, t in weights.items()}
    save_file(weights, "start/model.safetensors")
    said = shell("checkpoint", "convert", "kept", "-o", "out", "--config", "start")
    assert said.code == 0 and said.out == "out\n"
    expected = (
        "warning: start's weights have no 'transformer.h.0.attn.c_attn.weight', nor 7 more of"
    )
    assert (expected in said.err) == warned and ("warning" in said.err) == warned
    (shell.folder / "start/model.safetensors").write_text("version https://git-lfs.github.com/spec")
    assert shell("checkpoint", "convert", "kept", "-o", "out", "--config", "start").code == 0


def test_many_files(shell: Shell) -> None:
    """As transformers shards what is larger than 5 GB."""
    from transformers import AutoModelForCausalLM

    from autopipe.runtime.checkpoint import convert
    from autopipe.runtime.checkpoint.stored import Stored

    stored = Stored.open(shell.folder / "kept/step-00000003")
    paths = convert.to_folder(stored, Path("out"), Path("start"), most=40_000)
    assert len(paths) > 2 and sum(len(load_file(path)) for path in paths) == 29
    exported = AutoModelForCausalLM.from_pretrained("out").state_dict()
    for name, tensor in load_file("trained.safetensors").items():
        assert torch.equal(exported[name], tensor)


def test_weights_of_another_dtype(shell: Shell) -> None:
    """transformers loads them as what they are, not as what they were."""
    from transformers import AutoModelForCausalLM

    words = ("convert", "kept", "-o", "half", "--config", "start", "--dtype", "bfloat16")
    assert shell("checkpoint", *words).code == 0
    assert AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16
    half, whole = load_file("half/model.safetensors"), load_file("trained.safetensors")
    assert all(torch.equal(half[name], whole[name].bfloat16()) for name in half)


def test_two_models_are_not_mixed_in_a_folder(shell: Shell) -> None:
    """transformers loads whichever weights it finds first; those of the same names are replaced."""
    from autopipe.runtime.checkpoint import convert
    from autopipe.runtime.checkpoint.stored import Stored

    stored = Stored.open(shell.folder / "kept/step-00000003")
    for folder, most in (("one", convert.MOST), ("parts", 40_000)):
        first = convert.to_folder(stored, Path(folder), Path("start"), most=most)
        assert convert.to_folder(stored, Path(folder), Path("start"), most=most) == first
    with pytest.raises(CheckpointError, match=r"^one has other weights, model\.safetensors: "):
        convert.to_folder(stored, Path("one"), Path("start"), most=40_000)
    with pytest.raises(CheckpointError, match=r"^parts has other weights, model-00001-of-"):
        convert.to_folder(stored, Path("parts"), Path("start"))
    written = shell.folder / "kept/step-00000003/rank-0.safetensors"
    written.write_bytes(bytes(written.stat().st_size))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        convert.to_folder(stored, Path("parts"), Path("start"), most=40_000)
    assert not Path("parts", convert.INDEX).exists(), "half of another model is not to be loaded"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("info", "nowhere"), "there is no folder nowhere\nhint: a checkpoint is a folder step-NN"),
        (("info", "start"), "start has no checkpoint\n"),
        (("convert", "kept"), "convert: the output has no name"),
        (("convert", "kept", "-o", "out"), "convert: out is a folder, and transformers needs a"),
        (("convert", "kept", "-o", "out", "--config", "kept"), "kept has no config.json"),
        (("convert", "kept", "-o", "m.safetensors", "--dtype", "x"), "--dtype x: weights have no"),
        (
            ("convert", "kept", "-o", "m.safetensors", "--dtype", "int8"),
            "--dtype int8: weights have no such dtype\nhint: one of float64, float32, ",
        ),
        (
            ("convert", "kept", "-o", "m.safetensors", "--config", "start"),
            "convert: m.safetensors is one file, and --config writes a folder\nhint: -o FOLDER",
        ),
        (
            ("convert", "kept", "-o", "gpt2.py", "--config", "start"),
            "gpt2.py cannot be made: File exists",
        ),
        (("convert", "kept", "-o", "kept", "--dcp"), "kept is not empty, it has step-00000002: a"),
        (
            ("convert", "kept", "-o", "m.safetensors", "--dcp"),
            "convert: m.safetensors is one file, and --dcp writes a folder\nhint: -o FOLDER --dcp",
        ),
        (
            ("convert", "kept", "-o", "out", "--dcp", "--config", "start"),
            "convert: --dcp and --config write two different kinds of folders",
        ),
        (("info", "plan.json"), "plan.json is a file\nhint: a checkpoint is a folder step-NN"),
        (
            ("info", "kept", "kept"),
            "info has no use for a second checkpoint\nhint: autopipe checkpoint verify takes it",
        ),
        (
            ("info", "kept", "-o", "x"),
            "info has no use for --output\nhint: autopipe checkpoint con",
        ),
        (
            ("verify", "kept", "--json"),
            "verify has no use for --json\nhint: autopipe checkpoint in",
        ),
    ],
)
def test_what_cannot_be_done(words: tuple[str, ...], error: str, shell: Shell) -> None:
    assert error in shell("checkpoint", *words).error.replace("\n\n", "\n")


@pytest.mark.parametrize("folder", ["kept", "kept/step-00000003"])
def test_a_report_is_of_no_checkpoint(folder: str, shell: Shell) -> None:
    said = shell("report", folder)
    assert f"{folder} has checkpoints" in said.error
    assert f"hint: autopipe checkpoint info {folder};" in said.error


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ("--resume",),
            "--resume needs a folder of checkpoints, and none was given",
        ),
        (("--save-every", "3"), "--save-every needs a folder of checkpoints"),
        (("--keep", "3"), "--keep needs a folder of checkpoints"),
        (
            ("--checkpoints", "kept"),
            "kept has step-00000003 of an earlier run\nhint: --resume",
        ),
        (("--checkpoints", "gpt2.py"), "--checkpoints gpt2.py: expected a folder, found a file"),
    ],
)
def test_runs_that_are_refused(words: tuple[str, ...], error: str, shell: Shell) -> None:
    assert error in shell("run", "plan.json", *words).error.replace("\n\n", "\n")
