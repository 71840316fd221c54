"""Collectives as arithmetic: who sends which bytes to whom, in which order, and what is summed.

Nothing here opens a socket or knows a tensor. Start with `steps.py`, then `ring.py`;
`executor.py` runs any schedule, `choice.py` picks one, `cost.py` says what they cost.
"""
