"""What users run on top of a backend: a sharded optimizer, averages of models, a gradient scaler.

They are torch's own and go through a handful of collectives. Their classes are looked up when a
case runs, so that a target that brings others in their place is asked about those.
"""
