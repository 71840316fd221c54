"""Shared-memory transport of ranks on one host: membership, collectives, point-to-point messages.

Reading order: layout, words, mapping, end_cause, meeting, membership (the memory, and which ranks
share it); placement, rounds, segments, slots, reducing, copying (collectives); arena, registered
(tensors that peers read where they lie); ring, matching, mailbox (messages); communicator puts them
together.
"""

from impl.transport.shm.communicator import DEFAULT_SEGMENT_NBYTES, ShmCommunicator
from impl.transport.shm.meeting import Meeting, meet

__all__ = ["DEFAULT_SEGMENT_NBYTES", "Meeting", "ShmCommunicator", "meet"]
