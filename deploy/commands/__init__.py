"""One module for each group of commands; each has `register(app)` and imports what is heavy inside its commands."""
