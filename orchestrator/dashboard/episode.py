"""One episode as HTML: what it is, its conversation with tool calls, its sandboxes and its receipt. Pure.

What always holds: what a sandbox printed is shown as text, cut; the whole is in the JSON API and the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from orchestrator.dashboard.lookout import EpisodeView
from orchestrator.dashboard.markup import NOTHING, Child, Markup, element, joined, text
from orchestrator.dashboard.overview import badge, link, outcome_class, table
from orchestrator.dashboard.wording import counted, day_and_clock, dollars, seconds, size
from orchestrator.errors import FarmError
from orchestrator.records import Allocation, Operation
from orchestrator.spending import running_ms
from orchestrator.vocabulary import Phase

_ENTRY_CHARACTERS = 4_000
"""What is shown of one command or observation."""
_FIRST_ENTRIES, _LAST_ENTRIES = 40, 160
"""What is shown of a long transcript."""
_RECEIPT_CHARACTERS = 40_000
_SETUP_NAMES = frozenset({"terminal", "submit"})

Entry = Mapping[str, Any]


def episode_page(view: EpisodeView) -> Markup:
    """Everything about one episode, or why there is nothing."""
    back = element("nav", link("← all episodes"), class_="spans")
    if not view.known:
        reason = view.trouble or (
            f"There is no episode {view.episode_id!r}: the farm does not know it, or its receipt has expired."
        )
        return joined((back, element("p", reason, class_="warning", id="unknown-episode")))
    trouble = element("p", view.trouble, class_="warning") if view.trouble else None
    return joined(
        (
            back,
            trouble,
            _heading(view),
            _facts(view),
            element(
                "div",
                _conversation(view),
                element("div", _phases(view), _sandboxes(view), _receipt(view)),
                class_="halves",
            ),
        )
    )


def _heading(view: EpisodeView) -> Markup:
    state: Child
    if view.settled is not None:
        outcome = view.settled.receipt.outcome
        state = badge(str(outcome), outcome_class(outcome))
    else:
        name = str(view.row.state) if view.row else "unknown"
        state = badge(name, name)
    return element("h2", f"Episode {view.episode_id} ", state, id="episode")


def _facts(view: EpisodeView) -> Markup:
    row, settled = view.row, view.settled
    facts: list[tuple[str, Child]] = []
    if settled is not None:
        receipt = settled.receipt
        facts += [
            ("reward", "none" if receipt.reward is None else f"{receipt.reward:g}"),
            ("detail", receipt.detail or "-"),
            ("task", receipt.task_id),
            ("run", _run(receipt.run_id)),
            ("group", receipt.group_id or "-"),
            ("drive", f"{receipt.drive}, attempt {receipt.attempt}"),
            ("worker", receipt.worker_id or "-"),
            ("queued", f"{day_and_clock(receipt.queued_at)} UTC"),
            ("ended", f"{day_and_clock(receipt.finished_at)} UTC"),
            ("took", seconds(max(0.0, receipt.finished_at - receipt.queued_at))),
            ("cost", _so_far(sum(view.costs.values()), settled=view.over)),
        ]
    elif row is not None:
        began = row.started_at if row.started_at is not None else row.queued_at
        facts += [
            ("task", row.task_id),
            ("run", _run(row.run_id)),
            ("group", row.group_id or "-"),
            ("driven by", row.trainer_id or "itself"),
            ("attempt", str(row.attempt)),
            ("queued", f"{day_and_clock(row.queued_at)} UTC"),
            ("since", seconds(max(0.0, view.at - began))),
            ("cost", _so_far(sum(view.costs.values()), settled=False)),
        ]
    pairs = (element("div", element("dt", name), element("dd", value)) for name, value in facts)
    return element("dl", *pairs, class_="facts")


def _so_far(picousd: int, *, settled: bool) -> str:
    return dollars(picousd) if settled else f"{dollars(picousd)} so far"


def _run(run_id: str) -> Markup:
    return element("a", run_id, href=f"../api/runs/{quote(run_id, safe='')}")


def _conversation(view: EpisodeView) -> Markup:
    entries = list(view.transcript)
    messages = [_prompt(view), *_messages(entries, _calls(view, entries))]
    if not entries:
        note = "Nothing yet." if view.settled is None else "No transcript: none was kept, or it has expired."
        messages.append(element("p", note, class_="muted"))
    if view.settled is not None:
        receipt = view.settled.receipt
        reward = "no reward" if receipt.reward is None else f"reward {receipt.reward:g}"
        messages.append(
            element("p", f"{receipt.outcome}: {reward}", class_=f"verdict {outcome_class(receipt.outcome)}")
        )
    return element("section", element("h2", "Conversation"), *messages, class_="card", id="conversation")


def _prompt(view: EpisodeView) -> Markup:
    if view.row is None:
        return NOTHING
    try:
        prompt = view.row.spec.task.prompt
    except FarmError as error:
        prompt = str(error)
    return _message("task", "", prompt)


def _calls(view: EpisodeView, entries: Sequence[Entry]) -> list[Operation]:
    """The receipt's timings of the transcript's calls; none when the two do not tell of the same calls."""
    steps = view.settled.receipt.operations if view.settled is not None else ()
    calls = [step for step in steps if step.name in _SETUP_NAMES]
    named = [entry["role"] for entry in entries if entry["role"] in _SETUP_NAMES]
    return calls if named == [step.name for step in calls] else []


def _messages(entries: Sequence[Entry], calls: Sequence[Operation]) -> list[Markup]:
    timed = iter(calls)
    shown = []
    for place, entry in enumerate(entries):
        role = str(entry["role"])
        step = next(timed, None) if role in _SETUP_NAMES else None
        if len(entries) > _FIRST_ENTRIES + _LAST_ENTRIES and _FIRST_ENTRIES <= place < len(entries) - _LAST_ENTRIES:
            if place == _FIRST_ENTRIES:
                left = len(entries) - _FIRST_ENTRIES - _LAST_ENTRIES
                shown.append(element("p", f"{left:,} entries are not shown here.", class_="muted"))
            continue
        shown.append(_message(role, _how(step), str(entry["text"])))
    return shown


def _message(role: str, how: str, content: str) -> Markup:
    kind = role if role in ("task", "terminal", "submit", "observation", "notice") else "notice"
    title = {"terminal": "tool call: terminal", "submit": "tool call: submit", "observation": "output"}.get(role, role)
    body = element("pre", text(content, limit=_ENTRY_CHARACTERS)) if content else None
    if role == "observation" and not content:
        body = element("p", "(printed nothing)", class_="muted")
    notes = [how] if how else []
    if len(content) > _ENTRY_CHARACTERS:
        notes.append(f"{len(content):,} characters, cut")
    heading = element("p", element("b", title), element("span", " · ".join(notes)), class_="title")
    return element("article", heading, body, class_=f"message {kind}")


def _how(step: Operation | None) -> str:
    if step is None:
        return ""
    parts = [seconds(step.seconds)]
    if step.exit_code is not None:
        parts.append(f"exit {step.exit_code}")
    if step.timed_out:
        parts.append("timed out")
    elif not step.ok:
        parts.append("failed")
    return ", ".join(parts)


def _phases(view: EpisodeView) -> Markup:
    phases = view.settled.receipt.phases if view.settled is not None else {}
    total = sum(phases.values())
    if not total:
        return NOTHING
    known = [(phase, phases[phase]) for phase in Phase if phase in phases]
    bars = [
        element("i", class_=f"phase-{phase}", style=f"width:{100 * took / total:.2f}%", title=f"{phase} {took:.3f} s")
        for phase, took in known
    ]
    names = [
        element("li", element("i", class_=f"phase-{phase}"), f"{phase} ", element("b", seconds(took)))
        for phase, took in known
    ]
    heading = element("h2", "Phases ", element("span", seconds(total), class_="muted"))
    bar = element("div", *bars, class_="mix")
    return element("section", heading, bar, element("ul", *names, class_="legend"), class_="card")


def _sandboxes(view: EpisodeView) -> Markup:
    rows = [_sandbox(row, view) for row in view.allocations]
    names = ("sandbox", "role", "state", "size", "ran", "cost", "")
    shown = (
        table(names, rows) if rows else element("p", "None yet." if view.settled is None else "None.", class_="muted")
    )
    heading = element("h2", f"Sandboxes ({len(rows)})")
    return element("section", heading, shown, class_="card", id="sandboxes")


def _sandbox(row: Allocation, view: EpisodeView) -> tuple[Child, ...]:
    cost = view.costs.get(row.allocation_id)
    known = f"{row.vcpus} vCPU, {row.memory_mb} MiB" if row.vcpus is not None else "-"
    return (
        row.sandbox_id or "never named",
        str(row.role),
        badge(str(row.state), "stuck" if row.state.stuck else "settled" if row.state.settled else "running"),
        known,
        "-" if cost is None else seconds(running_ms(row, view.at) / 1000),
        "-" if cost is None else _so_far(cost, settled=row.state.settled),
        row.detail or "",
    )


def _receipt(view: EpisodeView) -> Markup:
    if view.settled is None:
        waits = element("p", "It has none yet: the episode is open.", class_="muted")
        return element("section", element("h2", "Receipt"), waits, class_="card", id="receipt")
    receipt = view.settled.receipt
    sizes = ", ".join(f"{name} {size(count)}" for name, count in receipt.sizes.items()) or "-"
    body = json.dumps(view.settled.as_json(), indent=1, ensure_ascii=False)
    whole = element("details", element("summary", "as JSON"), element("pre", text(body, limit=_RECEIPT_CHARACTERS)))
    steps = [(step.name, seconds(step.seconds), _ended(step), size(step.size_bytes)) for step in receipt.operations]
    return element(
        "section",
        element("h2", "Receipt ", element("span", counted(len(steps), "operation"), class_="muted")),
        element("p", f"bytes: {sizes}", class_="muted"),
        table(("operation", "took", "how", "size"), steps[: _FIRST_ENTRIES + _LAST_ENTRIES]) if steps else None,
        whole,
        class_="card",
        id="receipt",
    )


def _ended(step: Operation) -> str:
    if step.timed_out:
        return "timed out"
    code = "" if step.exit_code is None else f", exit {step.exit_code}"
    return ("ok" if step.ok else "failed") + code
