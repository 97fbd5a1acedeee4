"""The sandbox provider of the farm: `orchestrator/provider.py` over the e2b SDK, which E2B and others like it answer.

Owns the way to a sandbox and what its answers mean, no sandbox: `provider` creates, finds and deletes them, `sandbox`
works in one, `shell` runs one command there, `failures` makes typed errors of what the SDK raises, `headers` reads what
the SDK hides. Nothing else of the farm imports the SDK. Every call is one attempt.
"""
