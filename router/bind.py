"""What both fronts raise where they cannot have their address."""


class CannotBind(Exception):
    """The address is taken, or is none of this machine's."""
