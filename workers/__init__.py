"""Running an episode: slots, supervisor, Terminus server, executor, grading, sandbox provider, local sandbox service.

Imports `orchestrator`, never `trainer`.
"""
