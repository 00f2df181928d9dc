"""The controller: who belongs to the cluster, in which state, and what happens next."""
