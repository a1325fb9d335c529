"""Bridges from bonsai checkpoints to other libraries. Nothing else in the package knows of them."""
