"""Putting the rooms together: the `rollout-farm` command and the embedded one-machine stack. Imported by none."""
