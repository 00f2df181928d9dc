"""Requests asked of a cluster while its workers are killed, stopped and scaled, and what came of them."""
