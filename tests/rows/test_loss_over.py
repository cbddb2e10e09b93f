"""What a plan's loss is over, `loss_over`: rows, each micro-batch, or the batch."""

import pytest

import autopipe
from autopipe import Plan
from autopipe.errors import AutopipeError, ModelError
from autopipe.util import codec
from tests.support.grouped_losses import Net, checked, inputs, negatives, tokens_counted
from tests.support.inprocess import machine
from tests.support.shell import LINE, changed


def test_each_micro_batchs_own_loss_may_be_asked_for():
    assert checked(negatives, loss_over="micro-batch") == []
    with pytest.raises(ModelError) as error:
        checked(tokens_counted, loss_over="micro-batch")
    assert str(error.value) == (
        "loss_over is 'micro-batch', the mean of each micro-batch's own loss, and the loss is a "
        "sum and a count, which are added over the whole batch\n"
        "hint: return sum / count, or leave loss_over at 'rows'"
    )


def planned(**options):
    return autopipe.plan(
        Net, inputs, loss=negatives, cluster=machine(2), batch_size=8, tp=1, **options
    )


def test_it_is_a_plan_that_is_refused():
    with pytest.raises(ModelError, match="it compares rows with each other"):
        planned()
    with pytest.raises(ModelError, match="it compares rows with each other"):
        planned(dp=1)


def test_whoever_leaves_the_batch_whole_may_compare_its_rows():
    plan = planned(pp=1, dp=1, micro_batches=1)
    assert plan.batch.micro_batches == plan.mesh.dp == 1
    assert plan.loss_over == "rows"


def test_the_plan_knows_what_was_asked_for():
    assert planned(loss_over="micro-batch").loss_over == "micro-batch"
    with pytest.raises(AutopipeError, match="there is no loss_over 'token'"):
        planned(loss_over="token")


def test_a_model_file_or_an_option_says_what_the_loss_is_over(autopipe):
    autopipe.write("net.py", changed(".mean()", ".sum()"))
    codec.save(machine(2), autopipe.folder / "cluster.json")
    ask = ("plan", "net.py", "--cluster", "cluster.json", "--pp", "2", "--batch", "8")
    line = LINE['    return ((outputs - batch["target"]) ** 2).mean()']
    found = autopipe(*ask).error
    assert found.startswith(f"{autopipe.folder / 'net.py'}:{line}: the loss of 4 rows is ")
    assert autopipe.files() == ["cluster.json", "net.py"]
    assert autopipe(*ask, "--loss-over", "micro-batch").code == 0
    assert Plan.load(autopipe.folder / "plan.json").loss_over == "micro-batch"
    autopipe.write("net.py", changed(".mean()", ".sum()") + 'loss_over = "micro-batch"\n')
    assert autopipe(*ask).code == 0
    autopipe.edit(lambda plan: plan.update(loss_over="token"))
    assert autopipe("explain", "plan.json").error == (
        "plan.loss_over: expected one of rows, micro-batch, batch, found token\n\n"
        "hint: mend that place in the plan file, or make the plan again with `autopipe plan`"
    )
    autopipe.write("net.py", changed(".mean()", ".sum()") + 'loss_over = "token"\n')
    assert autopipe(*ask).error == (
        "net.py: loss_over is 'token', expected one of rows, micro-batch, batch"
    )
