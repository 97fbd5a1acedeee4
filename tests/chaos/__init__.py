"""Chaos: a whole farm of real parts is killed piece by piece while it runs episodes, and must lose and leak nothing.

`python -m tests.chaos` plays one round; tests/e2e/test_chaos.py plays a short one with a fixed seed.
"""
