"""Shortcuts of planning change no plan: each switched off gives the same file."""

import pkgutil
from functools import cache

import pytest
import transformers
from torch import nn

import autopipe
from autopipe.util import shortcuts
from tests.support.inprocess import machine
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
        vocab_size=32,
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


@cache
def planned(*off: str) -> autopipe.Plan:
    with shortcuts.without(*off):
        return autopipe.plan(
            model, cluster=machine(2), inputs=ZOO["llama"].inputs, batch_size=8, pp=2
        )


@pytest.mark.parametrize("off", [(name,) for name in shortcuts.NAMES] + [shortcuts.NAMES], ids=str)
def test_a_plan_without_shortcuts_is_the_same(off: tuple[str, ...]) -> None:
    assert planned(*off) == planned()


@pytest.mark.parametrize(
    ("name", "worker"),
    [
        ("same modules", "autopipe.tracing.stubs.Span.again"),
        ("repeated costs", "autopipe.ir.repeats.leave_out"),
        ("repeated stages", "autopipe.stages.dry_run_repeats.leave_out"),
    ],
)
def test_a_shortcut_is_taken_unless_it_is_off(
    name: str, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`worker` writes or leaves out repeated layers; it has none to work on without."""
    where, _, function = worker.rpartition(".")
    calls = 0
    real = pkgutil.resolve_name(worker)

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        runs = args[1] if function == "leave_out" else True
        calls += bool(runs)
        return real(*args, **kwargs)

    monkeypatch.setattr(pkgutil.resolve_name(where), function, counted)
    planned.__wrapped__()
    assert calls
    calls = 0
    planned.__wrapped__(name)
    assert calls == 0
