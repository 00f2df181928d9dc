"""How the parts of one cluster know each other: a secret in every call, and TLS where it is configured.

Router, controller and workers make all channels and servers between them here, so that none is without.
"""
