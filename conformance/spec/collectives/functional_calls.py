"""Functional collectives: dimensions, lists, gradients, forms with outputs, and groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conformance import Chapter, Me, Ranks, not_probed, world_sizes
from conformance.oracle.data import sample
from conformance.spec.collectives.perform import everyone
from conformance.spec.facts import Fact, check_fact, refusal, rows, unlike

SOURCE = "torch 2.13, torch.distributed._functional_collectives"
LISTS = ("feature:coalescing", "op:all_gather_into_tensor", "op:reduce_scatter_tensor")

chapter = Chapter("collectives", source=SOURCE)

SHAPE = (4, 6, 2)
SUMMED = "functional/all_reduce"
COALESCED = "functional/coalesced"


def of_rank(rank: int, salt: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return sample(shape, "float32", rank, salt)


def given(me: Me, salt: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return of_rank(me.rank, salt, shape).to(me.device)


def of_all(me: Me, salt: int = 0, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [of_rank(rank, salt, shape) for rank in range(me.world_size)]


def total(me: Me, salt: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.stack(of_all(me, salt, shape)).sum(0)


def read(x: Tensor) -> Tensor:
    """The values of what may be pending."""
    values: Tensor = functional.wait_tensor(x.detach()).cpu().clone()
    return values


def chunk(whole: Tensor, me: Me, dim: int) -> Tensor:
    return whole.chunk(me.world_size, dim)[me.rank]


def from_the_end(me: Me) -> list[str]:
    """Along dimensions that are counted from the end."""
    found, group = [], everyone()
    for dim in (-1, -2, -3):
        got = functional.all_gather_tensor(given(me), dim, group)
        found += unlike(f"all_gather_tensor, {dim}", read(got), torch.cat(of_all(me), dim))
        got = functional.reduce_scatter_tensor(given(me), "sum", dim, group)
        found += unlike(f"reduce_scatter_tensor, {dim}", read(got), chunk(total(me), me, dim))
    return found


def coalesced_dimensions(me: Me) -> list[str]:
    """Each tensor along a dimension of its own; also in a list of one."""
    found = []
    for dims in ([0, 1, 2], [-1, 0], [2]):
        xs = [given(me, salt) for salt, _ in enumerate(dims)]
        results = functional.reduce_scatter_tensor_coalesced(list(xs), "sum", dims, everyone())
        for salt, (dim, got) in enumerate(zip(dims, results, strict=True)):
            want = chunk(total(me, salt), me, dim)
            found += unlike(f"{dims}: result {salt}", read(got), want)
    return found


def lists_afterwards(me: Me) -> list[str]:
    """The lists that were passed, and their tensors."""
    group, found = everyone(), []
    calls: Mapping[str, Callable[[list[Tensor]], list[Tensor]]] = {
        "all_reduce": lambda xs: functional.all_reduce_coalesced(xs, "sum", group),
        "all_gather": lambda xs: functional.all_gather_into_tensor_coalesced(xs, group),
        "reduce_scatter": lambda xs: functional.reduce_scatter_tensor_coalesced(
            xs, "sum", [1, 0], group
        ),
    }
    for name, call in calls.items():
        kept = [given(me, 1), given(me, 2)]
        passed = list(kept)
        for result in call(passed):
            functional.wait_tensor(result)
        same = [x is y for x, y in zip(passed, kept, strict=True)]
        found += unlike(f"{name}: whether items stayed", same, [True, True])
        found += unlike(name, [read(x) for x in kept], [of_rank(me.rank, 1), of_rank(me.rank, 2)])
    return found


def weights(me: Me, like: Tensor) -> Tensor:
    return of_rank(me.rank, 9, tuple(like.shape)).to(me.device)


def coalesced_gradients(me: Me) -> list[str]:
    """Of all results, and of the first one alone, when no gradient goes to the second."""
    group, found, shape = everyone(), [], (2 * me.world_size, 3)
    calls: Mapping[str, tuple[Callable[[list[Tensor]], list[Tensor]], Tensor]] = {
        "all_reduce": (
            lambda xs: functional.all_reduce_coalesced(xs, "sum", group),
            total(me, 9, shape),
        ),
        "all_gather": (
            lambda xs: functional.all_gather_into_tensor_coalesced(xs, group),
            chunk(total(me, 9, (shape[0] * me.world_size, 3)), me, 0),
        ),
        "reduce_scatter": (
            lambda xs: functional.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], group),
            torch.cat(of_all(me, 9, (2, 3))),
        ),
    }
    for name, (call, want) in calls.items():
        for used in (2, 1):
            xs = [given(me, salt, shape).requires_grad_() for salt in (1, 2)]
            results = call(list(xs))
            for y in results[:used]:
                (y * weights(me, y)).sum().backward(retain_graph=True)
            for y in results[used:]:
                read(y)
            second = xs[1].grad
            if used == 1:
                want_second = torch.zeros_like(want)
                second = torch.zeros(shape) if second is None else second
            else:
                want_second = want
            assert xs[0].grad is not None and second is not None
            got = [xs[0].grad.cpu(), second.cpu()]
            found += unlike(f"{name}, {used} used", got, [want, want_second])
    return found


def broadcast_gradient(me: Me) -> list[str]:
    """As in torch.distributed.nn; a refusal at the call or in backward will do."""
    x = given(me).requires_grad_()
    try:
        y = functional.broadcast(x, me.world_size - 1, everyone())
        (y * weights(me, y)).sum().backward()
    except RuntimeError:
        return []
    is_source = me.rank == me.world_size - 1
    want = total(me, 9) if is_source else torch.zeros(SHAPE)
    return unlike("gradient", torch.zeros(SHAPE) if x.grad is None else x.grad.cpu(), want)


def second_gradients(me: Me) -> list[str]:
    """The gradient of half the sum of squares of a result, and the gradient of that."""
    group, found, n = everyone(), [], me.world_size
    calls: Mapping[str, tuple[Callable[[Tensor], Tensor], int]] = {
        "all_reduce": (lambda x: functional.all_reduce(x, "sum", group), n * n),
        "all_gather": (lambda x: functional.all_gather_tensor(x, 1, group), n),
        "reduce_scatter": (lambda x: functional.reduce_scatter_tensor(x, "sum", 1, group), n),
        "all_to_all": (lambda x: functional.all_to_all_single(x, None, None, group), 1),
    }
    for name, (call, factor) in calls.items():
        x = given(me).requires_grad_()
        [first] = torch.autograd.grad((call(x) ** 2).sum() / 2, x, create_graph=True)
        first.sum().backward()
        assert x.grad is not None
        found += unlike(name, x.grad.cpu(), torch.full(SHAPE, float(factor)))
    return found


def permuted_shapes(me: Me) -> list[str]:
    """Tensors of several dimensions, and numbers; there, and their gradients back."""
    n, found = me.world_size, []
    to = [(rank + 1) % n for rank in range(n)]
    for shape in ((2, 3), (1, 4), (3, 1, 2), ()):
        x = given(me, 0, shape).requires_grad_()
        y = functional.permute_tensor(x, to, everyone())
        found += unlike(f"{shape}", read(y), of_rank((me.rank - 1) % n, 0, shape))
        (y * weights(me, y)).sum().backward()
        assert x.grad is not None
        found += unlike(f"{shape}: gradient", x.grad.cpu(), of_rank((me.rank + 1) % n, 9, shape))
    return found


def into_outputs(me: Me) -> list[str]:
    """By the functions that take the place of those of torch.distributed in compiled code."""
    n, found = me.world_size, []
    rows_, columns = SHAPE[0], SHAPE[1] * n

    def empty(*shape: int) -> Tensor:
        return torch.zeros(shape, device=me.device)

    x, y = given(me), given(me)
    calls: list[tuple[str, Any, Any, Any]] = [
        ("all_reduce", functional.all_reduce_inplace(y), y, total(me)),
        (
            "all_gather_tensor",
            functional.all_gather_tensor_inplace(out := empty(rows_, columns, 2), x, gather_dim=1),
            out,
            torch.cat(of_all(me), 1),
        ),
        (
            "reduce_scatter_tensor",
            functional.reduce_scatter_tensor_inplace(out := empty(4, 6 // n, 2), x, scatter_dim=1),
            out,
            chunk(total(me), me, 1),
        ),
        (
            "all_to_all",
            functional.all_to_all_inplace(out := empty(*SHAPE), x),
            out,
            torch.cat([chunk(z, me, 0) for z in of_all(me)]),
        ),
    ]
    for name, got, output, want in calls:
        found += unlike(f"{name}: whether it returns its output", got is output, True)
        found += unlike(name, output.cpu(), want)
    outputs = [empty(*SHAPE) for _ in range(n)]
    functional.all_gather_inplace(outputs, x)
    found += unlike("all_gather", [output.cpu() for output in outputs], of_all(me))
    return found


def complex_of(rank: int) -> Tensor:
    """(3 * SHAPE[1],): whose real and imaginary parts have nothing in common."""
    return torch.complex(of_rank(rank, 1, (18,)), of_rank(rank, 2, (18,)))


def complex_values(me: Me) -> list[str]:
    x, group = complex_of(me.rank).to(me.device), everyone()
    both = [complex_of(rank) for rank in range(me.world_size)]
    calls: Mapping[str, tuple[Callable[[], Tensor], Tensor]] = {
        "all_reduce": (lambda: functional.all_reduce(x, "sum", group), sum(both, 0 * both[0])),
        "broadcast": (lambda: functional.broadcast(x, 1, group), both[1]),
        "all_gather": (lambda: functional.all_gather_tensor(x, 0, group), torch.cat(both)),
        "reduce_scatter": (
            lambda: functional.reduce_scatter_tensor(x, "sum", 0, group),
            chunk(sum(both, 0 * both[0]), me, 0),
        ),
    }
    return [
        line for name, (call, want) in calls.items() for line in unlike(name, read(call()), want)
    ]


def complex_exchanges(me: Me) -> list[str]:
    """In equal parts; and in parts of 6 elements to rank 0, and 12 to rank 1."""
    x, group = complex_of(me.rank).to(me.device), everyone()
    both = [complex_of(rank) for rank in range(me.world_size)]
    equal = functional.all_to_all_single(x, None, None, group)
    found = unlike("equal", read(equal), torch.cat([chunk(z, me, 0) for z in both]))
    parts = [6, 12]
    uneven = functional.all_to_all_single(x, [parts[me.rank]] * 2, parts, group)
    return found + unlike(
        "uneven", read(uneven), torch.cat([z.split(parts)[me.rank] for z in both])
    )


# Each function of a group, with what it gives in a group of two ranks.
IN_GROUPS: Mapping[str, Callable[[Tensor, Any], Any]] = {
    "all_reduce": lambda x, group: functional.all_reduce(x, "sum", group),
    "broadcast": lambda x, group: functional.broadcast(x, 1, group),
    "all_gather_tensor": lambda x, group: functional.all_gather_tensor(x, 0, group),
    "reduce_scatter_tensor": lambda x, group: functional.reduce_scatter_tensor(x, "sum", 0, group),
    "all_to_all_single": lambda x, group: functional.all_to_all_single(x, None, None, group),
    "permute_tensor": lambda x, group: functional.permute_tensor(x.flatten(), [1, 0], group),
    "all_reduce_coalesced": lambda x, group: functional.all_reduce_coalesced([x], "sum", group)[0],
    "all_gather_coalesced": lambda x, group: functional.all_gather_into_tensor_coalesced(
        [x], group
    )[0],
    "reduce_scatter_coalesced": lambda x, group: functional.reduce_scatter_tensor_coalesced(
        [x], "sum", [0], group
    )[0],
}


def meshes(me: Me) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks in a line, and in one of two dimensions, of which the first has one rank."""
    kind, n = me.device.type, me.world_size
    return init_device_mesh(kind, (n,)), init_device_mesh(
        kind, (1, n), mesh_dim_names=("one", "all")
    )


def same_in(groups: Mapping[str, Any], me: Me, but: tuple[str, ...] = ()) -> list[str]:
    """Each function gives the same whichever form the group has."""
    found = []
    for name, call in IN_GROUPS.items():
        if name in but:
            continue
        want = read(call(given(me), everyone()))
        for form, group in groups.items():
            found += unlike(f"{name}, {form}", read(call(given(me), group)), want)
    return found


def forms_of_groups(me: Me) -> list[str]:
    line, plane = meshes(me)
    groups = {
        "ranks": list(range(me.world_size)),
        "mesh": line,
        "mesh and dimension": (plane, 1),
        "mesh and dimension from the end": (plane, -1),
        "part of a mesh": plane["all"],
    }
    by_name = {"name": everyone().group_name}
    return same_in(groups, me) + same_in(by_name, me, but=("permute_tensor",))


def further_forms(me: Me) -> list[str]:
    """A list of lists, of which each rank takes the one that it is in; the name for permute."""
    lists = {"lists of ranks": [list(range(me.world_size))]}
    got = read(IN_GROUPS["permute_tensor"](given(me), everyone().group_name))
    want = read(IN_GROUPS["permute_tensor"](given(me), everyone()))
    return same_in(lists, me) + unlike("permute_tensor by the name", got, want)


WRONG = (AssertionError, ValueError, RuntimeError, IndexError, TypeError, KeyError)


def refused(me: Me, groups: Mapping[str, Any]) -> list[str]:
    found = []
    for name, call in IN_GROUPS.items():
        for form, group in groups.items():
            said = refusal(lambda: read(call(given(me), group)), *WRONG)  # noqa: B023
            if not said.strip() or said.startswith("("):
                found.append(f"{name}, {form}: {said or '(no word)'}")
    return found


def wrong_groups(me: Me) -> list[str]:
    _, plane = meshes(me)
    groups = {
        "two dimensions": plane,
        "no such dimension": (plane, 7),
        "no group": None,
        "no such name": "none of that name",
        "numbers": (0, 1),
    }
    return refused(me, groups)


def unknown_ranks(me: Me) -> list[str]:
    return refused(me, {"ranks of no group": [0, me.world_size + 7]})


FACTS = rows(
    (
        chapter.must(
            "functional/dimensions-from-the-end",
            "The functional all_gather_tensor and reduce_scatter_tensor take dimensions that are "
            "counted from the end.",
            needs=LISTS,
            rests_on=("functional/all_gather_tensor", "functional/reduce_scatter_tensor"),
        ),
        from_the_end,
    ),
    (
        chapter.must(
            "functional/coalesced-dimensions",
            "reduce_scatter_tensor_coalesced splits each tensor along a dimension of its own.",
            needs=LISTS,
            rests_on=COALESCED,
        ),
        coalesced_dimensions,
    ),
    (
        chapter.must(
            "functional/coalesced-lists",
            "The functional coalesced collectives change neither the lists that they are given nor "
            "the tensors in them.",
            needs=LISTS,
            rests_on=COALESCED,
        ),
        lists_afterwards,
    ),
    (
        chapter.must(
            "functional/coalesced-gradients",
            "The gradients of the functional coalesced collectives are those of the single ones, "
            "also if some of the results are not used.",
            needs=LISTS,
            rests_on=COALESCED,
        ),
        coalesced_gradients,
    ),
    (
        chapter.must(
            "functional/broadcast-gradient",
            "The gradient of the functional broadcast is the sum of all ranks' gradients on the "
            "source and zero elsewhere, or it is refused.",
            source="pytorch#152127",
            needs="op:broadcast",
            rests_on="functional/broadcast",
        ),
        broadcast_gradient,
    ),
    (
        chapter.must(
            "functional/second-gradients",
            "Gradients through functional collectives can be differentiated again.",
            needs=(*LISTS, "op:all_to_all_single"),
            rests_on=("functional/all_reduce-gradient", "functional/all_gather-gradient"),
        ),
        second_gradients,
    ),
    (
        chapter.must(
            "functional/permuted-shapes",
            "permute_tensor permutes tensors of any number of dimensions, and is differentiated.",
            needs="op:all_to_all_single",
            rests_on="functional/permute_tensor",
        ),
        permuted_shapes,
    ),
    (
        chapter.must(
            "functional/complex",
            "The functional all_reduce, broadcast, all_gather_tensor and reduce_scatter_tensor "
            "take complex tensors.",
            needs=(*LISTS, "op:broadcast", "dtype:complex64"),
            rests_on=SUMMED,
        ),
        complex_values,
    ),
    (
        chapter.should(
            "functional/complex-all-to-all",
            "The functional all_to_all_single moves complex tensors, as that of torch.distributed "
            "does, although the backend gets them as they are.",
            needs=("op:all_to_all_single", "dtype:complex64"),
            rests_on="functional/all_to_all_single",
        ),
        complex_exchanges,
    ),
    (
        chapter.must(
            "functional/into-outputs",
            "The functional collectives that have the signatures of torch.distributed's write the "
            "results to the outputs, and return these.",
            needs=(*LISTS, "op:all_to_all_single"),
            rests_on=SUMMED,
        ),
        into_outputs,
    ),
    (
        chapter.must(
            "functional/forms-of-groups",
            "Each functional collective takes its group as a group, as ranks, as a mesh of one "
            "dimension and as a mesh and a dimension, and all but permute_tensor by its name.",
            source=f"{SOURCE}, RANK_TYPES",
            needs=(*LISTS, "op:broadcast", "op:all_to_all_single"),
            rests_on=SUMMED,
        ),
        forms_of_groups,
    ),
    (
        chapter.must(
            "functional/every-form-of-groups",
            "Each functional collective takes a list of lists of ranks for its group, and "
            "permute_tensor the group's name, as RANK_TYPES has it.",
            source=f"{SOURCE}, RANK_TYPES",
            needs=(*LISTS, "op:broadcast", "op:all_to_all_single"),
            rests_on="functional/forms-of-groups",
        ),
        further_forms,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", FACTS)
def test_functional_calls(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


REFUSALS = rows(
    (
        chapter.must(
            "functional/wrong-groups",
            "A mesh of several dimensions without the dimension, and what is no group, is refused "
            "with an error that has a text.",
            rests_on=SUMMED,
        ),
        wrong_groups,
    ),
    (
        chapter.should(
            "functional/unknown-ranks",
            "A list of ranks of which there is no group is refused with an error that has a text.",
            rests_on=SUMMED,
        ),
        unknown_ranks,
    ),
)


@not_probed()
@world_sizes(2)
@pytest.mark.parametrize("fact", REFUSALS)
def test_refused_groups(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)
