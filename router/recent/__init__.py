"""The last requests and the last seconds, for people who look: nothing is kept of prompts and answers."""
