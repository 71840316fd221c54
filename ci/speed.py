"""Prints how many microseconds this Python takes for some ordinary work, the least of ten times.

Fails if it has not the version that the argument names, such as 3.11, or cannot make virtual
environments.
"""

import ensurepip  # noqa: F401  # some systems ship Python without it
import sys
import time


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


def least_s() -> float:
    """Processor time of the quickest of ten runs, in seconds."""
    taken = []
    for _ in range(10):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return min(taken)


if __name__ == "__main__":
    if "{}.{}".format(*sys.version_info) != sys.argv[1]:
        sys.exit(f"this is Python {sys.version}")
    print(round(least_s() * 1e6))
