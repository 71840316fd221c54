"""Groups without a network: simulations that one seed decides, and predictions for any world size.

`simulation.py` runs a whole group in one process; `mailbox.py` runs a single schedule, `scaling.py`
predicts. `python -m impl.testing` prints the predictions.
"""
