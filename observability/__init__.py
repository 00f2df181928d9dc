"""What every process says of a request, in logs and traces: its moments, its ids, its spans. Floor 0."""
