"""Messages from a rank to itself: sends matched with receives and copied, without a connection."""

from __future__ import annotations

from collections import deque

from impl.transport.lent import MemoryGone, is_there
from impl.transport.messages.matching import PostedMessage, SizeMismatch


class OwnMessages:
    """Sends of a rank to itself without a receive yet, and receives without a send.

    A send is copied and done; its order among those of one slot is kept. A receive from anyone
    does not take part: it waits for other ranks. Called with the loop's lock held.
    """

    def __init__(self) -> None:
        self._sent: dict[int, deque[bytes]] = {}
        self._receives: dict[int, deque[PostedMessage]] = {}

    def post_send(self, message: PostedMessage) -> None:
        assert message.view is not None
        data = bytes(message.view)
        waiting = self._receives.get(message.slot)
        if waiting:
            _deliver(data, waiting[0])
            waiting.popleft()  # afterwards: see [Note: changes that are broken off] in hub.py
        else:
            self._sent.setdefault(message.slot, deque()).append(data)
        message.finish()

    def post_receive(self, message: PostedMessage) -> None:
        sent = self._sent.get(message.slot)
        if sent:
            _deliver(sent.popleft(), message)
        else:
            self._receives.setdefault(message.slot, deque()).append(message)

    def flush(self) -> None:
        """Nothing is queued: see `Hub`."""

    def cancel(self, message: PostedMessage, error: Exception) -> None:
        """Make one receive fail alone."""
        self._receives[message.slot].remove(message)
        message.finish(error)

    def fail(self, error: Exception) -> None:
        """The group has ended: so have the receives that wait."""
        receives = [message for waiting in self._receives.values() for message in waiting]
        self._receives.clear()
        self._sent.clear()
        for message in receives:
            message.finish(error)


def _deliver(data: bytes, message: PostedMessage) -> None:
    if len(data) != message.nbytes:
        message.finish(SizeMismatch(message.peer, message.peer, len(data), message.nbytes))
        return
    assert message.view is not None
    if not is_there(message.view):
        message.finish(MemoryGone())
        return
    message.view[:] = data
    message.finish()
