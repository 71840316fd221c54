"""Faults: ranks that die, ranks that hang, timeouts and aborts.

Without `feature:peer_loss`, `feature:timeouts` or `feature:abort` ranks may wait for ever, so
nothing that needs one of them is probed.
"""
