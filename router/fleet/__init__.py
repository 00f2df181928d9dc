"""The workers that there are: watched, connected to, chosen among."""
