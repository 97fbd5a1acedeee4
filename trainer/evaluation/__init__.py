"""Evaluations: what was run (`identity`), what came of each episode (`results`), what it says (`report`, `comparison`).

What always holds: a score is made of scored episodes only; infrastructure failures, latency and cost are counted on
their own; two evaluations are compared only when everything but the policy was the same. Only `chat_model` and
`seeded_sampling` need the `train` extra.
"""
