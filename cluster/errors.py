"""What starting, finding and ending a cluster raises. Each message is one line for the user.

ClusterError
├── StateError     the cluster that was asked for is not there, or there already
├── PartError      a part did not come up; says which, and in its own words why
└── LaunchError    the cluster could not be started; nothing of it is left
"""

from __future__ import annotations


class ClusterError(Exception):
    """Base of this floor's errors for the user."""


class StateError(ClusterError):
    """The cluster that was asked for is not there, or there already."""


class PartError(ClusterError):
    """A part of the cluster did not come up, or cannot be reached."""


class LaunchError(ClusterError):
    """The cluster could not be started; nothing of it is left."""
