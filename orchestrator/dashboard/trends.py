"""The charts over time, all counted from receipts: running episodes, rewards, outcomes, phases, money."""

from __future__ import annotations

from orchestrator.dashboard import charts
from orchestrator.dashboard.history import RING, WINDOWS, Series, gap_before, nearest_rank, series, window_of
from orchestrator.dashboard.lookout import Look
from orchestrator.dashboard.markup import NOTHING, Child, Markup, element
from orchestrator.dashboard.overview import mix, spans, table
from orchestrator.dashboard.wording import day_and_clock, dollars_short, seconds
from orchestrator.vocabulary import Phase


def trends(look: Look, window: str | None) -> Markup:
    """All charts; `window` is a name of WINDOWS, anything else lets the span follow the newest episodes."""
    length = WINDOWS.get(window or "", 0) or window_of(look.ended, look.at)
    found = series(look.ended, look.starts, look.at, length)
    name = next(name for name, seconds_ in WINDOWS.items() if seconds_ == length)
    limit = look.reading.limiter.concurrency_effective
    buckets = found.buckets
    running = charts.area(
        [bucket.running for bucket in buckets],
        css="running",
        limit=float(limit),
        limit_text=f"limit {limit:,}",
        window=name,
        label=_number,
    )
    rewards = charts.line(
        [bucket.mean_reward for bucket in buckets], css="solved", top=1.0, window=name, label=lambda v: f"{v:.1f}"
    )
    outcomes = charts.stacked(
        [
            ("solved", [bucket.solved for bucket in buckets]),
            ("unsolved", [bucket.unsolved for bucket in buckets]),
            ("aborted", [bucket.aborted for bucket in buckets]),
        ],
        window=name,
        label=_number,
    )
    spent = charts.stacked(
        [("money", [float(bucket.cost_picousd) for bucket in buckets])], window=name, label=dollars_short
    )
    width = found.bucket_seconds
    per = f"per {width:g} s" if width < 60 else f"per {width / 60:g} min"
    return element(
        "section",
        element("div", element("h2", "Outcomes so far"), mix(look), class_="card wide"),
        spans(found, chosen=window in WINDOWS, windows=WINDOWS),
        _gap(gap_before(look.ended, look.at, length)),
        _card("Running episodes", "on average " + per, running),
        _card("Mean reward", "of scored episodes " + per, rewards),
        _card("Ended episodes", per, outcomes, _legend("solved", "unsolved", "aborted")),
        _card("Time by phase", "mean of ended episodes " + per, _phases(found, name)),
        _card("Phase latencies", "within the span", _latencies(found)),
        _card("Cost", "of ended episodes " + per, spent),
        class_="trends",
    )


def _gap(before: float | None) -> Markup:
    """That the charts are empty before this moment because nobody remembers, not because nothing happened."""
    if before is None:
        return NOTHING
    text = f"Only the newest {RING:,} episodes, back to {day_and_clock(before)} UTC; for longer use Prometheus."
    return element("p", text, class_="gap")


def _phases(found: Series, window: str) -> Markup:
    layers = [(f"phase-{phase}", [bucket.mean_phase(phase) for bucket in found.buckets]) for phase in Phase]
    return charts.stacked(layers, window=window, label=lambda value: seconds(value) if value else "0")


def _latencies(found: Series) -> Markup:
    rows: list[tuple[Child, ...]] = []
    for phase in Phase:
        took = [value for bucket in found.buckets for value in bucket.phases.get(phase, ())]
        name = element("span", element("i", class_=f"phase-{phase}"), str(phase), class_="key")
        if took:
            rows.append((name, seconds(nearest_rank(took, 0.5)), seconds(nearest_rank(took, 0.95)), f"{len(took):,}"))
    return table(("phase", "median", "95 %", "episodes"), rows) if rows else element("p", "No episode in this span.")


def _legend(*names: str) -> Markup:
    meaning = {"unsolved": "scored 0", "aborted": "aborted, no score"}
    items = [element("li", element("i", class_=name), meaning.get(name, name)) for name in names]
    return element("ul", *items, class_="legend")


def _card(name: str, note: str, *content: Child) -> Markup:
    return element("div", element("h2", name, " ", element("span", note, class_="muted")), *content, class_="card")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.1f}"
