"""Policies and gradients: what trains against the pool. Imports `orchestrator`, never `workers`."""
