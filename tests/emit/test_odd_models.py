"""Files of plans for models that are no transformers. Bug stories: `emit` fell over each."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.emit.emit import stages
from autopipe.emit.forward_code import Body
from tests.support import inprocess
from tests.support.odd_models import Filters, Net, built, planned, square


def test_labels_that_tensor_parallel_ranks_deal_out_have_a_name() -> None:
    """Such a conversion is named after an entry of the batch, where others are after a node."""
    body = Body(inprocess.traced("gpt")[0].graph)
    assert body.name("<y>>S(1)") == "y_S_1"
    assert body.name("h.3/add/1>S(1)") == "h_3_add_1_S_1"


class Tagger(nn.Module):
    """Too few ops for four stages of equal length: one of them has none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, words: Tensor) -> Tensor:
        return self.mix(self.words(words)).tanh() @ self.words.weight.T


def sentences(rows: int) -> dict[str, Tensor]:
    words = torch.arange(rows * 6).reshape(rows, 6) % 12
    return {"words": words, "tags": words.flip(1)}


def tag_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["tags"].flatten())


def test_a_stage_that_takes_nothing_and_gives_nothing() -> None:
    plan = autopipe.plan(
        built(Tagger),
        sentences,
        loss=tag_loss,
        cluster=inprocess.close_together(4),
        batch_size=8,
        pp=2,
        tp=2,
        micro_batches=2,
        schedule="zb-v",
        precision="bf16-autocast",
    )
    files = stages(built(Tagger), plan, tag_loss)
    empty = [text for text in files.values() if "return ()" in text]
    assert empty and not any("takes" in text or "gives" in text for text in empty)


def test_a_block_within_another_that_is_called_by_itself_is_put_there() -> None:
    """It had no code: where the outer block is made stood the inner one's weights alone."""
    plan = planned(built(Filters), pp=2, micro_batches=2)
    text = "".join(stages(built(Filters), plan, square).values())
    for number in ("0", "2"):  # of the one between, a stage has the kernel, the other the rest
        assert f'self.filters["{number}"].add_module("made", Sequential())' in text
        assert f'self.filters["{number}"].made(' in text


class OfWholeNumbers(Net):
    def inside(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden) * torch.empty_like(hidden).random_(0, 5)


def test_an_op_whose_name_is_a_word_of_python() -> None:
    """It was written `aten.random_.from(...)`, which is no Python."""
    for text in stages(built(OfWholeNumbers), planned(built(OfWholeNumbers)), square).values():
        compile(text, "stage", "exec")


class Remembers(nn.Module):
    """Gives what a caller may leave: the buffer is what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        with torch.no_grad():
            self.mean.copy_(hidden.mean(0))
        return (hidden * self.mean).tanh()


class LeavesOneResult(Net):
    def begin(self) -> None:
        self.layers = nn.ModuleList(Remembers() for _ in range(3))

    def inside(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden, given = layer(hidden), hidden
        return given


def test_a_module_whose_result_nobody_reads_and_a_buffer_read_after_a_write() -> None:
    """The first was written `-> tuple[]`, which is no Python; of the other the copy that backward
    reads took the place of the model's."""
    texts = stages(built(LeavesOneResult), planned(built(LeavesOneResult)), square).values()
    assert any("aten.clone.default(self.mean)" in text for text in texts)
    assert not any("self.mean = aten" in text for text in texts)
    assert any("-> tuple[()]:" in text for text in texts)
    for text in texts:
        compile(text, "stage", "exec")
