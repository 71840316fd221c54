"""Work: the handle of a collective that was issued with async_op."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives", rests_on=("all_reduce/async",))
_should = partial(Requirement, level=SHOULD, profile="collectives", rests_on=("all_reduce/async",))

BLOCKING = _must(
    id="work/blocking-returns-none",
    says="A collective without async_op returns None.",
    source="torch 2.13 docs, all_reduce: 'None, if not async_op'",
)
WAIT = _must(
    id="work/wait",
    says="wait returns True once the operation is done, every time it is called.",
    source="torch 2.13 docs, Work.wait",
)
COMPLETES = _must(
    id="work/completes-unwaited",
    says="is_completed becomes true although nobody waits.",
    source="torch 2.13 docs, Work.is_completed; pytorch#30723",
)
COMPLETED = _must(
    id="work/completed-is-written",
    says="Once is_completed is true the outputs hold the result, although nobody has waited.",
    source="torch 2.13 docs, Work.is_completed",
    rests_on=("work/completes-unwaited",),
)
DROPPED = _must(
    id="work/dropped-handles",
    says="The outputs of an operation get their values although its handle was dropped.",
    source="derived: p2p/dropped-handles, for collectives",
)
NOT_EARLY = _must(
    id="work/not-completed-early",
    says="is_completed is false as long as another rank's contribution is missing.",
    source="torch 2.13 docs, Work.is_completed",
    needs=("feature:nonblocking",),
)
SUCCESS = _must(
    id="work/success",
    says="After an operation that went well is_success is true and exception is None.",
    source="torch 2.13 docs, Work.is_success, Work.exception",
)
RESULT = Requirement(
    id="work/result",
    level=MUST,
    profile="collectives",
    says="result gives the output tensors, in order.",
    source="observed, torch 2.13.0 gloo",
    needs=("feature:work_result",),
    rests_on=("all_reduce/async",),
)
FUTURE = _must(
    id="work/future",
    says="get_future gives a future whose value is the list of the output tensors.",
    source="torch 2.13 docs, Work.get_future",
)
FUTURE_THEN = _must(
    id="work/future-then",
    says="A callback that is chained to the future sees the result.",
    source="torch 2.13 docs, Work.get_future",
    rests_on=("work/future",),
)
FUTURE_AT_ANY_TIME = _must(
    id="work/future-at-any-time",
    says="get_future may be called before and after the operation is over, and more than once: "
    "each future gets the outputs.",
    source="torch 2.13 docs, Work.get_future",
    rests_on=("work/future",),
)
CALLBACK_RAISES = _must(
    id="work/callback-that-raises",
    says="A callback that raises breaks the future that then returned for it, and nothing else: "
    "other callbacks are called, and the group goes on.",
    source="torch 2.13 docs, torch.futures.Future.then",
    rests_on=("work/future-then",),
)
ANY_THREAD = _must(
    id="work/wait-in-threads",
    says="Several threads may wait for one operation, whichever thread has issued it, and each "
    "comes back when the outputs hold the result.",
    source="derived: an operation that one thread issues for another",
    needs=("feature:nonblocking",),
    rests_on=("work/wait",),
)
DROPPED_INPUTS = _must(
    id="work/dropped-inputs",
    says="What an asynchronous operation reads may be dropped after the call: the operation holds "
    "it as long as it needs it.",
    source="derived: dist.all_gather(outputs, x.float(), async_op=True)",
    needs=("feature:nonblocking",),
)
WAIT_TIMEOUT = Requirement(
    id="work/wait-timeout",
    level=MUST,
    profile="collectives",
    says="wait with a timeout raises when the operation is not done by then.",
    source="pytorch#40948, pytorch#41265",
    needs=("feature:timeouts",),
    rests_on=("all_reduce/async",),
)
WAIT_AGAIN = Requirement(
    id="work/wait-after-timeout",
    level=SHOULD,
    profile="collectives",
    says="After wait has timed out the operation goes on, and can be waited for again.",
    source="observed, torch 2.13.0 gloo",
    needs=("feature:timeouts",),
    rests_on=("work/wait-timeout",),
)
GROUP_TIMEOUT = Requirement(
    id="work/group-timeout",
    level=MUST,
    profile="collectives",
    says="A collective whose peers do not come within the group's timeout raises an error that "
    "says so.",
    source="torch 2.13 docs, init_process_group, new_group: timeout",
    needs=("feature:timeouts",),
    rests_on=("all_reduce/async",),
)
FAILURE = Requirement(
    id="work/failure-is-told",
    level=MUST,
    profile="collectives",
    says="The Work of an operation that failed says so: wait raises, is_success is false, and "
    "exception is the error.",
    source="torch 2.13 docs, Work.wait, Work.exception; derived",
    needs=("feature:timeouts",),
    rests_on=("work/group-timeout",),
)
FAILED_FUTURE = Requirement(
    id="work/failed-future",
    level=MUST,
    profile="collectives",
    says="The future of an operation that failed is over as well, and its wait raises.",
    source="torch 2.13 docs, Work.get_future; torch's Reducer waits for futures alone",
    needs=("feature:timeouts",),
    rests_on=("work/future", "work/group-timeout"),
)
PEER_GONE = Requirement(
    id="work/peer-gone",
    level=MUST,
    profile="collectives",
    says="wait raises if a rank of the group has died before it made its contribution.",
    source="derived",
    needs=("feature:timeouts",),
    rests_on=("all_reduce/async",),
)
LEAVES_ALONE = _must(
    id="work/leaves-the-process-alone",
    says="A group and its operations change nothing else of the process: not the state of random "
    "generators, grad mode, default dtype or number of threads, not the working directory, the "
    "environment or the handlers of signals.",
    source="derived: runs could not be repeated otherwise",
)
KEEPS_NOTHING = _must(
    id="work/keeps-nothing",
    says="When collectives are over and their handles are dropped, the group has let go of their "
    "tensors, but for a few of the last ones, and memory does not grow with their number.",
    source="derived: a job issues millions of them",
)
PROFILED = Requirement(
    id="work/profiler-ranges",
    level=SHOULD,
    profile="collectives",
    says="A profiler sees each collective, send and receive as a range that is named after the "
    "backend, a colon, and the operation, has the shapes of the inputs, and lasts until the "
    "operation is complete.",
    source="torch, distributed_test.py, call_dist_op and _test_send_recv",
    needs=("feature:profiler_ranges",),
    rests_on=("all_reduce/async",),
)
