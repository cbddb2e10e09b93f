"""Shortcuts of planning change no plan: each switched off gives the same file."""

import pkgutil
from collections.abc import Callable
from functools import cache

import pytest
import transformers
from torch import nn

import autopipe
from autopipe.util import shortcuts
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.zoo import ZOO

LAYERS = 8


def model() -> nn.Module:
    """Deep enough for each of the shortcuts to be taken in each of two stages."""
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


WORKERS = {
    "same modules": "autopipe.tracing.capture.stubs.Span.again",
    "repeated costs": "autopipe.ir.repeats.leave_out",
    "repeated stages": "autopipe.joint.dry_run_repeats.leave_out",
}
"""The function behind each shortcut: it writes repeated layers, or leaves them out."""


@cache
def planned(*off: str) -> tuple[autopipe.Plan, dict[str, int]]:
    """The plan made without some shortcuts, and how often the worker of each had layers to do."""
    calls = dict.fromkeys(WORKERS, 0)

    def counting(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            runs = args[1] if real.__name__ == "leave_out" else True
            calls[name] += bool(runs)
            return real(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch, shortcuts.without(*off):
        for name, worker in WORKERS.items():
            where, _, function = worker.rpartition(".")
            real = pkgutil.resolve_name(worker)
            patch.setattr(pkgutil.resolve_name(where), function, counting(name, real))
        plan = autopipe.plan(
            model, cluster=machine(2), inputs=ZOO["llama"].inputs, batch_size=8, pp=2
        )
    return plan, calls


def test_every_shortcut_has_its_worker() -> None:
    assert set(WORKERS) == set(shortcuts.NAMES)


@pytest.mark.long
@pytest.mark.parametrize("name", chosen(WORKERS, now=("repeated costs",)))
def test_a_shortcut_is_taken_unless_it_is_off(name: str) -> None:
    plan, calls = planned()
    other, without = planned(name)
    assert calls[name] and not without[name]
    assert other == plan


@pytest.mark.long
def test_a_plan_without_any_shortcut_is_the_same() -> None:
    assert planned(*shortcuts.NAMES)[0] == planned()[0]
