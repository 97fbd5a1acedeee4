"""The truth of the farm and the trainer's way to it.

Vocabulary, settings, Redis keys and scripts; queue, mailbox, limiter, ledger, budgets; the client (pool, episodes,
cancellation, receipts); the reconciler, which finishes what the dead left; status, costs and metrics.

Imports nothing of the other rooms. What it needs of a sandbox provider it takes as an argument (`provider.py`).
"""
