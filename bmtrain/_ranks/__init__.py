"""Ranks and their connections: launch, rendezvous, groups, communicators, collectives, the context."""
