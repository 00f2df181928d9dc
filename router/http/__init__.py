"""The HTTP front: OpenAI's API, health, and what other features add. All it answers comes from Router."""
