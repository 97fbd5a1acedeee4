"""The truth of the farm: vocabulary, settings, Redis keys and scripts, queue, mailbox, limiter, ledger, tasks.

Imports nothing of the other rooms. What it needs of a sandbox provider it takes as an argument (`provider.py`).
"""
