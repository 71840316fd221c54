"""A posted send or receive over sockets: waiting, timeout, completion."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from impl.transport.base import Deadline
from impl.transport.messages.hub import Hub
from impl.transport.messages.matching import PostedMessage
from impl.transport.messages.own_messages import OwnMessages
from impl.transport.sockets.group import Expired
from impl.transport.sockets.loop import EventLoop, Timer
from impl.transport.transfer import PostedTransfer

FOREVER_S = 3e9  # added to a monotonic clock: no process lives that long


class SocketTransfer(PostedTransfer):
    """Implements `Transfer`. A thread that waits for it drives the loop, or the helper does."""

    __slots__ = ("_explain", "_loop", "_message", "_tensor", "_timer", "_way")

    def __init__(
        self,
        loop: EventLoop,
        way: Hub | OwnMessages,
        message: PostedMessage,
        tensor: Tensor,
        explain: Callable[[PostedMessage], Exception],
    ) -> None:
        """`explain` makes the error that the user sees from that of the message."""
        super().__init__()
        self._loop = loop
        self._way = way
        self._message = message
        self._tensor: Tensor | None = tensor  # kept alive while bytes move
        self._explain = explain
        self._timer: Timer | None = None

    def start(self, post: Callable[[PostedMessage], None], until: Deadline) -> None:
        """Post the message. Called once, without the lock."""
        message, loop = self._message, self._loop

        def begin() -> None:
            post(message)
            self._way.flush()
            if not message.done:
                message.on_done = self._on_done
                self._timer = loop.call_at(until.at_s, self._expire)
                loop.message_posted()

        with loop.lock:
            loop.undivided(begin)
            ended_at_once = message.done
        if ended_at_once:
            self._complete()
        loop.run_deferred()

    def _expire(self) -> None:
        self._way.cancel(self._message, Expired())

    def _on_done(self, _: PostedMessage) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.message_ended()
        self._loop.defer(self._complete)

    def _complete(self) -> None:
        message = self._message
        self._tensor = None
        if message.error is not None:
            self.finish(self._explain(message))
        else:
            self.finish(None, source=message.peer)

    def wait(self, timeout_s: float | None) -> bool:
        if self.is_done():
            return True
        at_s = time.monotonic() + (FOREVER_S if timeout_s is None else timeout_s)
        self._loop.run_until(self._message, at_s)
        if not self._message.done:
            return self.is_done()
        # Another thread may have put off the completion and be about to run it.
        return super().wait(timeout_s)
