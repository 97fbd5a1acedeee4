"""JSON with the place of everything in it, for errors that name a line.

Stricter than `json.loads`: no NaN or Infinity, no number that overflows, no lone surrogates, bounded depth.
The recursion over objects and lists is ours; strings, numbers and literals are read by the standard library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from json import JSONDecodeError
from math import isfinite
from typing import NoReturn

from pydantic import JsonValue

Place = tuple[str | int, ...]
"""Keys and indices from the outermost value down."""
MAX_DEPTH = 64

_BLANK = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class Document:
    """A parsed text: its value, where each member's key or element begins, and the keys given twice."""

    value: JsonValue
    offsets: dict[Place, int]
    repeats: list[tuple[Place, int]]


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise ValueError("number out of range")
    return number


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:  # Python's own guard, whose words tell to lift it
        raise ValueError(f"integer of {len(digits.lstrip('-'))} digits; write a shorter one, or a string") from None


_SCALARS = json.JSONDecoder(parse_constant=_constant, parse_float=_finite, parse_int=_whole)


@dataclass
class _Scanner:
    text: str
    offsets: dict[Place, int] = field(default_factory=dict)
    repeats: list[tuple[Place, int]] = field(default_factory=list)

    def skip(self, at: int) -> int:
        match = _BLANK.match(self.text, at)
        return match.end() if match else at

    def value(self, at: int, place: Place) -> tuple[JsonValue, int]:
        self.offsets.setdefault(place, at)
        if len(place) > MAX_DEPTH:
            raise JSONDecodeError(f"Nested deeper than {MAX_DEPTH} levels", self.text, at)
        if self.text.startswith("{", at):
            return self.members(self.skip(at + 1), place)
        if self.text.startswith("[", at):
            return self.elements(self.skip(at + 1), place)
        return self.scalar(at)

    def scalar(self, at: int) -> tuple[JsonValue, int]:
        try:
            value, end = _SCALARS.raw_decode(self.text, at)
            if isinstance(value, str):
                value.encode()
        except JSONDecodeError:
            raise
        except UnicodeEncodeError:
            raise JSONDecodeError("Lone surrogate in a string", self.text, at) from None
        except ValueError as error:
            raise JSONDecodeError(str(error), self.text, at) from None
        return value, end

    def members(self, at: int, place: Place) -> tuple[JsonValue, int]:
        members: dict[str, JsonValue] = {}
        if self.text.startswith("}", at):
            return members, at + 1
        while True:
            if not self.text.startswith('"', at):
                raise JSONDecodeError("Expecting a field name in double quotes", self.text, at)
            key, end = self.scalar(at)
            inner = (*place, str(key))
            if key in members:
                self.repeats.append((inner, at))
            self.offsets.setdefault(inner, at)
            members[str(key)], end = self.value(self.skip(self.expect(":", self.skip(end))), inner)
            at = self.skip(end)
            if self.text.startswith("}", at):
                return members, at + 1
            at = self.skip(self.expect(",", at))

    def elements(self, at: int, place: Place) -> tuple[JsonValue, int]:
        elements: list[JsonValue] = []
        if self.text.startswith("]", at):
            return elements, at + 1
        while True:
            element, end = self.value(at, (*place, len(elements)))
            elements.append(element)
            at = self.skip(end)
            if self.text.startswith("]", at):
                return elements, at + 1
            at = self.skip(self.expect(",", at))

    def expect(self, mark: str, at: int) -> int:
        if not self.text.startswith(mark, at):
            raise JSONDecodeError(f"Expecting '{mark}'", self.text, at)
        return at + 1


def locate(text: str) -> Document:
    """Parse one JSON text; raises json.JSONDecodeError."""
    scanner = _Scanner(text)
    value, end = scanner.value(scanner.skip(0), ())
    if (rest := scanner.skip(end)) != len(text):
        raise JSONDecodeError("Extra data", text, rest)
    return Document(value, scanner.offsets, scanner.repeats)
