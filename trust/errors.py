"""What is wrong with what a part was given to be known by."""


class TrustError(Exception):
    """A secret or a certificate that cannot be used. Names the setting or the file; quotes no secret."""
