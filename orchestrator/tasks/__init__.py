"""What an episode is about: tasks as data, read from files with errors that name the line.

Owns the task schema, the shapes of expectations, the compact form and the built-in tasks. What a task keeps
for the host (expectations, held-out files, scripts) is in no value meant for the policy sandbox, and nothing
but its held-out files is meant for the verifier. Comparing answers is `workers/grading.py`.
"""

from __future__ import annotations

from orchestrator.tasks.graders import grader_names
from orchestrator.tasks.loading import builtin_names, load_builtin, load_tasks, parse_task
from orchestrator.tasks.schema import Task, TaskError

__all__ = [
    "Task",
    "TaskError",
    "builtin_names",
    "grader_names",
    "load_builtin",
    "load_tasks",
    "parse_task",
]
