"""The exit codes of the commands and of `pytest conformance`.

0    conformant, or what was asked for is done
1    not conformant, or something is wrong with what was looked at
2    bad usage, or nothing of a target could be exercised: there is no verdict
3    the harness itself failed: there is no verdict
130  interrupted from the keyboard: there is no verdict
"""

from __future__ import annotations

EXIT_USAGE = 2
EXIT_HARNESS_FAULT = 3
EXIT_INTERRUPTED = 130
