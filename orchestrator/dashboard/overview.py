"""The farm as HTML: header, alarms, tiles, charts, workers, episodes. Pure: a view in, Markup out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlencode

from orchestrator.dashboard.history import Ended, Series
from orchestrator.dashboard.lookout import Look, View
from orchestrator.dashboard.markup import NOTHING, Child, Markup, element, joined
from orchestrator.dashboard.wording import clock, counted, day_and_clock, dollars, seconds
from orchestrator.presence import worker_of
from orchestrator.rows import EpisodeRow
from orchestrator.spending import burn_picousd_per_hour
from orchestrator.unresolved import ORPHANS_DELETED
from orchestrator.vocabulary import Outcome, Role

_ENDED_ROWS = 40
_WORKER_ROWS = 40
_ALARM_ROWS = 20
_REWARDS = 100
"""Over how many of the newest scored episodes the tile's mean reward goes."""


def link(shown: Child, **query: str) -> Markup:
    """A link within the page."""
    return element("a", shown, href=f"?{urlencode(query)}" if query else "?")


def header(view: View) -> Markup:
    """Which page this is, how old, and what is wrong with it or with the farm as a whole."""
    look = view.look
    at = "no look at the farm yet" if look is None else f"{day_and_clock(look.at)} UTC"
    led = look is not None and look.leader is not None
    parts: list[Child] = [
        element("h1", link("rollout farm")),
        element("span", at, class_="moment"),
        element("span", f"{look.leader} leads" if look and led else "", class_="muted"),
    ]
    warnings = [view.trouble] if view.trouble else []
    if look is not None and not led:
        warnings.append("No orchestrator leads: what killed workers leave stays until one does.")
    if look is not None and not look.reading.slots:
        warnings.append("No worker is alive: start some with rollout-farm worker.")
    return joined((element("header", *parts), *(element("p", text, class_="warning") for text in warnings)))


def alarms(look: Look) -> Markup:
    """Clean-ups that are not confirmed, by id; nothing when there are none."""
    rows: list[tuple[Child, ...]] = [
        (
            link(row.episode_id, episode=row.episode_id),
            f"{row.role} sandbox {row.sandbox_id or 'that was never named'}",
            str(row.state),
            day_and_clock(row.unresolved_at or row.unknown_at),
            row.detail or "",
        )
        for row in look.stuck
    ]
    rows += [
        (_item(item.kind, item.id), str(item.kind), "not settled", day_and_clock(item.since), item.reason)
        for item in look.not_settled
    ]
    if not rows:
        return NOTHING
    more = f" Showing the first {_ALARM_ROWS}." if len(rows) > _ALARM_ROWS else ""
    lead = f"Whether they are gone is not confirmed; they keep their permits, and the orchestrator tries on.{more}"
    return element(
        "section",
        element("h2", f"{counted(len(rows), 'unresolved clean-up')}"),
        element("p", lead),
        table(("id", "what", "state", "since (UTC)", "why"), rows[:_ALARM_ROWS]),
        class_="alarm",
        id="unresolved",
    )


def _item(kind: str, name: str) -> Child:
    return link(name, episode=name) if kind == "episode" else name


def tiles(look: Look) -> Markup:
    """The numbers of now."""
    tiles = (_sandboxes(look), _slots(look), _queue(look), _creations(look))
    return element("section", *tiles, *_totals(look), class_="tiles")


def _sandboxes(look: Look) -> Markup:
    limiter = look.reading.limiter
    running = sum(row.count for row in look.reading.running if row.state.accrues)
    lowered = limiter.concurrency_effective < limiter.concurrency_configured
    note = f"{counted(limiter.held, 'permit')} held, {limiter.reserved:,} reserved"
    if lowered:
        note += f"; lowered from {limiter.concurrency_configured:,} after a 429"
    return tile(
        "Sandboxes",
        f"{running:,}",
        f"of {limiter.concurrency_effective:,} allowed",
        note,
        share=running / max(1, limiter.concurrency_effective),
        alarm=lowered,
    )


def _slots(look: Look) -> Markup:
    live = len(look.reading.slots)
    busy = min(live, look.reading.leased)
    return tile(
        "Slots", f"{busy:,}", f"of {live:,} busy", counted(len(look.workers), "worker"), share=busy / max(1, live)
    )


def _queue(look: Look) -> Markup:
    waiting = look.reading.limiter.waiting
    note = f"{counted(look.open_count, 'open episode')}, {waiting:,} wait for a permit"
    return tile("Queue", f"{look.reading.queued:,}", "episodes wait", note)


def _creations(look: Look) -> Markup:
    limiter = look.reading.limiter
    refused = limiter.rate_limited + limiter.concurrency_limited
    pace = f"at most {limiter.rate_effective:.3g} per second" if limiter.rate_effective else "no limit of ours"
    if limiter.cooldown_seconds:
        pace = f"all pause for {seconds(limiter.cooldown_seconds)}"
    note = (
        f"429 answers: {limiter.rate_limited:,} for the rate, {limiter.concurrency_limited:,} for concurrency; {pace}"
    )
    return tile(
        "Creations",
        f"{limiter.creations:,}",
        f"tried, {refused:,} refused",
        note,
        alarm=bool(limiter.cooldown_seconds),
    )


def _totals(look: Look) -> tuple[Markup, ...]:
    counters = look.reading.counters
    outcomes = {outcome: int(counters.get(f"episodes:{outcome}", 0)) for outcome in Outcome}
    scored = sum(count for outcome, count in outcomes.items() if outcome.scored)
    aborted = sum(outcomes.values()) - scored
    rewards = [one.reward for one in look.ended if one.reward is not None][:_REWARDS]
    mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"
    stuck = len(look.stuck) + len(look.not_settled)
    orphans = counted(int(counters.get(ORPHANS_DELETED, 0)), "orphan")
    made = sum(int(counters.get(f"created:{role}", 0)) for role in Role)
    return (
        tile("Episodes", f"{scored + aborted:,}", "ended", f"{scored:,} scored, {aborted:,} aborted"),
        tile("Reward", mean, "on average", f"the newest {counted(len(rewards), 'scored episode')}"),
        _money(look),
        tile(
            "Clean-ups",
            f"{stuck:,}",
            "unresolved",
            f"{made:,} sandboxes made, {orphans} deleted",
            alarm=bool(stuck),
            good=not stuck,
        ),
    )


def _money(look: Look) -> Markup:
    reading, budget = look.reading, look.reading.budget
    burn = dollars(burn_picousd_per_hour(reading.running))
    spent, note = dollars(budget.spent_picousd), f"{burn} an hour now"
    if budget.limit_picousd is None or budget.left_picousd is None:
        return tile("Spent", spent, "without a budget", note)
    note += f"; {dollars(budget.reserved_picousd)} reserved, {dollars(max(0, budget.left_picousd))} left"
    taken = budget.spent_picousd + budget.reserved_picousd
    share = taken / budget.limit_picousd if budget.limit_picousd else 1.0
    return tile("Spent", spent, f"of {dollars(budget.limit_picousd)}", note, share=share, alarm=share >= 0.8)


def tile(
    name: str, value: str, unit: str, note: str, *, share: float | None = None, alarm: bool = False, good: bool = False
) -> Markup:
    """One number with its unit, a note, and a meter where it is a share of something."""
    meter: Child = None
    if share is not None:
        full = f"width:{100 * min(1.0, max(0.0, share)):.1f}%"
        meter = element("div", element("i", style=full), class_="meter")
    state = " alarmed" if alarm else " good" if good else ""
    number = element("p", element("b", value), " ", element("span", unit), class_="number")
    return element("div", element("h3", name), number, meter, element("p", note, class_="note"), class_=f"tile{state}")


def mix(look: Look) -> Markup:
    """Every outcome so far, as one bar and in numbers."""
    counters = look.reading.counters
    found = [(outcome, int(counters.get(f"episodes:{outcome}", 0))) for outcome in Outcome]
    found = [(outcome, count) for outcome, count in found if count]
    total = sum(count for _, count in found)
    parts = [
        element(
            "i", class_=outcome_class(outcome), style=f"width:{100 * count / total:.2f}%", title=f"{outcome} {count}"
        )
        for outcome, count in found
    ]
    names = [
        element("li", element("i", class_=outcome_class(outcome)), f"{outcome} ", element("b", f"{count:,}"))
        for outcome, count in sorted(found, key=lambda one: -one[1])
    ]
    empty = None if found else element("p", "No episode has ended yet.", class_="muted")
    return joined((element("div", *parts, class_="mix"), element("ul", *names, class_="legend"), empty))


def outcome_class(outcome: Outcome) -> str:
    """The colour of an outcome: solved, scored nought, or aborted."""
    return "solved" if outcome is Outcome.SOLVED else "unsolved" if outcome.scored else "aborted"


def workers(look: Look) -> Markup:
    """Who is alive."""
    counts = Counter(worker_of(slot) for slot in look.reading.slots)
    rows = [
        (row.worker_id, row.host, str(row.pid), f"{counts[row.worker_id]} of {row.slots}", row.state)
        for row in look.workers[:_WORKER_ROWS]
    ]
    more = f", the first {_WORKER_ROWS}" if len(look.workers) > _WORKER_ROWS else ""
    empty = None if rows else element("p", "None.", class_="muted")
    heading = element("h2", f"Workers ({len(look.workers)}{more})")
    shown = table(("worker", "host", "pid", "live slots", "state"), rows) if rows else empty
    return element("section", heading, shown, class_="card", id="workers")


def episodes(look: Look) -> Markup:
    """Open episodes, then those that ended last."""
    rows = [_running(row, look.at) for row in look.running]
    rows += [_queued(row, look.at) for row in look.queued]
    rows += [_ended(one) for one in look.ended[:_ENDED_ROWS]]
    names = ("episode", "task", "run", "outcome", "reward", "took", "cost", "queued (UTC)", "ended (UTC)")
    empty = None if rows else element("p", "No episode yet: rollout-farm run weekly-sales --episodes 8", class_="muted")
    rest = look.open_count - len(look.running) - len(look.queued)
    note = f"and {rest:,} more open ones" if rest > 0 else ""
    return element(
        "section",
        element("h2", "Episodes ", element("span", note, class_="muted")),
        table(names, rows) if rows else empty,
        class_="card",
        id="episodes",
    )


def _running(row: EpisodeRow, now: float) -> tuple[Child, ...]:
    took = seconds(max(0.0, now - (row.started_at or now)))
    return (*_names(row), badge("running", "running"), "", took, "", clock(row.queued_at), "")


def _queued(row: EpisodeRow, now: float) -> tuple[Child, ...]:
    waited = seconds(max(0.0, now - row.queued_at))
    return (*_names(row), badge("queued", "queued"), "", waited, "", clock(row.queued_at), "")


def _names(row: EpisodeRow) -> tuple[Child, ...]:
    return link(row.episode_id, episode=row.episode_id), row.task_id, row.run_id


def _ended(one: Ended) -> tuple[Child, ...]:
    reward = "-" if one.reward is None else f"{one.reward:.2f}"
    return (
        link(one.episode_id, episode=one.episode_id),
        one.task_id,
        one.run_id,
        badge(str(one.outcome), outcome_class(one.outcome)),
        reward,
        seconds(max(0.0, one.finished_at - one.queued_at)),
        dollars(one.cost_picousd) if one.settled else "not settled",
        clock(one.queued_at),
        clock(one.finished_at),
    )


def badge(name: str, css: str) -> Markup:
    """A state or outcome in its colour."""
    return element("span", name, class_=f"badge {css}")


def table(names: Sequence[str], rows: Sequence[Sequence[Child]]) -> Markup:
    """A table that scrolls by itself where it is too wide."""
    head = element("tr", *(element("th", name) for name in names))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="scroll")


def spans(found: Series, chosen: bool, windows: dict[str, int]) -> Markup:  # noqa: FBT001
    """Links to the windows that the charts can span."""
    links = [
        element("b", name) if chosen and length == found.window_seconds else link(name, window=name)
        for name, length in windows.items()
    ]
    automatic = element("b", "automatic") if not chosen else link("automatic")
    return element("nav", "charts span: ", automatic, *(joined((" · ", one)) for one in links), class_="spans")
