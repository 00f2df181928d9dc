"""The machines: a Ray of our own on one, the nodes of any, what fits where, and processes by pid."""
