"""What every worker has, whatever its role: an identity, a control server, messages, a way to the engine."""
