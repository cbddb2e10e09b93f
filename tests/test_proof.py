"""Programs that cannot run are refused with a sentence; those that are generated pass."""

import random
from graphlib import CycleError, TopologicalSorter

import pytest

from autopipe import transfers
from autopipe.errors import ScheduleError
from autopipe.proof import check
from autopipe.schedule import (
    Kind,
    format_programs,
    forward_only,
    gpipe,
    one_f_one_b,
    parse_programs,
)
from autopipe.transfers import Edge, insert


def chain(num_stages):
    return [Edge(stage, stage + 1, gradient=True) for stage in range(num_stages - 1)]


def random_skips(num_stages, rng):
    """A chain, each of whose possible skip connections is there or not, with gradient or not."""
    skips = [(i, j) for i in range(num_stages) for j in range(i + 2, num_stages)]
    return chain(num_stages) + [
        Edge(i, j, rng.random() < 0.7) for i, j in skips if rng.random() < 0.4
    ]


def refusal(text):
    with pytest.raises(ScheduleError) as error:
        check(parse_programs(text))
    return error.value.message


# A whole pipeline of two stages, one micro-batch, to break in every way.
WHOLE = """
    rank 0: 0POST_B0<1 0F0 0SEND_F0>1 0WAIT_B0<1 0FREE_F0>1 0B0 0REDUCE
    rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1B0 1SEND_B0>0 1FREE_B0>0 1REDUCE
"""


def test_the_whole_one_runs():
    check(parse_programs(WHOLE))


@pytest.mark.parametrize(
    ("line", "broken", "sentence"),
    [
        (
            "0F0 0SEND_F0>1",
            "0SEND_F0>1 0F0",
            "rank 0: 0SEND_F0>1 needs 0F0 before it, which stands after it",
        ),
        ("0F0 0SEND", "0SEND", "rank 0: 0SEND_F0>1 needs 0F0 before it, which is missing"),
        ("0FREE_F0>1 0B0", "0B0", "rank 0: 0SEND_F0>1 needs 0FREE_F0>1 after it, which is missing"),
        (
            "0FREE_F0>1 0B0",
            "0B0 0FREE_F0>1",
            "rank 0: 0FREE_F0>1 needs 0B0 after it, which stands before it",
        ),
        (
            "0WAIT_B0<1 0FREE_F0>1 0B0",
            "0FREE_F0>1 0B0 0WAIT_B0<1",
            "rank 0: 0WAIT_B0<1 needs 0B0 after it, which stands before it",
        ),
        ("1WAIT_F0<0 1F0", "1F0", "rank 1: 1POST_F0<0 needs 1WAIT_F0<0 after it, which is missing"),
        (
            "1POST_F0<0 1WAIT_F0<0",
            "1WAIT_F0<0 1POST_F0<0",
            "rank 1: 1WAIT_F0<0 needs 1POST_F0<0 before it, which stands after it",
        ),
        ("1F0 1B0", "1B0 1F0", "rank 1: 1B0 needs 1F0 before it, which stands after it"),
        ("1F0 1B0", "1F0 1W0 1I0", "rank 1: 1W0 needs 1I0 before it, which stands after it"),
        ("1F0", "1F0 1F0", "rank 1: 1F0 stands twice"),
        ("0SEND_F0>1", "0SEND_F0>1 0SEND_F0>1", "rank 0: 0SEND_F0>1 stands twice"),
        (
            "1FREE_B0>0 1REDUCE",
            "1REDUCE 1FREE_B0>0",
            "rank 1: 1FREE_B0>0 stands after 1REDUCE, which ends a program: all ranks meet there",
        ),
        ("1POST_F0<0 1WAIT_F0<0", "", "0SEND_F0>1 has no 1POST_F0<0: a transfer needs both ends"),
        ("1SEND_B0>0 1FREE_B0>0", "", "0POST_B0<1 has no 1SEND_B0>0: a transfer needs both ends"),
        ("1F0", "1F0 0F1", "stage 0 stands on ranks 0 and 1"),
    ],
)
def test_each_rule_has_its_sentence(line, broken, sentence):
    assert line in WHOLE
    assert refusal(WHOLE.replace(line, broken)) == sentence


def test_swapped_receives_would_swap_tensors_without_a_word():
    programs = format_programs(insert(forward_only(2, 3), chain(2), [3]))
    swapped = programs.replace("1POST_F1<0 1POST_F2<0", "1POST_F2<0 1POST_F1<0")
    assert refusal(swapped) == (
        "transfer 1 from stage 0 to stage 1 is 0SEND_F1>1 at the source and 1POST_F2<0 at the "
        "target: tensors would be swapped"
    )


def test_a_deadlock_is_followed_around_its_circle():
    """Stage 0 wants gradient 0 before it sends activation 1, stage 1 wants them the other way."""
    assert refusal("""
        rank 0: 0POST_B0<1 0F0 0SEND_F0>1 0WAIT_B0<1 0FREE_F0>1 0B0 0F1 0SEND_F1>1 0FREE_F1>1
        rank 1: 1POST_F0<0 1POST_F1<0 1WAIT_F0<0 1F0 1WAIT_F1<0 1F1 1B0 1SEND_B0>0 1FREE_B0>0
    """) == (
        "deadlock: "
        "rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F1<0 of rank 1; "
        "rank 1 waits at 1WAIT_F1<0 for 0SEND_F1>1, which comes after 0WAIT_B0<1 of rank 0"
    )


def test_a_send_that_is_waited_for_before_anybody_receives_it_is_a_deadlock():
    """A transport with buffers would let this pass, until a tensor outgrows them."""
    assert refusal("""
        rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0FREE_F1>1 0FREE_F0>1 0POST_B0<1 0WAIT_B0<1 0B0
        rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1B0 1SEND_B0>0 1FREE_B0>0 1POST_F1<0 1WAIT_F1<0 1F1
    """) == (
        "deadlock: "
        "rank 0 waits at 0FREE_F1>1 for 1POST_F1<0, which comes after 1FREE_B0>0 of rank 1; "
        "rank 1 waits at 1FREE_B0>0 for 0POST_B0<1, which comes after 0FREE_F1>1 of rank 0"
    )


def test_a_rank_that_waits_outside_the_circle_is_left_out_of_the_sentence():
    """Rank 0 waits for rank 1, which will not come: ranks 1 and 2 hold each other up."""
    assert refusal(
        """
        rank 0: 0POST_B0<1 0F0 0WAIT_B0<1 0B0
        rank 1: 1POST_B0<2 1F0 1F1 1SEND_F0>2 1WAIT_B0<2 1FREE_F0>2 1B0 1SEND_B0>0 1FREE_B0>0 \
                1SEND_F1>2 1FREE_F1>2
        rank 2: 2POST_F0<1 2POST_F1<1 2WAIT_F0<1 2F0 2WAIT_F1<1 2F1 2B0 2SEND_B0>1 2FREE_B0>1
    """.replace("\\\n", "")
    ) == (
        "deadlock: "
        "rank 1 waits at 1WAIT_B0<2 for 2SEND_B0>1, which comes after 2WAIT_F1<1 of rank 2; "
        "rank 2 waits at 2WAIT_F1<1 for 1SEND_F1>2, which comes after 1WAIT_B0<2 of rank 1"
    )


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b, forward_only])
def test_everything_that_is_generated_runs(generate):
    """All windows alike and all windows at random, on random skip connections."""
    rng = random.Random(0)
    for p in range(1, 7):
        for m in range(1, 9):
            for ahead in range(1, 5):
                check(insert(generate(p, m), random_skips(p, rng), [ahead] * (p - 1)))
            windows = [rng.randint(1, 4) for _ in range(p - 1)]
            check(insert(generate(p, m), random_skips(p, rng), windows))


def test_a_skip_connection_over_many_stages(monkeypatch):
    """With at most two sends under way on every channel, ten stages held each other up for good.

    Stage 0 would not send activation 8 to stage 9 before activation 6 was received, nor stage 9
    gradient 2 before gradient 0 was: the bound grows with the distance since.
    """
    arguments = one_f_one_b(10, 10), [*chain(10), Edge(0, 9, gradient=True)], [2] * 9
    check(insert(*arguments))
    monkeypatch.setattr(transfers, "sends_under_way", lambda channel: 2)
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0FREE_F"):
        check(insert(*arguments))


def has_cycle(programs):
    """The proof's graph, written down edge by edge and sorted by the standard library."""
    graph = TopologicalSorter()
    previous = {}
    for program in programs:
        for before, instruction in zip((None, *program), program, strict=False):
            graph.add(instruction, *([before] if before else []))
            if instruction.flow is None:
                continue
            transfer = (instruction.channel, instruction.microbatch)
            if instruction.kind in (Kind.SEND, Kind.POST):
                graph.add(transfer, instruction)
            else:
                graph.add(instruction, transfer)
            if instruction.kind is Kind.SEND:
                if instruction.channel in previous:
                    graph.add(transfer, previous[instruction.channel])
                previous[instruction.channel] = transfer
    try:
        graph.prepare()
    except CycleError:
        return True
    return False


def test_a_refusal_for_deadlock_is_a_cycle_of_the_graph_and_the_reverse():
    """Instructions are moved about at random; what the other rules let pass goes to the oracle."""
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    for _ in range(4000):
        p, m = rng.randint(2, 4), rng.randint(2, 4)
        generate = rng.choice([gpipe, one_f_one_b])
        windows = [rng.randint(1, 3) for _ in range(p - 1)]
        programs = [list(r) for r in insert(generate(p, m), random_skips(p, rng), windows)]
        for _ in range(rng.randint(1, 3)):
            program = rng.choice(programs)
            instruction = program.pop(rng.randrange(len(program) - 1))
            program.insert(rng.randrange(len(program)), instruction)
        moved = tuple(map(tuple, programs))
        try:
            check(moved)
            deadlock = False
        except ScheduleError as error:
            if not error.message.startswith("deadlock"):
                continue
            deadlock = True
        assert has_cycle(moved) is deadlock, format_programs(moved)
        seen[deadlock] += 1
    assert min(seen.values()) > 50, seen
