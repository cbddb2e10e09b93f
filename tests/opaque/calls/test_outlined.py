"""Lines of a method become a method of their own: the result stays the same."""

import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import CaptureError
from autopipe.opaque.calls import outlined
from tests.support.odd_models import Net, built, inputs, refusal, square, unlike
from tests.support.staged import trace_model


def plain(forward: Callable[..., object]) -> Callable[..., object]:
    """A decorator that says whose it is."""

    @functools.wraps(forward)
    def wrapper(*args: object, **kwargs: object) -> object:
        return forward(*args, **kwargs)

    return wrapper


class Base(nn.Module):
    def scaled(self, x):
        return 2 * x


def made(offset):
    class Odd(Base):
        """All that stands in the way of taking statements out of a function."""

        def __init__(self):
            super().__init__()
            self.__own = 3
            self.calls = []

        def scaled(self, x):
            return 5 * x

        @plain
        def forward(self, x: "no annotation is read", *more, flag=True, **named):  # noqa: F722 (a text on purpose)
            """With a text."""
            if flag:
                picked = x[x > 0]
                total = picked.sum()
            else:
                total = x.sum()
                picked = None
            for number in range(3):
                if number == 2:
                    break
                total = total + number * offset
                total += self.__own
            else:
                total = -total
            with torch.enable_grad():
                scaled = super().scaled(total)
            names = [number * part for number, part in enumerate(more)]
            late = lambda: scaled + len(names)  # noqa: E731 (a lambda on purpose)
            try:
                found = named["key"]
            except KeyError as error:
                found = len(str(error))
            match found:
                case int(whole):
                    scaled = scaled + whole
                case _:
                    pass
            if (half := scaled / 2) is None:
                return None
            while found > 0:
                found -= 1
                if found == 1:
                    continue
                half = half + found
            x = x + half
            self.calls.append(flag)
            return x, late(), picked if flag else names

    return Odd


INPUTS = [
    ((torch.tensor([1.0, -2.0, 3.0]),), {}),
    ((torch.tensor([1.0, -2.0, 3.0]), 4, 5), {"flag": False, "key": 3}),
    ((torch.tensor([-1.0]),), {"key": 2}),
]


def outcome(model: nn.Module) -> list[object]:
    return [model(*args, **kwargs) for args, kwargs in INPUTS]


def lines_of(kind: type) -> tuple[types.CodeType, range]:
    code = kind.forward.__wrapped__.__code__
    lines = [line for _, _, line in code.co_lines() if line is not None]
    return code, range(min(lines), max(lines) + 1)


def test_whatever_lines_are_taken_the_function_computes_what_it_did() -> None:
    kind = made(offset=7)
    code, lines = lines_of(kind)
    names = dict.fromkeys(n for line in lines for n in outlined.candidates(kind, code, line))
    assert len(names) > 15
    model = kind()
    expected = outcome(made(offset=7)())
    for name in names:
        outlined.outline(kind, name)
        assert str(outcome(model)) == str(expected), name
        assert any(name in one.co_names for one in [kind.forward.__wrapped__.__code__])


class Pooled(nn.Module):
    def forward(self, h, mask):
        scale = nn.Identity()
        picked = h[mask]
        deep = scale(picked)
        last = deep.view(h.shape[0], 2, -1)[:, 1]
        return last + 1

    def looped(self, h):
        for _ in range(2):
            picked = h[h > 0]
            h = picked.sum() + h
        return h

    def maybe(self, h, other):
        if other:
            picked = h[h > 0]
        return picked if other else h

    def continued(self, h):
        picked, found = h, 0
        for number in range(3):
            total = picked.sum()
            found = found + total
            picked = h[h > number]
            if number == 1:
                continue
            picked = h + total
        return found

    def appended(self, h):
        rows = []
        scale = 2
        for number in range(int(h.shape[0])):
            rows.append(h[number] * scale)
        return torch.stack(rows)

    def in_a_line(self, h):
        # fmt: off
        if len(h) > 2: return h[h > 1].sum()  # noqa: E701 (as some write it)
        # fmt: on
        return h.sum()

    def named_within(self, h):
        if (most := int(h.max())) > 2:
            h = h[:most]
        return h.sum()

    def matched(self, h):
        total = h.sum()
        match [h, h[h > 1]]:
            case [whole, part]:
                total = whole.sum() + part.sum()
        return total

    def looks_around(self, h):
        picked = h[h > 0]
        return locals()["picked"]


def candidates(method: str, number: int) -> list[str]:
    """Of the line that is `number` lines below the method's first."""
    code = vars(Pooled)[method].__code__
    return outlined.candidates(Pooled, code, code.co_firstlineno + number)


def test_the_fewest_lines_come_first() -> None:
    """h[mask], with what reads it, then with what reads that, and from where scale is made."""
    assert candidates("forward", 2) == [
        "forward_lines_3_to_3",
        *("forward_lines_3_to_4", "forward_lines_2_to_4"),
        *("forward_lines_3_to_5", "forward_lines_2_to_5"),
        *("forward_lines_3_to_6", "forward_lines_2_to_6"),
    ]


def test_what_a_line_changes_is_made_and_read_there_too() -> None:
    """The loop, from `scale`, from `rows`, which it changes; then with the line that reads them."""
    assert candidates("appended", 3) == [
        *("appended_lines_4_to_5", "appended_lines_3_to_5", "appended_lines_2_to_5"),
        *("appended_lines_4_to_6", "appended_lines_3_to_6", "appended_lines_2_to_6"),
    ]


def test_a_name_without_a_value_in_one_branch_is_no_argument() -> None:
    """`picked` has none where `other` is false: no lines that may read it then can be a method."""
    assert candidates("maybe", 2) == ["maybe_lines_3_to_3"]


def test_a_name_that_the_next_round_of_a_loop_reads_is_a_result() -> None:
    assert candidates("looped", 2)[:2] == ["looped_lines_3_to_3", "looped_lines_3_to_4"]
    outlined.outline(Pooled, "looped_lines_3_to_4")
    assert Pooled().looped(torch.ones(2)).tolist() == [9, 9]


def test_a_round_may_end_before_the_rest_of_it() -> None:
    """`picked` is written again below, and yet the next round reads what the lines have given."""
    names = dict.fromkeys(name for line in range(10) for name in candidates("continued", line))
    assert "continued_lines_6_to_6" in names
    for name in names:
        outlined.outline(Pooled, name)
        assert Pooled().continued(torch.arange(4.0)) == 6 + 30 + 5, name


def test_a_return_may_stand_in_the_line_of_its_condition() -> None:
    """Bug: the line was taken for the whole `if`, which no method can be, "plan again"."""
    assert candidates("in_a_line", 2) == ["in_a_line_lines_3_to_3"]
    outlined.outline(Pooled, "in_a_line_lines_3_to_3")
    assert Pooled().in_a_line(torch.arange(4.0)) == 5
    assert Pooled().in_a_line(torch.arange(2.0)) == 1


@pytest.mark.parametrize(
    ("method", "line", "names"),
    [
        ("named_within", 1, ["2_to_3", "2_to_4"]),
        ("matched", 2, ["3_to_5", "3_to_6", "2_to_6"]),
    ],
)
def test_a_condition_and_a_pattern_may_name_what_the_lines_below_read(
    method: str, line: int, names: list[str]
) -> None:
    """Bug: the name was taken for one that must have a value before."""
    assert candidates(method, line) == [f"{method}_lines_{lines}" for lines in names]
    h = torch.arange(5.0)
    expected = getattr(Pooled(), method)(h)
    outlined.outline(Pooled, f"{method}_lines_{names[-1]}")
    assert torch.equal(getattr(Pooled(), method)(h), expected)


def test_a_function_that_looks_at_all_its_names_stays_whole() -> None:
    assert candidates("looks_around", 1) == []


def test_lines_that_overlap_take_each_others_place() -> None:
    h, mask = torch.arange(8.0).view(2, 4), torch.ones(2, 4, dtype=torch.bool)
    for name in ("forward_lines_3_to_4", "forward_lines_3_to_5", "forward_lines_3_to_4"):
        outlined.outline(Pooled, name)
        assert Pooled.forward.__code__.co_names.count(name) == 1
        assert Pooled()(h, mask).tolist() == [[3, 4], [7, 8]]


def test_an_error_has_the_line_of_the_file() -> None:
    outlined.outline(Pooled, "forward_lines_3_to_5")
    with pytest.raises(RuntimeError) as raised:
        Pooled()(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))
    line = Pooled.forward.__code__.co_firstlineno + 4
    assert raised.traceback[-1].lineno + 1 == line


def test_lines_that_are_no_longer_there() -> None:
    with pytest.raises(CaptureError, match=r"lines 3 to 40 of .*Pooled\.forward\(\) run as"):
        outlined.outline(Pooled, "forward_lines_3_to_40")


def test_a_method_without_source_has_none() -> None:
    made_here: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {}
    exec("def forward(self, x):\n    return x[x > 0]", made_here)
    kind = type("Made", (nn.Module,), {"forward": made_here["forward"]})
    assert outlined.candidates(kind, made_here["forward"].__code__, 2) == []


# In a model


class ReadsALine(Net):
    """The model's own forward picks by values, and what it makes of it has a fixed size."""

    def forward(self, x):
        hidden = self.up(x).relu()
        pool = nn.Identity()
        picked = pool(hidden[hidden > 0.1])
        mean = picked.mean()
        return self.down(self.inside(hidden) * mean)


def test_a_few_lines_run_as_they_are_where_no_call_can():
    """From where `pool` is made, which no op can be given."""
    model = built(ReadsALine)
    trace = trace_model(model, inputs, square)
    (running,) = trace.graph.regions.values()
    assert running.region.name == "forward_lines_3_to_5()"
    assert [result.shape for result in running.region.results] == [()]
    assert unlike(model, traced=trace, cuts=["middle/linear/0"]) == []


class NamesItself(Net):
    SHARE = 0.5

    def forward(self, x):
        hidden = super(NamesItself, self).__getattr__("up")(x).relu()  # noqa: UP008 (older code)
        hidden = hidden + hidden[hidden > 0].sum() * NamesItself.SHARE
        return self.down(self.middle(hidden))


def test_lines_and_the_code_around_them_may_name_their_class():
    """Bug: where lines had become a method, the name of the class was found no more: KeyError."""
    model = built(NamesItself)
    trace = trace_model(model, inputs, square)
    (running,) = trace.graph.regions.values()
    assert running.region.name == "forward_lines_3_to_3()"
    assert unlike(model, traced=trace) == []


class Rounds(Net):
    """What a line picks is no result of it where the next round picks anew before it reads it."""

    def forward(self, x):
        hidden = self.up(x).relu()
        for _ in range(2):
            picked = hidden[hidden > 0.1]
            total = picked.sum()
            hidden = self.middle(hidden) * total
        return self.down(hidden)


def test_a_line_in_a_loop_is_a_call_in_each_round():
    model = built(Rounds)
    trace = trace_model(model, inputs, square)
    names = [one.region.name for one in trace.graph.regions.values()]
    assert names == ["forward_lines_4_to_5()", "forward_lines_4_to_5()#1"]
    assert unlike(model, traced=trace) == []


class KeepsWhatItPicks(Net):
    def forward(self, x):
        hidden = self.up(x).relu()
        self.picked = hidden[hidden > 0.1]
        total = hidden.sum()
        return self.down(hidden) * self.picked.sum() * total


def test_lines_that_read_an_attribute_go_with_those_that_write_it():
    model = built(KeepsWhatItPicks)
    trace = trace_model(model, inputs, square)
    (running,) = trace.graph.regions.values()
    assert running.region.name == "forward_lines_3_to_5()"
    assert unlike(model, traced=trace) == []


class DrawsTheSame(Net):
    def forward(self, x):
        hidden, state = self.up(x), torch.get_rng_state()
        hidden = torch.dropout(hidden, 0.5, True)
        torch.set_rng_state(state)
        return self.down(hidden + torch.dropout(hidden, 0.5, True))


def test_lines_with_an_effect_on_what_comes_after_them_are_refused():
    assert "forward sets the state of torch's random numbers" in str(refusal(built(DrawsTheSame)))


class Clipped(torch.autograd.Function):
    """As pytorch-tabnet's sparsemax does: it writes its input, which no op of a graph may do."""

    @staticmethod
    def forward(ctx, x):
        x -= x.amax(-1, keepdim=True)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.1, 0.1)


class AppliesIt(Net):
    def forward(self, x):
        hidden = self.middle(self.up(x).relu())
        weights = Clipped.apply(hidden * 2)
        return self.down(self.inside(hidden * weights))


class MakesWeights(Net):
    def forward(self, x):
        hidden = self.up(x).relu()
        made = torch.vmap(torch.outer)(hidden, hidden)
        return self.down((made @ hidden.unsqueeze(-1)).squeeze(-1))


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [AppliesIt, MakesWeights])
def test_the_models_own_forward_is_the_last_that_runs_as_it_is(kind):
    """Bug: all of it did, for one line of torch.func or of a custom Function, and no pipeline could
    cut the model."""
    model = built(kind)
    trace = trace_model(model, inputs, square)
    (running,) = trace.graph.regions.values()
    assert running.region.name == "forward_lines_3_to_3()"
    assert unlike(model, traced=trace, cuts=["relu/0"]) == []
