"""Ranks that die, ranks that hang, and giving up.

Without `feature:peer_loss`, `feature:timeouts` or `feature:abort` ranks may wait for ever, so
nothing that needs one of them is probed.
"""
