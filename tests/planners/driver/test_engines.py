"""Compiled stages or not: who asks for them, who gets them."""

import pytest

import autopipe
from autopipe.errors import AutopipeError
from tests.support.pipes import ZOO
from tests.support.pipes import machine as processes

GPUS = "1x2xA100-80GB"


def plan(cluster=GPUS, name="gpt", **asked):
    case = ZOO[name]
    asked = {"cluster": cluster, "batch_size": 8, **asked}
    return autopipe.plan(case.model, case.inputs, loss=case.loss, **asked)


def test_on_gpus_stages_are_compiled():
    made = plan()
    assert made.compiled and made.zero < 3
    assert not plan(compile=False).compiled


def test_processes_of_this_machine_compile_where_asked():
    assert not plan(processes(2), pp=2).compiled
    assert plan(processes(2), pp=2, compile=True).compiled


def test_zero_3_runs_as_it_is():
    """It gathers block by block, and graphs have no blocks."""
    made = plan(zero=3, dp=2)
    assert (made.compiled, made.zero) == (False, 3)


@pytest.mark.parametrize(("tp", "dp"), [(1, 8), (2, 4)])
def test_where_only_zero_3_fits_it_is_taken(tp, dp):
    shape = {"cluster": "1x8xA100-80GB", "pp": 1, "tp": tp, "dp": dp}
    (stage,) = plan(**shape, zero=3).stages
    made = plan(**shape, memory=stage.predicted.memory.peak)
    assert (made.compiled, made.zero) == (False, 3)


def test_an_lstm_is_not_compiled():
    assert not plan(name="lstm", precision="fp32").compiled


def test_asked_for_what_cannot_be():
    with pytest.raises(AutopipeError, match="aten.lstm.input"):
        plan(name="lstm", precision="fp32", compile=True)


def test_compiled_stages_keep_less():
    compiled, eager = (plan(pp=2, compile=way) for way in (True, False))
    for mine, its in zip(compiled.stages, eager.stages, strict=True):
        assert mine.predicted.memory.activations < its.predicted.memory.activations
