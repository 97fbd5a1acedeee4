"""What becomes of text on its way to the page: cut, spelled out, escaped, whatever it is."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dashboard.episode import episode_page
from orchestrator.dashboard.lookout import EpisodeView
from orchestrator.dashboard.markup import Markup, cut, element, text
from orchestrator.dashboard.panes import Asked, asked
from orchestrator.records import Operation, SettledReceipt
from orchestrator.vocabulary import Outcome
from tests.support.bare_farm import a_receipt, a_spec

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>alert(2)</script>",
    "</pre></article><h1 id=injected>mine</h1>",
    '" onmouseover="alert(3)',
    "${alert(4)} {{alert(5)}}",
    "**bold** [link](javascript:alert(6))",
    "\x1b[31mred\x1b[0m \x1b]0;title\x07",
    "nul \x00, bell \x07, C1 \x9b31m",
    "turned \u202e around \u2066 \u200b",
    "lone \ud800 surrogate",
    "A" * 65_536,
)


class Reader(HTMLParser):
    """Every element and attribute that a browser would see."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.ids: set[str] = set()
        self.shown: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids |= {value or "" for name, value in attrs if name == "id"}

    def handle_data(self, data: str) -> None:
        self.shown.append(data)


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    return reader


@given(st.text(alphabet=st.characters(codec=None), max_size=300))
def test_any_text_stays_text(value: str) -> None:
    made = element("p", value, title=value)
    reader = read(made)
    assert reader.names == {"p"}
    assert reader.attributes == {"title"}
    made.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", made)


def test_markup_is_not_escaped_again_and_text_always_is() -> None:
    assert element("p", element("b", "<1>"), "<2>", 3, None) == "<p><b>&lt;1&gt;</b>&lt;2&gt;3</p>"
    assert element("a", "x", href="?a=1&b='2'", class_="c", data_pane=None) == (
        '<a href="?a=1&amp;b=&#x27;2&#x27;" class="c">x</a>'
    )


def test_what_is_joined_to_markup_as_text_is_text_again() -> None:
    assert not isinstance(element("b", "x") + "<i>", Markup)


def test_a_long_text_is_cut_in_its_middle_and_says_so() -> None:
    shown = cut("a" * 5000 + "z" * 60_000, 4000)
    assert shown.startswith("a" * 3000)
    assert shown.endswith("z" * 1000)
    assert "61,000 characters not shown" in shown
    assert len(text("\x00" * 65_536, limit=4000)) < 20_000
    assert cut("short", 5) == "short"


def hostile_view() -> EpisodeView:
    """An ended episode in which everything is hostile that somebody else can write."""
    spec = a_spec()
    whole = "\n".join(HOSTILE[:-1])
    receipt = a_receipt(
        spec,
        Outcome.WRONG_ANSWER,
        detail=whole,
        worker_id=whole,
        template=whole,
        task_id=whole,
        operations=(Operation(name=whole, seconds=1), Operation(name="terminal", seconds=0.25, exit_code=3)),
    )
    entries = [{"role": "terminal", "text": whole}, *({"role": "observation", "text": each} for each in HOSTILE)]
    entries.append({"role": whole, "text": whole})
    return EpisodeView(spec.episode_id, 10.0, None, SettledReceipt(receipt=receipt, allocations=()), (), tuple(entries))


def test_an_episode_full_of_hostile_text_adds_no_element_and_no_handler() -> None:
    page = episode_page(hostile_view())
    reader = read(page)
    assert reader.names.isdisjoint({"img", "script", "h1"})
    assert not {name for name in reader.attributes if name.startswith("on")}
    assert reader.ids == {"episode", "conversation", "sandboxes", "receipt"}
    shown = "".join(reader.shown)
    assert "<img src=x onerror=alert(1)>" in shown
    assert "\\x1b[31mred" in shown
    assert "\\u202e" in shown
    assert "\\x00" in shown
    assert "61,536 characters not shown" in shown
    assert "javascript:" not in html.unescape(" ".join(re.findall(r'href="([^"]*)"', page)))


def test_a_call_shows_how_long_it_took_and_how_it_ended_where_the_receipt_tells_of_the_same_calls() -> None:
    page = "".join(read(episode_page(hostile_view())).shown)
    assert "tool call: terminal250 ms, exit 3" in page


def test_the_middle_of_a_very_long_transcript_is_left_out() -> None:
    entries = tuple({"role": "observation", "text": f"line-{number}-"} for number in range(1000))
    receipt = a_receipt(a_spec(), Outcome.SOLVED)
    view = EpisodeView("e-1", 1.0, None, SettledReceipt(receipt=receipt, allocations=()), (), entries)
    shown = "".join(read(episode_page(view)).shown)
    assert "line-0-" in shown
    assert "line-999-" in shown
    assert "line-500-" not in shown
    assert "800 entries are not shown here" in shown


def test_an_unknown_episode_is_said_to_be_unknown() -> None:
    shown = "".join(read(episode_page(EpisodeView("<b>e-nope", 0.0))).shown)
    assert "There is no episode '<b>e-nope'" in shown


@pytest.mark.parametrize(
    "given_text", ["", "null", "[]", '{"search": 1}', "{" * 5000, "[" * 4000, '{"search": "", "digests": [1]}']
)
def test_a_question_that_is_none_asks_for_the_overview(given_text: str) -> None:
    assert asked(given_text) == Asked()


def test_a_question_names_episode_window_and_what_is_shown_already() -> None:
    told = json.dumps({"search": "?episode=e-1&episode=e-2&window=1+h", "digests": {"tiles": "abc"}})
    assert asked(told) == Asked("e-2", "1 h", {"tiles": "abc"})
