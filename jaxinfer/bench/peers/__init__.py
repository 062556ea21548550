"""Runners of other engines. Each is a program for an environment of its own: it imports the peer and no jaxinfer."""
