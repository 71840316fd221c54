"""loss_parallel: cross entropy of logits of which each rank has some classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.nn import functional

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, near, rows
from conformance.spec.tensor_parallel.facts import line_of, quietly, whole_numbers, whole_of

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum", "reduce_op:max"),
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "feature:coalescing"),
)

chapter = Chapter("tensor_parallel", source="torch 2.13 docs, loss_parallel", needs=NEEDS)

CLASSES = 7


def classes(size: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, CLASSES, size, generator=generator)


def loss_differences(me: Me, size: tuple[int, ...], loss: Callable[[Any], Any]) -> list[str]:
    """What is wrong with a loss, and with the gradient of the logits."""
    whole = whole_numbers(size, 7).to(me.device)
    mine = distribute_tensor(whole, line_of(me), [Shard(1)]).requires_grad_()
    whole.requires_grad_()
    want = loss(whole)
    want.sum().backward()
    with tp.loss_parallel():
        got = loss(mine)
        got.sum().backward()
    found = near("loss", whole_of(got), want)
    grads: list[Any] = [mine.grad, whole.grad]
    return found + near("gradient", whole_of(grads[0]), grads[1])


def cross_entropy(me: Me, size: tuple[int, ...], **how: Any) -> list[str]:
    """Of all reductions."""
    target, found = classes((size[0], *size[2:])).to(me.device), []
    if "ignore_index" in how:
        target.view(-1)[1] = how["ignore_index"]
    for reduction in ("none", "sum", "mean"):
        loss = partial(functional.cross_entropy, target=target, reduction=reduction, **how)
        told = loss_differences(me, size, loss)
        found += [f"{reduction}, logits {size}: {text}" for text in told]
    return found


def rows_of_logits(me: Me) -> list[str]:
    return cross_entropy(me, (3, CLASSES)) + cross_entropy(me, (2, CLASSES, 3))


def weights(me: Me) -> Tensor:
    return torch.arange(1.0, CLASSES + 1).to(me.device)


def weighted(me: Me) -> list[str]:
    return cross_entropy(me, (3, CLASSES), weight=weights(me))


def ignored(me: Me) -> list[str]:
    return cross_entropy(me, (3, CLASSES), ignore_index=-100)


def weighted_and_ignored(me: Me) -> list[str]:
    return cross_entropy(me, (3, CLASSES), ignore_index=-100, weight=weights(me))


def images(me: Me) -> list[str]:
    return cross_entropy(me, (2, CLASSES, 2, 3))


def other_losses(me: Me) -> list[str]:
    """Right or refused; never wrong without a word."""
    shares = torch.softmax(whole_numbers((3, CLASSES), 5), 1).to(me.device)

    def of_shares(x: Any) -> Any:
        is_whole = type(x) is Tensor
        target = shares if is_whole else distribute_tensor(shares, x.device_mesh, [Replicate()])
        return functional.cross_entropy(x, target)

    every: dict[str, Callable[[Any], Any]] = {
        "squares of log_softmax": lambda x: functional.log_softmax(x, 1).pow(2).sum(),
        "cross entropy with probabilities": of_shares,
        "cross entropy with label smoothing": lambda x: functional.cross_entropy(
            x, classes((3,)).to(me.device), label_smoothing=0.25
        ),
    }
    found = []
    for what, loss in every.items():
        try:
            found += [f"{what}: {text}" for text in loss_differences(me, (3, CLASSES), loss)]
        except Exception:
            continue  # refused: each rank does the same
    return found


def is_parallel(me: Me) -> bool:
    """Whether a loss that loss_parallel alone takes is taken now: a target that is no DTensor."""
    logits = distribute_tensor(whole_numbers((3, CLASSES)).to(me.device), line_of(me), [Shard(1)])
    try:
        functional.cross_entropy(logits, classes((3,)).to(me.device))
    except Exception:
        return False
    return True


def ends(me: Me) -> list[str]:
    """Left by an exception, and within another block."""
    found = ["outside: a loss was taken"] if is_parallel(me) else []
    try:
        with tp.loss_parallel():
            raise KeyError
    except KeyError:
        found += ["after an exception: it goes on"] if is_parallel(me) else []
    with quietly(tp.loss_parallel):  # which also ends one that has not ended
        pass
    try:
        with tp.loss_parallel():
            with tp.loss_parallel():
                pass
            found += [] if is_parallel(me) else ["after an inner block: it has ended"]
    except Exception as error:
        found.append(f"blocks in one another: {type(error).__name__}: {error}")
    return found


@world_sizes(3)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "tp/loss/rows",
                "In loss_parallel, cross_entropy of logits of which each rank has some classes is "
                "that of the whole logits, with their gradient, for every reduction.",
            ),
            rows_of_logits,
        ),
        (
            chapter.must(
                "tp/loss/weighted",
                "In loss_parallel, cross_entropy with weights of classes is that of the whole "
                "logits.",
                rests_on="tp/loss/rows",
            ),
            weighted,
        ),
        (
            chapter.must(
                "tp/loss/ignored",
                "In loss_parallel, cross_entropy leaves out targets that are ignored.",
                rests_on="tp/loss/rows",
            ),
            ignored,
        ),
        (
            chapter.must(
                "tp/loss/weighted-and-ignored",
                "In loss_parallel, weights of ignored targets do not count in a mean.",
                rests_on=("tp/loss/weighted", "tp/loss/ignored"),
            ),
            weighted_and_ignored,
        ),
        (
            chapter.must(
                "tp/loss/images",
                "In loss_parallel, cross_entropy of logits of four dimensions, as of images, is "
                "that of the whole logits.",
                rests_on="tp/loss/rows",
            ),
            images,
        ),
        (
            chapter.must(
                "tp/loss/other-losses",
                "Losses that loss_parallel does not know, on log_softmax, on probabilities, with "
                "label smoothing, are right, with their gradients, or refused.",
                rests_on="tp/loss/rows",
            ),
            other_losses,
        ),
        (
            chapter.must(
                "tp/loss/ends",
                "loss_parallel lasts as long as its block: it ends with an exception, and does "
                "not end with a block inside it.",
                rests_on="tp/loss/rows",
            ),
            ends,
        ),
    ),
)
def test_losses(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)
