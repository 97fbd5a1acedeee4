"""The data dictionary: every Redis key of the farm, spelled here and nowhere else.

One database per farm, single node (scripts build wake and allocation keys from a prefix). Times are Redis's, in milliseconds
(when its clock steps back: scripts/_clock.lua).

| key                       | type   | holds                                            | written by        | life |
|---------------------------|--------|--------------------------------------------------|-------------------|------|
| farm:tag                  | string | the farm's random tag, metadata of its sandboxes | first user        | for ever: identity |
| farm:token                | string | the newest fencing token                         | take/seize lease  | for ever: must not repeat |
| farm:episode:<e>          | hash   | its row: fields below                            | ledger, limiter   | open: none (must not be lost); final and settled: as its receipt |
| farm:open                 | zset   | open episode -> queued at                        | ledger            | empties itself |
| farm:leases               | zset   | leased episode -> lease ends at                  | ledger            | empties itself |
| farm:allocation:<a>       | hash   | one sandbox: state, request, id, times, cost     | ledger            | open: none (it may cost money); settled: retention + 1 h, as its receipt at least |
| farm:allocations          | zset   | unsettled allocation -> intended at              | ledger            | empties itself |
| farm:receipt:<e>          | string | the episode's one receipt, JSON                  | commit_receipt    | its writer's retention |
| farm:receipts             | zset   | episode -> receipt written at                    | commit_receipt    | members trimmed once their receipt is gone |
| farm:attempt:<e>          | string | the last attempt of its latest life that ended   | commit, settle    | 1 day past all that is kept of that life |
| farm:ends                 | zset   | the same -> receipt ends at                      | commit_receipt    | members trimmed once it has ended |
| farm:finished:<run>       | stream | finished episodes of one run, in order           | commit_receipt    | as its longest receipt; each entry until its own is gone |
| farm:ends:<run>           | zset   | id of an entry of that -> its receipt ends at    | commit_receipt    | as that stream |
| farm:budget               | hash   | the farm's limit, spent, reserved (scripts/_money.lua) | limiter, ledger | for ever: configuration, totals |
| farm:budget:<run>         | hash   | the same of one run                              | limiter, ledger   | 90 days past its last movement |
| farm:sizes                | hash   | template -> vcpus:memory_mb of its sandboxes     | ledger            | for ever: a field a template |
| farm:counters             | hash   | totals that metrics read (counts.py)             | commit, settle    | for ever: totals |
| farm:limits               | hash   | limits set live, what 429s taught (scripts/_limits.lua) | limiter    | for ever: configuration |
| farm:permits              | zset   | episode holding a permit -> granted at, or minus its batch's size | limiter, ledger   | empties itself; freed by confirmed absence |
| farm:waiters              | zset   | episode waiting for a permit -> place in line    | limiter           | empties itself, stale ones pruned |
| farm:batches              | zset   | "size:reservation" that waits for its places -> place in the same line | limiter | empties itself, stale ones pruned |
| farm:waiters:seen         | zset   | of both: last asked at                           | limiter           | with farm:waiters and farm:batches |
| farm:stepped              | zset   | episode that left its slot to a batch -> the place it keeps in that line | limiter | freed by its permit or receipt; pruned by batches |
| farm:places               | zset   | episode that takes a place -> 1 creating, 2 running, 0 neither | limiter, ledger   | empties itself; freed with the permit |
| farm:creators             | zset   | creation that waits -> its place in line         | limiter           | empties itself, stale ones pruned |
| farm:creators:due         | zset   | the same -> when it asks again                   | limiter           | empties itself, with farm:creators |
| farm:creation:<c>         | string | leave for one creation: granted at, or "refused" | limiter           | 2 min |
| farm:wake:<waiter>        | list   | wakes one waiter: an episode, a batch, or a creation (c-...) | whoever lets the next one on | 60 s |
| farm:reservations         | hash   | reservation -> "remaining:expires at:total:life ms"    | limiter           | fields pruned when expired |
| farm:slots                | zset   | live slot -> alive until                         | supervisor        | pruned when expired |
| farm:workers              | zset   | worker -> its row below is there until           | supervisor        | pruned when expired |
| farm:worker:<w>           | hash   | a worker's host, pid, slots, state, server        | supervisor        | 3 lease times |
| farm:trainer:<t>          | string | a trainer's heartbeat: its life in ms             | pool              | trainer_lost_seconds |
| farm:driver:<run>         | string | "trainer life-in-ms": who alone drives a run     | pool              | trainer_lost_seconds, renewed |
| farm:mailbox:<e>:actions  | hash   | number -> action, '' once forgotten              | pool              | deadline + 1 h past the last write, 600 s past the receipt |
| farm:mailbox:<e>:taken    | hash   | number -> who took it (a nonce)                  | slot              | same |
| farm:mailbox:<e>:results  | hash   | number -> result, of the newest two and the reset | slot              | same |
| farm:mailbox:<e>:inbox    | list   | numbers to take: wakes the slot                  | pool              | same |
| farm:mailbox:<e>:outbox   | list   | number:result, wakes the pool                      | slot              | same |
| farm:transcript:<e>       | list   | what the policy did and saw, capped              | slot              | retention, as its receipt at least |
| farm:unresolved           | hash   | kind:id -> what reconcilers could not do, and why | reconciler       | empties itself |
| farm:reconciled           | string | when a whole round ended last, ms of Redis       | reconciler        | 7 days |
| farm:reconciler           | string | "name life-in-ms" of the leader                  | reconciler        | 10 s, renewed |

Fields of an episode's row: state, spec, job, attempt, run, group, trainer, queue, template, queued_at; once it is leased
token, owner, started_at, lease_ms; allocations (ids), unsettled (how many); cancel (its end was asked for), lost_jobs (how
often its job vanished), cost_picousd and cost_counted (its settled sandboxes, scripts/_costs.lua); batch, together_ms (the
reservation that it came with, and how long it may be queued while others of that run); policy_seconds,
verifier_seconds, reserved_policy, reserved_verifier, size, too_large, rates, unfunded_at (its money, scripts/_money.lua);
arrived_at (when it first had to wait for a permit, and its place in that line ever after), left_at and away_ms (when it
went back to the queue, and how long it has been there since it arrived); in the end outcome, finished_at, and
entry (its own in its run's stream, where an id that was run again may have one from before until that is trimmed).

RQ's own keys start with `rq:`.
"""

from __future__ import annotations

PERSISTENT = frozenset(
    {
        "farm:tag",
        "farm:token",
        "farm:episode:*",
        "farm:open",
        "farm:leases",
        "farm:allocation:*",
        "farm:allocations",
        "farm:receipts",
        "farm:ends",
        "farm:counters",
        "farm:limits",
        "farm:budget",
        "farm:sizes",
        "farm:permits",
        "farm:waiters",
        "farm:waiters:seen",
        "farm:batches",
        "farm:stepped",
        "farm:places",
        "farm:creators",
        "farm:creators:due",
        "farm:reservations",
        "farm:slots",
        "farm:workers",
        "farm:unresolved",
    }
)
"""Patterns of keys that may live without TTL; the reasons stand in the table above. Open rows are checked apart."""

FARM = "farm:"


class Keys:
    """Builders and names of keys."""

    TAG = FARM + "tag"
    TOKEN = FARM + "token"
    OPEN = FARM + "open"
    LEASES = FARM + "leases"
    ALLOCATIONS = FARM + "allocations"
    RECEIPTS = FARM + "receipts"
    ENDS = FARM + "ends"
    COUNTERS = FARM + "counters"
    LIMITS = FARM + "limits"
    BUDGET = FARM + "budget"
    BUDGET_PREFIX = FARM + "budget:"
    SIZES = FARM + "sizes"
    PERMITS = FARM + "permits"
    WAITERS = FARM + "waiters"
    WAITERS_SEEN = FARM + "waiters:seen"
    BATCHES = FARM + "batches"
    STEPPED_BACK = FARM + "stepped"
    PLACES = FARM + "places"
    CREATORS = FARM + "creators"
    CREATORS_DUE = FARM + "creators:due"
    WAKE_PREFIX = FARM + "wake:"
    RESERVATIONS = FARM + "reservations"
    SLOTS = FARM + "slots"
    WORKERS = FARM + "workers"
    RECONCILED = FARM + "reconciled"
    RECONCILER = FARM + "reconciler"
    UNRESOLVED = FARM + "unresolved"

    @staticmethod
    def episode(episode_id: str) -> str:
        """The row of one episode."""
        return f"{FARM}episode:{episode_id}"

    @staticmethod
    def allocation(allocation_id: str) -> str:
        """The row of one allocation."""
        return f"{FARM}allocation:{allocation_id}"

    @staticmethod
    def receipt(episode_id: str) -> str:
        """The receipt of one episode."""
        return f"{FARM}receipt:{episode_id}"

    @staticmethod
    def attempt(episode_id: str) -> str:
        """The last attempt of an episode that ended: one of the same id that comes later begins above it."""
        return f"{FARM}attempt:{episode_id}"

    @staticmethod
    def finished(run_id: str) -> str:
        """The stream of a run's finished episodes."""
        return f"{FARM}finished:{run_id}"

    @staticmethod
    def ends(run_id: str) -> str:
        """When the receipts of a run end, by the entries of its stream."""
        return f"{FARM}ends:{run_id}"

    @staticmethod
    def budget(run_id: str | None) -> str:
        """The budget of one run, or the farm's."""
        return Keys.BUDGET if run_id is None else Keys.BUDGET_PREFIX + run_id

    @staticmethod
    def wake(waiter: str) -> str:
        """The list that one waiter (an episode or a batch in line for permits, a creation for its turn) blocks on."""
        return Keys.WAKE_PREFIX + waiter

    @staticmethod
    def creation(creation_id: str) -> str:
        """The leave for one creation."""
        return f"{FARM}creation:{creation_id}"

    @staticmethod
    def worker(worker_id: str) -> str:
        """The row of one worker."""
        return f"{FARM}worker:{worker_id}"

    @staticmethod
    def driver(run_id: str) -> str:
        """Which trainer alone drives a run."""
        return f"{FARM}driver:{run_id}"

    @staticmethod
    def trainer(trainer_id: str) -> str:
        """The heartbeat of one trainer process."""
        return f"{FARM}trainer:{trainer_id}"

    @staticmethod
    def mailbox(episode_id: str, part: str) -> str:
        """One part of an episode's mailbox: actions, taken, results, inbox or outbox."""
        return f"{FARM}mailbox:{episode_id}:{part}"

    @staticmethod
    def transcript(episode_id: str) -> str:
        """The transcript of one episode."""
        return f"{FARM}transcript:{episode_id}"
