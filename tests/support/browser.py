"""A headless Chromium for tests of pages: a fresh profile a page, and a record of whatever should not have happened.

A test module that needs it says `pytest_plugins = ["tests.support.browser"]` and takes the fixture `open_page`.
PYTEST_DONT_REWRITE: those modules import this one before pytest learns that it is a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

from tests.support.programs import program
from tests.support.waiting import wait_until

_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_SECONDS = 60
"""For anything on a page: two cores may be busy with other tests."""

OpenPage = Callable[..., "Watched"]


@dataclass
class Watched:
    """A page, the hosts that it asked anything of, dialogs that it opened, errors and questions."""

    page: Page
    hosts: set[str] = field(default_factory=set)
    dialogs: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Bodies of the POSTs that it sent."""

    def goto(self, url: str) -> None:
        """Open an address."""
        self.page.goto(url, wait_until="commit")

    def text(self, selector: str = "body") -> str:
        """The visible text of what is there, of all that matches."""
        return "\n".join(self.page.locator(selector).all_inner_texts())

    def wait(self, condition: Callable[[], Any], description: str) -> None:
        """Until something is so; the page lives on meanwhile."""

        def looked() -> Any:
            self.page.wait_for_timeout(20)  # the page's events are handled here
            try:
                return condition()
            except Error:
                return None  # it was just going to another page

        wait_until(looked, seconds=_SECONDS, description=description)

    def wait_text(self, text: str, selector: str = "body") -> None:
        """Until a text is shown."""
        self.wait(lambda: text in self.text(selector), f"{selector} shows {text!r}")

    def color(self, selector: str, name: str = "color") -> tuple[int, ...]:
        """A colour as drawn: red, green, blue."""
        shown = self.page.locator(selector).first.evaluate(f"one => getComputedStyle(one)[{name!r}]")
        return tuple(int(part) for part in str(shown).partition("(")[2].rstrip(")").split(",")[:3])


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the module."""
    chromium = program("chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=list(_ARGUMENTS))
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages, each in a profile of its own."""
    with ExitStack() as exits:

        def make(**options: Any) -> Watched:
            context = browser.new_context(viewport={"width": 1500, "height": 1000}, **options)
            exits.callback(context.close)
            context.set_default_timeout(1000 * _SECONDS)
            watched = Watched(context.new_page())
            _watch(watched)
            return watched

        yield make


def _watch(watched: Watched) -> None:
    page = watched.page

    def on_dialog(dialog: Any) -> None:
        watched.dialogs.append(dialog.message)
        dialog.dismiss()

    def on_request(request: Any) -> None:
        where = urlsplit(request.url)
        if where.scheme not in ("data", "blob"):
            watched.hosts.add(where.hostname or request.url)
        if request.method == "POST":
            watched.asked.append(request.post_data or "")

    page.on("dialog", on_dialog)
    page.on("request", on_request)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
