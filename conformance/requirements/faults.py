"""Ranks that die, ranks that hang, and giving up.

Without `feature:peer_loss`, `feature:timeouts` or `feature:abort` ranks may wait for ever, so
nothing that needs one of them is probed.
"""

from conformance.requirements.model import MUST, SHOULD, Requirement

_NOTICE = "derived: Gloo tells the neighbours of a dead rank alone, the others wait for the timeout"

NEIGHBOUR = Requirement(
    id="peer_loss/of-a-pair",
    level=MUST,
    profile="faults",
    says="Of two ranks, the one that is left gets a RuntimeError soon after the other has died, "
    "whatever it does with it: it neither hangs nor goes on with wrong data.",
    source="observed, torch 2.13.0 gloo",
    needs=("feature:peer_loss",),
    rests_on=("all_reduce/sum",),
)
EVERY_RANK = Requirement(
    id="peer_loss/every-rank",
    level=MUST,
    profile="faults",
    says="In a larger group every rank that is left gets a RuntimeError soon after one has died, "
    "whether or not it talks to the dead one.",
    source=_NOTICE,
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/of-a-pair",),
)
POINT_TO_POINT = Requirement(
    id="peer_loss/point-to-point",
    level=MUST,
    profile="faults",
    says="A send to and a receive from a dead rank raise.",
    source="observed, torch 2.13.0 gloo",
    needs=("feature:peer_loss",),
    rests_on=("p2p/delivers",),
)
FROM_ANYBODY = Requirement(
    id="peer_loss/from-anybody",
    level=MUST,
    profile="faults",
    says="A receive without a source raises once every rank that could send has died.",
    source="derived: torch 2.13.0 gloo waits for the timeout",
    needs=("feature:peer_loss", "feature:any_source"),
    rests_on=("p2p/any-source",),
)
HOWEVER = Requirement(
    id="peer_loss/however-it-died",
    level=MUST,
    profile="faults",
    says="It is noticed whether a rank was killed, ended with exit code 0, or left its groups "
    "behind when it ended.",
    source="derived",
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/of-a-pair",),
)
WORK = Requirement(
    id="peer_loss/handle-knows",
    level=MUST,
    profile="faults",
    says="wait on the handle of an operation that a dead rank had part in raises, each time; the "
    "handle is completed, not successful, and has the exception, and so has its future.",
    source="derived: wait reported success of an operation that had failed",
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/of-a-pair",),
)
AFTERWARDS = Requirement(
    id="peer_loss/stays-broken",
    level=MUST,
    profile="faults",
    says="Every later operation of a group that has lost a rank raises too.",
    source="observed, torch 2.13.0 gloo",
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/of-a-pair",),
)
OTHER_GROUPS = Requirement(
    id="peer_loss/other-groups-live",
    level=MUST,
    profile="faults",
    says="A group that the dead rank was no member of goes on working.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("new_group/members",),
)
CLEAN_UP = Requirement(
    id="peer_loss/destroy",
    level=MUST,
    profile="faults",
    says="destroy_process_group returns although a rank has died, and leaves no thread, descriptor "
    "or shared memory.",
    source="torch 2.13 docs, destroy_process_group",
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/of-a-pair", "groups/leaves-nothing-behind"),
)
REBUILD = Requirement(
    id="peer_loss/survivors-go-on",
    level=MUST,
    profile="faults",
    says="The ranks that are left can destroy everything and make a new default group without the "
    "dead one.",
    source="torch elastic, restarts",
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/of-a-pair", "init/again-with-fewer-ranks"),
)
REBUILD_LARGE = Requirement(
    id="peer_loss/all-survivors-go-on",
    level=MUST,
    profile="faults",
    says="In a larger group, too, all ranks that are left find out by themselves and make a new "
    "default group.",
    source="torch elastic, restarts",
    needs=("feature:peer_loss",),
    rests_on=("peer_loss/every-rank", "peer_loss/survivors-go-on"),
)

GROUP_TIMEOUT = Requirement(
    id="timeouts/of-the-group",
    level=MUST,
    profile="faults",
    says="Ranks that wait in a collective for one that does not come get a RuntimeError once the "
    "group's timeout is over, and not before.",
    source="torch 2.13 docs, init_process_group, timeout",
    needs=("feature:timeouts",),
    rests_on=("new_group/members",),
)
P2P_TIMEOUT = Requirement(
    id="timeouts/point-to-point",
    level=MUST,
    profile="faults",
    says="A blocking recv that nobody sends to ends with a RuntimeError once the group's timeout "
    "is over; so does a send that nobody receives, or it is over at once, where sends are "
    "buffered.",
    source="torch 2.13 docs, init_process_group, timeout",
    needs=("feature:timeouts",),
    rests_on=("p2p/delivers",),
)
WAIT_TIMEOUT = Requirement(
    id="timeouts/of-wait",
    level=MUST,
    profile="faults",
    says="wait(timeout) on the handle of a collective that cannot end raises once this timeout is "
    "over, not before, however long the group's is.",
    source="pytorch#40948 and pytorch#41265",
    needs=("feature:timeouts",),
    rests_on=("all_reduce/sum",),
)
BARRIER_TIMEOUT = Requirement(
    id="timeouts/of-barrier",
    level=MUST,
    profile="faults",
    says="The timeout of a barrier counts for this barrier.",
    source="torch 2.13 docs, barrier, timeout",
    needs=("feature:timeouts",),
    rests_on=("all_reduce/sum",),
)
FOR_ONE_OPERATION = Requirement(
    id="timeouts/for-one-operation",
    level=MUST,
    profile="faults",
    says="The timeout of a wait or of a barrier is over with it: the operations that follow have "
    "the group's.",
    source="torch 2.13 docs, Work.wait and barrier, timeout",
    needs=("feature:timeouts",),
    rests_on=("timeouts/of-wait", "timeouts/of-barrier"),
)
CHANGED = Requirement(
    id="timeouts/changed",
    level=MUST,
    profile="faults",
    says="set_timeout of a group, the default one or another, counts for the reductions that "
    "follow, whether it is shorter or longer than before and whether they block or are waited for.",
    source="pytorch#167052; torch 2.13, ProcessGroup.set_timeout",
    needs=("feature:timeouts",),
    rests_on=("timeouts/of-the-group",),
)
SHORTENED_FOR_MESSAGES = Requirement(
    id="timeouts/shortened-for-messages",
    level=SHOULD,
    profile="faults",
    says="A shorter timeout by set_timeout counts for a recv that follows.",
    source="torch 2.13, ProcessGroup.set_timeout: 'Sets the default timeout for all future "
    "operations.'",
    needs=("feature:timeouts",),
    rests_on=("timeouts/changed", "timeouts/point-to-point"),
)
LENGTHENED_FOR_MESSAGES = Requirement(
    id="timeouts/lengthened-for-messages",
    level=SHOULD,
    profile="faults",
    says="A longer timeout by set_timeout counts for a recv that follows.",
    source="torch 2.13, ProcessGroup.set_timeout: 'Sets the default timeout for all future "
    "operations.'",
    needs=("feature:timeouts",),
    rests_on=("timeouts/changed", "timeouts/point-to-point"),
)
OWN = Requirement(
    id="timeouts/of-each-group",
    level=MUST,
    profile="faults",
    says="A group has the timeout that it was made with, whatever the default group's is.",
    source="torch 2.13 docs, new_group, timeout",
    needs=("feature:timeouts",),
    rests_on=("timeouts/of-the-group",),
)
LATE = Requirement(
    id="timeouts/late-is-not-lost",
    level=MUST,
    profile="faults",
    says="A rank that comes within the timeout does no harm, and the timeout counts for each "
    "operation anew.",
    source="torch 2.13 docs, init_process_group, timeout",
    needs=("feature:timeouts",),
    rests_on=("timeouts/of-the-group",),
)
JOINING = Requirement(
    id="timeouts/joining",
    level=MUST,
    profile="faults",
    says="init_process_group and new_group raise when a rank does not come before their timeout.",
    source="torch 2.13 docs, init_process_group and new_group, timeout",
    needs=("feature:timeouts",),
    rests_on=("all_reduce/sum",),
)
JOINING_LATE = Requirement(
    id="timeouts/joining-late",
    level=MUST,
    profile="faults",
    says="init_process_group and new_group wait for a rank that comes seconds late, and within "
    "their timeout.",
    source="torch 2.13 docs, init_process_group and new_group, timeout",
    rests_on=("all_reduce/sum",),
)
OF_DAYS = Requirement(
    id="timeouts/of-days",
    level=MUST,
    profile="faults",
    says="A timeout of days, or of a year, is as long as it says.",
    source="derived: the seconds of a timedelta leave out its days, and 32 bits of milliseconds "
    "hold 25 days",
    rests_on=("all_reduce/sum",),
)
RECOVERY = Requirement(
    id="timeouts/recovery",
    level=MUST,
    profile="faults",
    says="After a timeout the group can be destroyed, and the same ranks can make a new one.",
    source="torch elastic, restarts",
    needs=("feature:timeouts",),
    rests_on=("timeouts/of-the-group", "init/again"),
)

ABORT = Requirement(
    id="abort/ends-what-waits",
    level=SHOULD,
    profile="faults",
    says="abort of a group makes every operation that this rank waits for in it raise.",
    source="torch 2.13, ProcessGroup.abort; 'currently only works with the NCCL backend'",
    needs=("feature:abort",),
    rests_on=("all_reduce/sum",),
)
ABORT_AFTER = Requirement(
    id="abort/ends-the-group",
    level=SHOULD,
    profile="faults",
    says="After an abort the rank's later operations in this group raise, other groups work, and "
    "everything can be destroyed.",
    source="torch 2.13, ProcessGroup.abort",
    needs=("feature:abort",),
    rests_on=("abort/ends-what-waits",),
)
