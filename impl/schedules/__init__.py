"""Algorithms of collectives, as schedules of sends, receives and reductions; their cost and choice.

Nothing here opens a socket or knows a tensor.

    steps                               what a schedule is made of
    arithmetic                          small sums that several schedules share
    ring, logarithmic, pairwise, bcube  the schedules of reductions and copies
    barrier                             the schedule of a barrier
    executor                            runs any schedule over anything that can move messages
    choice, cost                        which one is best, and what each costs
"""
