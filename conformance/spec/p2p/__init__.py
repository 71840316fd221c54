"""Point to point: send, recv, isend, irecv, batch_isend_irecv."""
