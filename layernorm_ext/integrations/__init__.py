"""Plugs the layers into other frameworks, each by a module of its own, which imports the framework."""
