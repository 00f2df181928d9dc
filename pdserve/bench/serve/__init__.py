"""An open-loop load test of a server that streams, and what goes in and out of it."""
