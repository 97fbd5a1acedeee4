"""The layer rules: which room may import, read or spell what. Each rule is shown to fail on a small wrong module."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED_ROOMS = {
    "orchestrator": {"orchestrator"},
    "workers": {"workers", "orchestrator"},
    "trainer": {"trainer", "orchestrator"},
    "deploy": {"deploy", "workers", "trainer", "orchestrator"},
    "tests": {"tests", "deploy", "workers", "trainer", "orchestrator"},
}
HOMES = {
    "torch": ("trainer/",),
    "trl": ("trainer/",),
    "transformers": ("trainer/",),
    "datasets": ("trainer/",),
    "e2b": ("workers/sandboxes/",),
    "openenv": ("workers/terminus/", "trainer/"),
    "gradio": ("orchestrator/dashboard/page.py",),
}
ENVIRONMENT_READERS = ("deploy/", "orchestrator/settings.py", "workers/e2b_local/agent/")
FORBIDDEN_NAMES = {"utils", "util", "common", "manager", "managers", "helper", "helpers", "misc"}
MODULE_LINES = 400
FUNCTION_LINES = 60
KEY = "farm" + ":"


@dataclass(frozen=True)
class Module:
    """One source file, by its path below the root."""

    path: str
    source: str

    @property
    def room(self) -> str:
        return PurePosixPath(self.path).parts[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and first name of every absolute import, wherever it stands; a relative one stays in its room."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.lineno, node.module.split(".")[0]

    def within(self, *homes: str) -> bool:
        return self.path.startswith(homes)


Rule = Callable[[Module], Iterator[str]]


def imports_only_rooms_below(module: Module) -> Iterator[str]:
    allowed = ALLOWED_ROOMS[module.room]
    for line, name in module.imports():
        if name in ALLOWED_ROOMS and name not in allowed:
            yield f"{module.path}:{line}: {module.room} must not import {name}"


def heavy_packages_stay_at_home(module: Module) -> Iterator[str]:
    for line, name in module.imports():
        if name in HOMES and not module.within("tests/", *HOMES[name]):
            yield f"{module.path}:{line}: {name} belongs into {' and '.join(HOMES[name])}"


def only_the_edge_reads_the_environment(module: Module) -> Iterator[str]:
    if module.within("tests/", *ENVIRONMENT_READERS):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            line, names = node.lineno, {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            line, names = node.lineno, {alias.name for alias in node.names}
        else:
            continue
        for name in sorted(names & {"environ", "environb", "getenv", "getenvb"}):
            yield f"{module.path}:{line}: reads os.{name}; take it as an argument"


def keys_are_spelled_in_one_place(module: Module) -> Iterator[str]:
    if module.within("tests/", "orchestrator/keys.py"):
        return
    docstrings = {id(text) for text in _docstrings(module.tree)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if node.value.startswith(KEY):
            yield f"{module.path}:{node.lineno}: spells the key {node.value!r}; build it in orchestrator/keys.py"


def nothing_prints_but_deploy(module: Module) -> Iterator[str]:
    if module.within("deploy/", "tests/bench/", "tests/chaos/", "tests/learning/"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.path}:{node.lineno}: prints; log it"


def modules_are_nouns(module: Module) -> Iterator[str]:
    for part in PurePosixPath(module.path).with_suffix("").parts:
        if part in FORBIDDEN_NAMES:
            yield f"{module.path}: {part!r} says nothing; name what it owns"


def modules_say_what_they_own(module: Module) -> Iterator[str]:
    if module.tree.body and not ast.get_docstring(module.tree):
        yield f"{module.path}: has no docstring"


def modules_and_functions_are_short(module: Module) -> Iterator[str]:
    lines = len(module.source.splitlines())
    if lines > MODULE_LINES:
        yield f"{module.path}: {lines} lines, at most {MODULE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{module.path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"


def scripts_take_their_keys(path: str, source: str) -> Iterator[str]:
    """A .lua file names keys in its comments only."""
    for number, line in enumerate(source.splitlines(), 1):
        if KEY in line.split("--")[0]:
            yield f"{path}:{number}: spells a key; take it from KEYS"


RULES: tuple[Rule, ...] = (
    imports_only_rooms_below,
    heavy_packages_stay_at_home,
    only_the_edge_reads_the_environment,
    keys_are_spelled_in_one_place,
    nothing_prints_but_deploy,
    modules_are_nouns,
    modules_say_what_they_own,
    modules_and_functions_are_short,
)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every bare string: docstrings, and the texts under attributes and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


@cache
def _modules() -> list[Module]:
    """Every module of every room, read and parsed once."""
    paths = (path for room in ALLOWED_ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    modules = _modules()
    assert {module.room for module in modules} == set(ALLOWED_ROOMS)
    problems = [problem for module in modules for problem in rule(module)]
    assert not problems, "\n".join(problems)


def test_the_scripts_keep_the_rule() -> None:
    problems = [
        problem
        for path in sorted((ROOT / "orchestrator").rglob("*.lua"))
        for problem in scripts_take_their_keys(path.name, path.read_text())
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (imports_only_rooms_below, "orchestrator/a.py", "import workers"),
        (imports_only_rooms_below, "orchestrator/a.py", "def f():\n    from deploy.cli import main"),
        (imports_only_rooms_below, "workers/a.py", "from trainer.b import c"),
        (imports_only_rooms_below, "workers/a.py", "import deploy.cli as cli"),
        (imports_only_rooms_below, "trainer/a.py", "import orchestrator.keys, workers.slot"),
        (imports_only_rooms_below, "deploy/a.py", "import tests.support"),
        (heavy_packages_stay_at_home, "orchestrator/a.py", "import torch"),
        (heavy_packages_stay_at_home, "workers/a.py", "from transformers import AutoModel"),
        (heavy_packages_stay_at_home, "deploy/a.py", "if True:\n    import trl.trainer"),
        (heavy_packages_stay_at_home, "workers/e2b_local/a.py", "from e2b import Sandbox"),
        (heavy_packages_stay_at_home, "trainer/a.py", "import e2b"),
        (heavy_packages_stay_at_home, "workers/sandboxes/a.py", "import openenv.core"),
        (heavy_packages_stay_at_home, "orchestrator/dashboard/a.py", "import gradio"),
        (only_the_edge_reads_the_environment, "workers/a.py", "import os\nos.environ['A']"),
        (only_the_edge_reads_the_environment, "trainer/a.py", "import os\nos.getenv('A')"),
        (only_the_edge_reads_the_environment, "orchestrator/a.py", "from os import environ"),
        (keys_are_spelled_in_one_place, "workers/a.py", f"key = '{KEY}open'"),
        (keys_are_spelled_in_one_place, "deploy/a.py", f"key = f'{KEY}episode:{{1}}'"),
        (nothing_prints_but_deploy, "workers/a.py", "print('here')"),
        (modules_are_nouns, "workers/utils.py", ""),
        (modules_are_nouns, "trainer/common/a.py", ""),
        (modules_are_nouns, "tests/support/helpers.py", ""),
        (modules_say_what_they_own, "workers/a.py", "import os"),
        (modules_and_functions_are_short, "workers/a.py", "\n" * 401),
        (modules_and_functions_are_short, "tests/a.py", "def f():\n" + "    pass\n" * 60),
        (modules_and_functions_are_short, "workers/a.py", "async def f():\n" + "    pass\n" * 60),
    ],
)
def test_a_wrong_module_breaks_the_rule(rule: Rule, path: str, source: str) -> None:
    assert len(list(rule(Module(path, source)))) == 1


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (imports_only_rooms_below, "workers/a.py", "import orchestrator.keys\nfrom . import b\nimport redis"),
        (imports_only_rooms_below, "deploy/a.py", "import workers, trainer, orchestrator"),
        (heavy_packages_stay_at_home, "trainer/a.py", "import torch, trl, openenv"),
        (heavy_packages_stay_at_home, "workers/sandboxes/a.py", "import e2b"),
        (heavy_packages_stay_at_home, "tests/integration/a.py", "import e2b, openenv"),
        (only_the_edge_reads_the_environment, "deploy/a.py", "import os\nos.environ['A']"),
        (only_the_edge_reads_the_environment, "workers/a.py", "import os\nos.getpid()"),
        (keys_are_spelled_in_one_place, "workers/a.py", f"'''Writes {KEY}open.'''\nx = 1\n'''{KEY}x'''"),
        (modules_say_what_they_own, "workers/__init__.py", ""),
        (modules_and_functions_are_short, "workers/a.py", "def f():\n" + "    pass\n" * 59),
    ],
)
def test_a_right_module_keeps_the_rule(rule: Rule, path: str, source: str) -> None:
    assert list(rule(Module(path, source))) == []


def test_a_script_that_spells_a_key_breaks_the_rule() -> None:
    assert list(scripts_take_their_keys("a.lua", f"-- KEYS[1] {KEY}open\nredis.call('GET', '{KEY}open')"))
    assert not list(scripts_take_their_keys("a.lua", f"-- KEYS[1] {KEY}open\nredis.call('GET', KEYS[1])"))
