"""Transports that connect the ranks of a group: shared memory, TCP, or both.

    base                the `Communicator` protocol: whole collectives on flat CPU memory
    mismatch_detection  do all ranks mean the same collective?
    lent                is the memory of a tensor still there?
    end_cause           how a group ends, with the same error on every rank
    memory              the buffers of one collective
    transfer            the state of one message between two ranks
    background          which threads wait without taking a processor from others
    meeting/            ranks find each other through the store
    messages/           frames, and which send meets which receive: no sockets, no waiting
    sockets/            TCP: connections, event loop, groups; our own protocol and Gloo's wire
    shm/                shared memory inside one host
    mixed               shared memory inside each host, TCP between them

Reading order: base, meeting, shm or sockets, mixed.
"""
