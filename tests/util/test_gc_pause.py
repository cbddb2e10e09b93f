"""The search for garbage rests inside, and is as it was before outside."""

import gc
import subprocess
import sys

import pytest

from autopipe.util.gc_pause import collector_paused


def test_it_rests_inside_and_searches_outside() -> None:
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "whoever turned it off turns it on"
    assert gc.isenabled()


def test_it_searches_again_after_an_error() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError("a plan that failed")
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_rests_for_as_long_as_a_function_runs() -> None:
    assert collector_paused()(gc.isenabled)() is False
    assert gc.isenabled()


ALONE = """
import gc
from autopipe.util.gc_pause import loading

with loading():
    made = [[number] for number in range(1000)]
assert gc.get_freeze_count() == 0 and gc.isenabled()
old = {id(one) for one in gc.get_objects(generation=2)}
assert all(id(one) in old for one in made)
"""

BESIDE = """
import gc
from autopipe.util.gc_pause import loading

mine = [[number] for number in range(1000)]
gc.freeze()
with loading():
    pass
searched = {id(one) for one in gc.get_objects()}
assert not any(id(one) in searched for one in mine), "somebody else has frozen them"
gc.unfreeze()
searched = {id(one) for one in gc.get_objects()}
assert all(id(one) in searched for one in mine)
"""


@pytest.mark.parametrize("script", [ALONE, BESIDE], ids=["nothing frozen", "some frozen"])
def test_what_is_loaded_is_old_and_what_is_frozen_stays_so(script: str) -> None:
    """In a process that holds nothing else: to list all objects of one of tests takes seconds."""
    subprocess.run([sys.executable, "-c", script], check=True)


LOADED = "sys.modules['triton'] = gc"

ENDING = """
import atexit, gc, sys
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 0))  # runs last
from autopipe.util import gc_pause
{}
"""


def ending(calls: str) -> list[str]:
    """At the end of a process with these calls: whether the collector is on, and objects frozen."""
    run = [sys.executable, "-c", ENDING.format(calls)]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()


def test_a_command_that_ends_soon_searches_no_more() -> None:
    assert ending("gc_pause.until_exit()") == ["False", "True"]


@pytest.mark.parametrize("call", ["in_a_program", "until_exit", "skip_last_search"])
def test_what_triton_has_made_is_searched_for(call: str) -> None:
    """Bug: under torch 2.15 each command and each rank that failed ended with a hundred lines of
    what triton's bindings had left."""
    frozen = [ending(f"{triton}; gc_pause.{call}()")[1] for triton in ("pass", LOADED)]
    assert frozen == ["True", "False"]


HARD = """
import atexit
from autopipe.util import gc_pause
{}
atexit.register(lambda: print("taken apart"))
print("written")
gc_pause.end(0)
"""


@pytest.mark.parametrize(("before", "said"), [("", "taken apart"), ("gc_pause.until_exit()", "")])
def test_it_ends_at_once_only_if_it_was_to_end_soon(before: str, said: str) -> None:
    run = [sys.executable, "-c", HARD.format(before)]
    ended = subprocess.run(run, capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n") == ["written", *([said] if said else []), ""]
