"""What the farm costs, measured on this machine: `python -m tests.bench [names...]`.

Each module here measures one thing and has one public function that returns rows. Every number comes from real parts
(Redis, RQ, the E2B SDK, OpenEnv, jails) on the embedded stack, and every load ends by itself.
"""
