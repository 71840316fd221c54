"""Prints how many microseconds this Python takes for some ordinary work, the least of ten times.

Fails if it has not the version that the argument names, such as 3.11, or cannot make virtual
environments, as where a system ships Python without `ensurepip`.
"""

import importlib.util
import sys
import time
import timeit


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def moved(self, by: int) -> "Point":
        return Point(self.x + by)


def work() -> None:
    """Calls, attributes, tuples, text and dictionaries."""
    seen: dict[str, tuple[int, Point]] = {}
    for number in range(20_000):
        seen[f"key {number % 100}"] = number, Point(number).moved(1)
    sorted(seen, key=lambda key: -seen[key][1].x)


if __name__ == "__main__":
    if "{}.{}".format(*sys.version_info) != sys.argv[1]:
        sys.exit(f"this is Python {sys.version}")
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("this Python has no ensurepip")
    least_s = min(timeit.repeat(work, timer=time.process_time, repeat=10, number=1))
    print(round(least_s * 1e6))
